"""Backup and restoration of a training job on one or several workers."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import signal
import threading
import warnings
import zlib
from collections.abc import Iterable
from types import FrameType
from typing import Any, Self

import h5py
import keras
import numpy as np
from typing_extensions import override

from tfkfac.cluster.stopping import Stopping
from tfkfac.cluster.waiting import print_line
from tfkfac.compat.models import set_first_epoch, skip_batches
from tfkfac.distributed.agreement import exchange, find_differences, first_of
from tfkfac.saving.entries import FORMAT, format_fault
from tfkfac.shell.loss_scale import find_optimizer
from tfkfac.shell.optimizer import SecondOrderOptimizer

EXIT_CODE = 128 + signal.SIGTERM  # exit code of a shell after SIGTERM
_SUFFIX = ".weights.h5"
# At least 6 and 9 digits: `ModelCheckpoint` usually has `epoch-{epoch:02d}`.
_NAME = re.compile(r"epoch-(\d{6,})(?:_batch-(\d{9,}))?\.weights\.h5")
_MISSING = "is not there"  # reported for a file that this worker cannot see
_POSITION_GROUP = "chief_backup"
_SETTINGS = "settings"  # dataset of the group with compressed JSON
_NUM_KEPT_BACKUPS = 2
_PARTIAL_PREFIX = ".writing-"  # prefix of incomplete files
_DIGEST_MARK = b"\ntfkfac sha256 "
_NUM_HEX_DIGITS = 64
_CHUNK_BYTES = 2**20
# Entries of an optimizer's description that may differ from a backup: derived
# from other entries, without effect on the training, or settings for which
# loading converts the state.
_MAY_DIFFER = {
    "TensorFlow and Keras",
    "argument accelerator_fraction",
    "argument distribution",
    "argument gradient_worker_fraction",
    "argument layout",
    "argument max_skipped_steps",
    "argument solver",
    "collectives",
    "inner optimizer's learning_rate",
    "jit_compile",
    "layers",
    "layers without curvature",
    "learning rate set in training",
    "metrics",
    "rest optimizer's learning_rate",
}


def get_optimizer(callback: keras.callbacks.Callback) -> SecondOrderOptimizer:
    """Return the tfkfac optimizer of the model that runs a callback."""
    outer = getattr(callback.model, "optimizer", None)
    optimizer = find_optimizer(outer)
    if optimizer is None:
        raise ValueError(
            f"`{type(callback).__name__}` must be used with an optimizer of "
            f"tfkfac. Received: optimizer={outer}"
        )
    return optimizer


class ConfigCallback(keras.callbacks.Callback):
    """A callback that Keras creates from the result of `get_config`."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create a callback from its config.

        Args:
            config: The result of `get_config`.
        """
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfkfac")
class ChiefBackup(
    ConfigCallback, contextlib.AbstractContextManager["ChiefBackup"]
):
    """Back up training after each epoch, and resume it after an interruption.

    After each epoch, worker 0 writes the weights, the state of the optimizer
    with its curvature, the state of random layers and the epoch. When training
    begins, all workers load the newest backup. With the same data, workers and
    modes, the resumed training is equal bit for bit to an uninterrupted one.
    (Except for MR-DHO2 inside an interval: its estimation starts again.)

    Pass the callback on all workers; it also works in a job of one process.
    All workers share one directory. (`keras.callbacks.BackupAndRestore` needs
    one directory per worker, and their backups may be of different epochs.)

    On SIGTERM to any worker, the job backs up after the current batch and
    exits with code 143. The resumed job reads the earlier batches of the epoch
    from the data and skips them; the logs of `fit` for that epoch cover only
    the other batches. A second SIGTERM ends a worker at once. Several workers
    need `tfkfac.MultiWorkerMirroredStrategy`.

    A backup is written to a temporary file, which is renamed when it is
    complete and on disk. If the job is killed while it writes, or the disk is
    full (which warns), the last backup remains. A backup ends with an SHA-256
    checksum of its content. If a backup is damaged on any worker, all workers
    ignore it, print its name on stderr, and load the backup before it.

    A backup contains the settings of the model and the optimizer. `fit`
    refuses a backup with other settings, except for the learning rate, the
    lengths of schedules, the distribution over workers and the solver. To go on
    with other settings, load the file by `model.load_weights` and use a new
    directory. Neither the data is compared, nor values that are not in the
    config of a layer or a loss.

    >>> backup = tfkfac.callbacks.ChiefBackup("backups/run-1")
    >>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")
    >>> model.fit(dataset, epochs=10, callbacks=[backup])

    Args:
        directory: Directory of the backups, for this job only. If the job has
            several machines, all of them must share the directory.
        delete_checkpoint: True to delete the backups when training ends
            normally. Defaults to True.

    Raises:
        ValueError: If `directory` is a URL. In `fit`, if the model has no
            optimizer of this package or is not built, if the workers do not
            see the same backups, if a backup is of another model or optimizer
            or in a format of another version of tfkfac, or if there are
            backups and all of them are damaged.
    """

    save_freq = "epoch"
    is_collective = True

    def __init__(
        self, directory: str | pathlib.Path, delete_checkpoint: bool = True
    ) -> None:
        super().__init__()
        if re.match(r"[A-Za-z][\w+.-]+:/", str(directory)):
            raise ValueError(
                "Argument `directory` must be a path in a file system, for "
                "example of a mounted bucket, not a URL. "
                f"Received: directory={directory!r}"
            )
        self.directory = pathlib.Path(directory)
        self.delete_checkpoint = delete_checkpoint
        self._context = contextlib.ExitStack()
        self._stopping: Stopping | None = None
        self._sigterm_received = False
        self._epoch = self.num_skipped = self._num_done = 0
        self._damaged: set[str] = set()  # names of damaged backups
        self._settings: dict[str, Any] = {}  # required of a backup

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {
            "directory": str(self.directory),
            "delete_checkpoint": self.delete_checkpoint,
        }

    def __exit__(self, *error: Any) -> None:
        """Restore the signal handler after `fit`, also after an error."""
        self._stopping = None
        if self.model is not None:
            # The first epoch of a backup is that of this `fit` only.
            set_first_epoch(self.model, None)
        self._context.close()
        if self._sigterm_received:  # received after the last batch
            self._sigterm_received = False
            signal.raise_signal(signal.SIGTERM)

    # ------------------------------------------------------------ restoring
    @override
    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = get_optimizer(self)
        if not self.model.built:
            raise ValueError(
                "`ChiefBackup` must be used with a built model, into which it "
                "can load a backup: call the model on a batch before `fit`. "
                f"Received: model '{self.model.name}', not built"
            )
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        settings = {
            # Compare only the class of an object, such as a schedule: the
            # length of a schedule may depend on `epochs`.
            name: value.get("class")
            if name.startswith("argument ") and isinstance(value, dict)
            else value
            for name, value in optimizer.description().items()
            if name not in _MAY_DIFFER
        }
        outer = type(optimizer.bound_model().optimizer).__name__
        settings["optimizer of the model"] = outer
        self._settings = json.loads(json.dumps(settings, default=str))
        if self._is_chief:
            self._delete_partial_files()
        backup = self._find_newest_valid()
        self.num_skipped = 0
        if backup is not None:
            with warnings.catch_warnings():
                # Raise where Keras warns: variables of another optimizer.
                skipped = "Skipping variable loading"
                warnings.filterwarnings("error", message=skipped)
                self.model.load_weights(backup)
            with h5py.File(backup, "r") as file:
                position = file[_POSITION_GROUP].attrs
                self._epoch = int(position["epoch"])
                self.num_skipped = int(position["batch"])
            place = f"epoch {self._epoch}"
            if self.num_skipped:
                place = f"batch {self.num_skipped} of epoch {self._epoch + 1}"
            print_line(f"resumed from '{backup}' after {place}")
            set_first_epoch(self.model, self._epoch)
            self._context.callback(skip_batches(self.model, self.num_skipped))
        self._install_sigterm_handler()

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch > self._epoch:
            self.num_skipped = 0
        self._epoch, self._num_done = epoch, 0

    def _find_newest_valid(self) -> pathlib.Path | None:
        """Return the newest undamaged backup, equal on all workers, or None."""
        local = {"names": [path.name for path in self._backups()]}
        names = self._exchange(local, "backups")[0]["names"]
        faults: dict[str, str] = {}
        for name in reversed(names):
            path = self.directory / name
            # Check on all workers, whose directories may be on different disks.
            check = _check_backup(path, self._settings)
            checks = self._exchange(check, "backup")
            checksum = checks[0].get("checksum")
            unaware = [
                i
                for i, check in enumerate(checks)
                if (i and check.get("fault") == _MISSING)
                or (checksum and check.get("checksum", checksum) != checksum)
            ]
            if unaware:
                raise ValueError(
                    "Argument `directory` of `ChiefBackup` must be a directory "
                    f"of all workers. Workers {unaware} do not see the backup "
                    f"'{name}' of worker 0. Received: "
                    f"directory='{self.directory}'"
                )
            refusals = [x["refusal"] for x in checks if "refusal" in x]
            if refusals:
                raise ValueError(f"The backup '{path}' {refusals[0]}")
            damaged = [
                f"{check['fault']} (on worker {i})" if i else check["fault"]
                for i, check in enumerate(checks)
                if "fault" in check
            ]
            if not damaged:
                self._damaged = set(faults)
                return path
            faults[name] = f"'{name}' {damaged[0]}"
            print_line(f"The backup '{path}' {damaged[0]}. It is left out.")
        if faults:
            raise ValueError(
                "Argument `directory` of `ChiefBackup` must have a backup that "
                f"is whole, or none: {'; '.join(faults.values())}. Delete them "
                "to train from the beginning. Received: "
                f"directory='{self.directory}'"
            )
        return None

    # --------------------------------------------------------------- saving
    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._num_done < self.num_skipped and not self.model.stop_training:
            raise ValueError(
                f"The backup in '{self.directory}' is of batch "
                f"{self.num_skipped} of epoch {epoch + 1}, but the data has "
                f"only {self._num_done} batches. Train with the same data and "
                "batch size, or delete this backup to resume the one before it."
            )
        if self._is_chief:
            self._write(epoch + 1)

    def _write(self, epoch: int, batch: int = 0) -> bool:
        """Write a backup from which `fit` resumes; return True on success.

        Epochs and batches are counted from 0.
        """
        batch_name = f"_batch-{batch:09}" if batch else ""
        path = self.directory / f"epoch-{epoch:06}{batch_name}{_SUFFIX}"

        # `path` is always the complete old or the complete new file.
        temporary = path.with_name(f"{_PARTIAL_PREFIX}{path.name}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.model.save_weights(temporary, overwrite=True)
            with h5py.File(temporary, "a") as file:
                group = file.create_group(_POSITION_GROUP)
                group.attrs["epoch"] = epoch
                group.attrs["batch"] = batch
                group.attrs["format"] = FORMAT
                text = zlib.compress(json.dumps(self._settings).encode())
                group[_SETTINGS] = np.frombuffer(text, np.uint8)
            # HDF5 ignores the bytes after the length that its header contains.
            digest = _digest(temporary, temporary.stat().st_size)
            with temporary.open("ab") as content:
                content.write(_DIGEST_MARK + digest.encode())
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not isinstance(error, (OSError, RuntimeError)):
                raise
            warnings.warn(
                f"Epoch {epoch} cannot be backed up in "
                f"'{self.directory}': {error}. The last backup stays.",
                stacklevel=2,
            )
            return False
        self._damaged.discard(path.name)
        files = self._backups()
        valid = [file for file in files if file.name not in self._damaged]
        kept = valid[-_NUM_KEPT_BACKUPS:]
        self._delete([file for file in files if file not in kept])
        return True

    # ---------------------------------------------------------- terminating
    def _install_sigterm_handler(self) -> None:
        """Make SIGTERM stop all workers after the same batch, if supported."""
        strategy = self.model.distribute_strategy
        self._stopping = getattr(strategy, "stopping", None)
        is_alone = get_optimizer(self).method.job.topology.processes == 1
        # Only the main thread may set a signal handler.
        is_main_thread = threading.current_thread() is threading.main_thread()
        if not is_main_thread:
            warnings.warn(
                "`ChiefBackup` cannot answer SIGTERM to this process, as `fit` "
                "does not run in the main thread: a job that ends goes on from "
                "its last epoch.",
                stacklevel=2,
            )
        if not (self._stopping or is_alone) or not is_main_thread:
            return
        previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def receive(number: int, frame: FrameType | None) -> None:
            self._sigterm_received = True
            signal.signal(signal.SIGTERM, previous)  # for a second SIGTERM

        signal.signal(signal.SIGTERM, receive)
        self._context.callback(signal.signal, signal.SIGTERM, previous)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With `steps_per_execution`, `batch` may be past the end of the data.
        size = self.params.get("steps") or batch + 1
        self._num_done = num_done = min(batch + 1, size)
        if num_done <= self.num_skipped:
            return
        must_stop = self._sigterm_received
        if self._stopping is not None:
            must_stop = self._stopping.end_batch(must_stop)
        if must_stop:
            self._sigterm_received = False
            # Back up, and exit all processes.
            get_optimizer(self).gather_state()
            is_saved = self._is_chief and self._write(self._epoch, num_done)
            # Let all workers wait until worker 0 has written the backup.
            chief, *_ = self._exchange({"saved": is_saved}, "leave")
            saved = chief["saved"]
            outcome = "is backed up" if saved else "ends, not backed up,"
            print_line(
                f"SIGTERM: training {outcome} after batch {num_done} of epoch "
                f"{self._epoch + 1}."
            )
            raise SystemExit(EXIT_CODE)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        if self._is_chief and self.delete_checkpoint:
            self._delete_partial_files()
            self._delete(self._backups())

    def _delete_partial_files(self) -> None:
        """Delete the incomplete files of a killed job."""
        self._delete(self.directory.glob(f"{_PARTIAL_PREFIX}*{_SUFFIX}"))

    def _delete(self, paths: Iterable[pathlib.Path]) -> None:
        """Delete files; warn if deletion fails, for example of a directory."""
        for path in paths:
            try:
                path.unlink()
            except OSError as error:
                warnings.warn(
                    f"'{path}' cannot be deleted: {error}", stacklevel=2
                )

    def _backups(self) -> list[pathlib.Path]:
        """Return the backups, oldest first."""
        paths = self.directory.glob(f"epoch-*{_SUFFIX}")
        backups = [path for path in paths if _NAME.fullmatch(path.name)]
        return sorted(backups, key=lambda path: _parse_name(path.name))

    @property
    def _is_chief(self) -> bool:
        return get_optimizer(self).method.job.topology.process == 0

    def _exchange(
        self, local: dict[str, Any], purpose: str
    ) -> list[dict[str, Any]]:
        """Gather the values of all workers, by worker index."""
        job = get_optimizer(self).method.job
        return exchange(local, job.among_processes(purpose))


def _parse_name(name: str) -> tuple[int, int]:
    """Return the epoch and the batch in the name of a backup."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _check_backup(
    path: pathlib.Path, settings: dict[str, Any]
) -> dict[str, str]:
    """Return {"checksum": digest}, else {"fault" or "refusal": reason}."""
    try:
        size = path.stat().st_size - len(_DIGEST_MARK) - _NUM_HEX_DIGITS
        with path.open("rb") as content:
            content.seek(max(size, 0))
            tail = content.read()
        if size < 0 or not tail.startswith(_DIGEST_MARK):
            return {"fault": "has no checksum at its end"}
        checksum = _digest(path, size)
    except FileNotFoundError:
        return {"fault": _MISSING}
    except OSError as error:
        return {"fault": f"cannot be read: {error}"}
    if tail.removeprefix(_DIGEST_MARK) != checksum.encode():
        return {"fault": "does not have the content of its checksum"}
    try:
        with h5py.File(path, "r") as file:
            position = file[_POSITION_GROUP].attrs
            version = position.get("format", "unknown")
            if not np.array_equal(version, FORMAT):
                advice = (
                    "Go on with the version of tfkfac that wrote it, or delete "
                    "it to go on from the one before."
                )
                return {"refusal": f"{format_fault(version)}. {advice}"}
            stored = int(position["epoch"]), int(position["batch"])
            text = zlib.decompress(file[_POSITION_GROUP][_SETTINGS][:])
    except (OSError, KeyError, TypeError, ValueError) as error:
        return {"fault": f"cannot be read: {error}"}
    if stored != _parse_name(path.name):
        return {"fault": "is of epoch {} and batch {} inside".format(*stored)}
    sources = "in the backup", "here"
    if differences := find_differences([json.loads(text), settings], sources):
        advice = (
            "Use a directory for each job. Delete the backups to train from "
            "the beginning, or load this one by `model.load_weights` to go on "
            "with other settings in a new directory."
        )
        reason = f"is of another model or optimizer: {first_of(differences)}"
        return {"refusal": f"{reason}. {advice}"}
    return {"checksum": checksum}


def _digest(path: pathlib.Path, size: int) -> str:
    """Return the hexadecimal SHA-256 of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            digest.update(file.read(min(_CHUNK_BYTES, size - start)))
    return digest.hexdigest()


def _sync(path: pathlib.Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
