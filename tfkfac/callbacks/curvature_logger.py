"""Numbers of a second-order optimizer, logged into files."""

import csv
import functools
import importlib.util
import math
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TextIO

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.callbacks.backup import optimizer_of
from tfkfac.checks import check_count
from tfkfac.fosi.optimizer import FOSI
from tfkfac.gauss_newton.optimizer import GaussNewton
from tfkfac.kfac.optimizer import KFAC

COLUMNS = ("step", "epoch", "seconds", "quantity", "layer", "value")


class Value(NamedTuple):
    """A number, of the whole model or of one of its layers."""

    quantity: str
    value: float
    layer: str = ""


class CurvatureLogger(keras.callbacks.Callback):
    """Logs what the optimizer does, at the end of each epoch or more often.

    For K-FAC: what the last step did (see `KFAC.last_step`), how often factors
    and decompositions were renewed, and for each layer whose factors this
    process keeps the "trace" of its Kronecker block A x G and its "condition",
    that of A x G plus the damping. For FOSI: the Ritz values in use, and the
    share of the time that each replica has waited where some only estimate.
    For Gauss-Newton: what the last step did (see `GaussNewton.last_step`).
    For all: the skipped steps and the seconds of a step.

    At the end of an epoch, numbers of the whole model are added to `logs`, for
    `History` and for the callbacks after this one, as "curvature/..."; with a
    directory these, those of layers, and the logs are in files.

    Args:
        directory: Where to write "curvature.csv" (of further workers
            "curvature-1.csv", ...), a row for each number, and events for
            TensorBoard if it is installed. None writes nothing.
        every: Training steps between rows, besides those of the epochs' ends.
        layers: Whether to log the layers. It takes the eigenvalues of all
            factors: seconds for those of thousands of rows.
        append: Whether to go on with the file that is there, as after a
            restart.

    Raises:
        ValueError: If `every` is not a number of steps; in `fit`, if the model
            has no optimizer of this package.
    """

    def __init__(
        self,
        directory: str | pathlib.Path | None = None,
        *,
        every: int | None = None,
        layers: bool = True,
        append: bool = False,
    ) -> None:
        super().__init__()
        self.directory = None if directory is None else pathlib.Path(directory)
        if every is not None:
            every = check_count("every", every, 1)
        self.every = every
        self.layers = layers
        self.append = append
        self._epoch = 0
        self._steps = 0
        self._logged = 0
        self._began = 0.0
        self._at = 0.0
        self._file: TextIO | None = None
        self._events: Any = None

    # ----------------------------------------------------------------- fit
    @override
    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = optimizer_of(self)
        self._steps = self._logged = int(optimizer.method.job.clock)
        self._began = self._at = time.perf_counter()
        if self.directory is not None:
            self._open(self.directory)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self.every is not None and self._steps % self.every == 0:
            self._log(dict(logs or {}))

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._log({} if logs is None else logs)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self.append = True  # another `fit` goes on
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()
        self._file = self._events = None

    # ------------------------------------------------------------- numbers
    def _log(self, logs: dict[str, Any]) -> None:
        """Writes a row of each number, and puts the model's into `logs`."""
        own = list(self._values())
        self._write([*(Value(k, float(v)) for k, v in logs.items()), *own])
        for one in own:
            if not one.layer:
                logs[f"curvature/{one.quantity}"] = one.value
        self._logged, self._at = self._steps, time.perf_counter()

    def _values(self) -> Iterator[Value]:
        """All there is to say now."""
        optimizer = optimizer_of(self)
        if steps := self._steps - self._logged:
            passed = time.perf_counter() - self._at
            yield Value("seconds_per_step", passed / steps)
        yield Value("skipped_steps", int(optimizer.skipped_steps))
        if isinstance(optimizer, FOSI):
            for i, value in enumerate(optimizer.spectrum()):
                yield Value(f"ritz_value_{i}", float(value))
            for rank, share in enumerate(optimizer.idle_share()):
                yield Value(f"idle_share_{rank}", float(share))
        if not isinstance(optimizer, KFAC | GaussNewton):
            return
        did = optimizer.last_step
        yield from (Value(name, value) for name, value in did.items())
        if isinstance(optimizer, KFAC):
            yield Value("factor_updates", int(optimizer.factor_updates))
            yield Value("inverse_updates", int(optimizer.inverse_updates))
            if self.layers and "damping" in did:
                for path, factors in optimizer.factors().items():
                    trace, condition = layer_curvature(factors, did["damping"])
                    yield Value("trace", trace, path)
                    yield Value("condition", condition, path)

    # --------------------------------------------------------------- files
    def _open(self, directory: pathlib.Path) -> None:
        process = optimizer_of(self).method.job.topology.process
        directory.mkdir(parents=True, exist_ok=True)
        name = f"curvature-{process}.csv" if process else "curvature.csv"
        path = directory / name
        is_new = not (self.append and path.exists())
        self._file = path.open("w" if is_new else "a", newline="")
        if is_new:
            csv.writer(self._file).writerow(COLUMNS)
        if importlib.util.find_spec("tensorboard") is not None:
            self._events = tf.summary.create_file_writer(
                str(directory), filename_suffix=f".worker-{process}"
            )

    def _write(self, values: list[Value]) -> None:
        if self._file is None:
            return
        passed = f"{time.perf_counter() - self._began:.3f}"
        csv.writer(self._file).writerows(
            (self._steps, self._epoch, passed, name, layer, f"{value:.8g}")
            for name, value, layer in values
        )
        self._file.flush()
        if self._events is None:
            return
        with self._events.as_default():
            for name, value, layer in values:
                if math.isfinite(value):
                    title = f"curvature/{name}/{layer}".rstrip("/")
                    tf.summary.scalar(title, value, self._steps)
        self._events.flush()


# ---------------------------------------------------------------- of a layer
def layer_curvature(
    factors: Mapping[str, np.ndarray], damping: float
) -> tuple[float, float]:
    """The trace and the condition of a layer's block.

    The eigenvalues of a Kronecker product are the products of those of its
    factors. The condition is of these with the damping added. Factors are some
    of "A" and "G": a matrix, the vector of a diagonal, or a stack of the
    matrices of groups.
    """
    if not all(np.all(np.isfinite(factor)) for factor in factors.values()):
        return math.nan, math.nan
    spectra = [_spectrum(factor) for factor in factors.values()]
    trace, largest, smallest = (
        functools.reduce(np.multiply, [of(s, axis=-1) for s in spectra])
        for of in (np.sum, np.max, np.min)
    )
    with np.errstate(divide="ignore"):
        condition = (np.max(largest) + damping) / (np.min(smallest) + damping)
    return float(np.sum(trace)), float(condition)


def _spectrum(factor: np.ndarray) -> np.ndarray:
    """Eigenvalues along the last axis; rounding makes none negative."""
    values = np.asarray(factor, np.float64)
    if values.ndim == 1:
        return values
    return np.maximum(np.linalg.eigvalsh(values), 0.0)
