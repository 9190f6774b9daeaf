"""Backups of a job, for all of its workers."""

import contextlib
import pathlib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

import h5py
import keras
from typing_extensions import override

from tfkfac.callbacks.files import (
    WRITING,
    append_checksum,
    replace_file,
    verify_checksum,
)
from tfkfac.cluster.stopping import Stopping
from tfkfac.compat.models import set_first_epoch, skip_batches
from tfkfac.distributed.agreement import exchange
from tfkfac.shell.optimizer import SecondOrderOptimizer, ours

# What a shell calls the end of a process by it.
EXIT_CODE = 128 + signal.SIGTERM
_ENDING = ".weights.h5"
_NAME = re.compile(r"epoch-(\d+)(?:_batch-(\d+))?\.weights\.h5")
_ABSENT = "is not there"  # a fault of a backup that worker 0 has
_OWN = "chief_backup"  # group of a file with what Keras leaves out
_KEPT = 2


def optimizer_of(callback: keras.callbacks.Callback) -> SecondOrderOptimizer:
    """The optimizer of the model that a callback is set on.

    Raises:
        ValueError: If it is none of ours.
    """
    given = getattr(callback.model, "optimizer", None)
    optimizer = ours(given)
    if optimizer is None:
        raise ValueError(
            f"`{type(callback).__name__}` must be used with an optimizer of "
            f"tfkfac. Received: optimizer={given}"
        )
    return optimizer


class ChiefBackup(
    keras.callbacks.Callback, contextlib.AbstractContextManager["ChiefBackup"]
):
    """Backs up training, so that a job may end at any moment and go on.

    After each epoch the first worker writes the weights, the optimizer with all
    of its curvature, the state of random layers and the epoch. When training
    begins, all workers go back to the newest backup that is there, and so on
    with what follows it, to the last bit as if nothing had happened (with the
    same data, workers and modes; with others it goes on from there too).

    Pass it on all workers. In a job of one process it works alike. Where
    `keras.callbacks.BackupAndRestore` needs a directory for each worker, which
    can have backups of different epochs, this needs one for all.

    A job that gets the signal SIGTERM, on one worker or all, backs up once more
    after the batch that it is in and exits with code 143. It goes on after that
    batch; the batches before it are taken from the data once more and left out.
    (What `fit` logs for that epoch is then of its rest; a second SIGTERM ends a
    worker at once; several workers need `tfkfac.MultiWorkerMirroredStrategy`.)

    A backup is written beside its place and put there when it is whole and on
    disk: a job that is killed while it writes has the last one. So has one
    whose disk is full, with a warning. A backup ends in a checksum (SHA-256)
    of its content, which is verified before any worker loads it. If it is
    damaged on one worker, all of them leave it out, name it on stderr, and go
    back to the backup before it.

    Args:
        directory: Where to, for this job alone; on several machines a
            directory of all of them.
        delete_checkpoint: Whether to delete the backups when training ends as
            it should. Defaults to `True`.

    Raises:
        ValueError: In `fit`, if the model has no optimizer of this package, if
            the workers do not see the same backups, or if there are backups
            and all of them are damaged.
    """

    save_freq = "epoch"
    is_collective = True

    def __init__(
        self, directory: str | pathlib.Path, delete_checkpoint: bool = True
    ) -> None:
        super().__init__()
        self.directory = pathlib.Path(directory)
        self.delete_checkpoint = delete_checkpoint
        self._around = contextlib.ExitStack()
        self._stopping: Stopping | None = None
        self._is_asked = False
        self._epoch = self._skipped = self._done = 0
        self._damaged: set[str] = set()  # names

    def __exit__(self, *error: Any) -> None:
        """A `fit` ends, as it should or not."""
        self._stopping = None
        self._around.close()
        if self._is_asked:  # and nobody has answered
            self._is_asked = False
            signal.raise_signal(signal.SIGTERM)

    # ------------------------------------------------------------ restoring
    @override
    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = optimizer_of(self)
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if self._is_chief:
            self._tidy()
        backup = self._choose()
        self._skipped = 0
        if backup is not None:
            self._restore(backup)
        self._answer_signals()

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        set_first_epoch(self.model, None)  # not for the next `fit` too
        if epoch > self._epoch:
            self._skipped = 0
        self._epoch, self._done = epoch, 0

    def _choose(self) -> pathlib.Path | None:
        """Return the newest whole backup, the same on all workers, or None.

        Raises:
            ValueError: If the others do not see what the first worker sees, or
                if no backup is whole.
        """
        mine = {"names": [path.name for path in self._files()]}
        names = self._seen(mine, "backups")[0]["names"]
        faults: dict[str, str] = {}
        for name in reversed(names):
            path = self.directory / name
            # Each worker may read a file of its own, on a disk of its own.
            seen = self._seen(_inspect(path), "backup")
            checksum = seen[0].get("checksum")
            absent = [
                i
                for i, one in enumerate(seen)
                if (i and one.get("fault") == _ABSENT)
                or (checksum and one.get("checksum", checksum) != checksum)
            ]
            if absent:
                raise ValueError(
                    "Argument `directory` of `ChiefBackup` must be a directory "
                    f"of all workers. Workers {absent} do not see the backup "
                    f"'{name}' of worker 0. Received: "
                    f"directory='{self.directory}'"
                )
            damaged = [
                f"{one['fault']} (on worker {i})" if i else one["fault"]
                for i, one in enumerate(seen)
                if "fault" in one
            ]
            if not damaged:
                self._damaged = set(faults)
                return path
            faults[name] = f"'{name}' {damaged[0]}"
            print(
                f"tfkfac: The backup '{path}' {damaged[0]}. It is left out.",
                file=sys.stderr,
                flush=True,
            )
        if faults:
            raise ValueError(
                "Argument `directory` of `ChiefBackup` must have a backup that "
                f"is whole, or none: {'; '.join(faults.values())}. Delete them "
                "to train from the beginning. Received: "
                f"directory='{self.directory}'"
            )
        return None

    def _restore(self, path: pathlib.Path) -> None:
        with warnings.catch_warnings():
            # Keras leaves out the variables of an optimizer of another kind.
            skipped = "Skipping variable loading"
            warnings.filterwarnings("error", message=skipped)
            self.model.load_weights(path)
        with h5py.File(path, "r") as file:
            own = file[_OWN]
            self._epoch = int(own.attrs["epoch"])
            self._skipped = int(own.attrs.get("batch", 0))
        set_first_epoch(self.model, self._epoch)
        self._around.callback(skip_batches(self.model, self._skipped))

    # --------------------------------------------------------------- saving
    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._done < self._skipped and not self.model.stop_training:
            raise ValueError(
                f"The backup in '{self.directory}' is of batch {self._skipped} "
                f"of epoch {epoch + 1}, but the data has only {self._done} "
                "batches. Train with the same data and batch size, or delete "
                "this backup to go on from the one before."
            )
        if self._is_chief:
            self._write(epoch + 1)

    def _write(self, epoch: int, batch: int = 0) -> bool:
        """Backs up training before a batch of an epoch; True if it can."""
        part = f"_batch-{batch:09}" if batch else ""
        path = self.directory / f"epoch-{epoch:06}{part}{_ENDING}"

        def write(beside: pathlib.Path) -> None:
            self.model.save_weights(beside, overwrite=True)
            with h5py.File(beside, "a") as file:
                own = file.create_group(_OWN)
                own.attrs["epoch"] = epoch
                own.attrs["batch"] = batch
            append_checksum(beside)

        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            replace_file(path, write)
        except (OSError, RuntimeError) as error:
            warnings.warn(
                f"Epoch {epoch} cannot be backed up in "
                f"'{self.directory}': {error}. The last backup stays.",
                stacklevel=2,
            )
            return False
        self._damaged.discard(path.name)
        files = self._files()
        whole = [file for file in files if file.name not in self._damaged]
        self._delete([file for file in files if file not in whole[-_KEPT:]])
        return True

    # ---------------------------------------------------------- terminating
    def _answer_signals(self) -> None:
        """Lets SIGTERM end all workers after a batch, if they can together."""
        own = getattr(self.model.distribute_strategy, "stopping", None)
        is_alone = optimizer_of(self).method.job.topology.processes == 1
        self._stopping = own or (Stopping() if is_alone else None)
        # Python lets no other thread choose what a signal does.
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main:
            warnings.warn(
                "`ChiefBackup` cannot answer SIGTERM to this process, as `fit` "
                "does not run in the main thread: a job that ends goes on from "
                "its last epoch.",
                stacklevel=2,
            )
        if self._stopping is None or not in_main:
            return
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def receive(number: int, frame: FrameType | None) -> None:
            self._is_asked = True
            signal.signal(signal.SIGTERM, before)  # of the second one

        signal.signal(signal.SIGTERM, receive)
        self._around.callback(signal.signal, signal.SIGTERM, before)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._done = done = batch + 1
        if self._stopping is None or done <= self._skipped:
            return
        if self._is_asked:
            self._stopping.request()
        if self._stopping.end_batch():
            self._is_asked = False
            self._leave(done)

    def _leave(self, done: int) -> None:
        """Backs up after some batches of the epoch, and ends all processes."""
        optimizer_of(self).gather_state()
        is_saved = self._is_chief and self._write(self._epoch, done)
        # Nobody ends before the first worker has written.
        chief, *_ = self._seen({"saved": is_saved}, "leave")
        what = "is backed up" if chief["saved"] else "ends, not backed up,"
        print(
            f"tfkfac: SIGTERM: training {what} after batch {done} of epoch "
            f"{self._epoch + 1}.",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(EXIT_CODE)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        if self._is_chief and self.delete_checkpoint:
            self._tidy()
            self._delete(self._files())

    def _tidy(self) -> None:
        """Removes what a killed job has not finished writing."""
        self._delete(self.directory.glob(f"{WRITING}*{_ENDING}"))

    def _delete(self, paths: Iterable[pathlib.Path]) -> None:
        """Delete files; a directory in the place of a file stays."""
        for path in paths:
            try:
                path.unlink()
            except OSError as error:
                warnings.warn(
                    f"'{path}' cannot be deleted: {error}", stacklevel=2
                )

    def _files(self) -> list[pathlib.Path]:
        """The backups, in the order of time."""
        paths = [
            path
            for path in self.directory.glob(f"epoch-*{_ENDING}")
            if _NAME.fullmatch(path.name)
        ]
        return sorted(paths, key=lambda path: _position(path.name))

    @property
    def _is_chief(self) -> bool:
        return optimizer_of(self).method.job.topology.process == 0

    def _seen(self, mine: dict[str, Any], purpose: str) -> list[dict[str, Any]]:
        """Something that each worker has, by worker."""
        job = optimizer_of(self).method.job
        if job.topology.processes == 1:
            return [mine]
        return exchange(mine, job.among_processes(purpose))


def _position(name: str) -> tuple[int, int]:
    """Epoch and batch in the name of a backup."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _inspect(path: pathlib.Path) -> dict[str, str]:
    """Return the `checksum` of a backup that is whole, or its `fault`."""
    try:
        checksum = verify_checksum(path)
    except FileNotFoundError:
        return {"fault": _ABSENT}
    except OSError as error:
        return {"fault": f"cannot be read: {error}"}
    except ValueError as error:
        return {"fault": str(error)}
    try:
        with h5py.File(path, "r") as file:
            own = file[_OWN].attrs
            stored = int(own["epoch"]), int(own["batch"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        return {"fault": f"cannot be read: {error}"}
    if stored != _position(path.name):
        return {"fault": "is of epoch {} and batch {} inside".format(*stored)}
    return {"checksum": checksum}
