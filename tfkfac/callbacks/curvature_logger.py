"""Keras callback that logs scalars of a second-order optimizer."""

import functools
import importlib.util
import math
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.callbacks.backup import ConfigCallback, get_optimizer
from tfkfac.checks import check_count, if_given
from tfkfac.fosi.optimizer import FOSI
from tfkfac.gauss_newton.optimizer import GaussNewton
from tfkfac.kfac.optimizer import KFAC


class Value(NamedTuple):
    """Named scalar of the whole model (`layer=""`) or of one layer."""

    quantity: str
    value: float
    layer: str = ""


@keras.saving.register_keras_serializable(package="tfkfac")
class CurvatureLogger(ConfigCallback):
    """Log scalars of the optimizer after each epoch or every `every` steps.

    - All optimizers: "skipped_steps", "seconds_per_step" (wall seconds since
      the last point).
    - `KFAC`: `KFAC.last_step`, "factor_updates", "inverse_updates"; for each
      layer whose factors this process stores, the "trace" of its Kronecker
      block A x G and the "condition" number of A x G + damping I.
    - `FOSI`: "ritz_value_i", NaN before the first estimation and on
      accelerators.
    - `GaussNewton`: `GaussNewton.last_step`.

    At the end of an epoch the scalars of the whole model are added to `logs` as
    "curvature/...", for `History`, `keras.callbacks.CSVLogger` and all other
    callbacks after this one. With a directory, all scalars are written there
    for TensorBoard.

    >>> logger = tfkfac.callbacks.CurvatureLogger("runs/first", every=100)
    >>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")
    >>> model.fit(x, y, callbacks=[logger])

    Args:
        directory: Directory of the TensorBoard event files, one file for each
            worker. None writes no files. Needs the package `tensorboard`.
            Defaults to None.
        every: Batches between two logged points. Defaults to None: log
            only at the ends of epochs.
        layers: True to write the scalars of each layer to the directory. This
            computes the eigenvalues of all factors: wall seconds for factors of
            thousands of rows. Defaults to True.

    Raises:
        ValueError: If `every` is not a positive integer, or TensorBoard is
            not installed and `directory` is given; in `fit`, if the model has
            no optimizer of this package.
    """

    def __init__(
        self,
        directory: str | pathlib.Path | None = None,
        *,
        every: int | None = None,
        layers: bool = True,
    ) -> None:
        super().__init__()
        if directory is not None and not importlib.util.find_spec(
            "tensorboard"
        ):
            raise ValueError(
                "Argument `directory` must be None where TensorBoard is not "
                "installed; `pip install tensorboard` installs it. "
                f"Received: directory={directory!r}"
            )
        self.directory = directory
        self.every = if_given(check_count, "every", every, 1)
        self.layers = layers
        self._batches = 0
        self._logged = 0  # number of updates at the last call
        self._last_time = 0.0
        self._seconds_per_step = math.nan
        self._writer: Any = None

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        directory = self.directory and str(self.directory)
        return {
            "directory": directory,
            "every": self.every,
            "layers": self.layers,
        }

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        job = get_optimizer(self).method.job
        self._batches, self._logged = 0, int(job.clock)
        self._last_time, self._seconds_per_step = time.perf_counter(), math.nan
        if self.directory is not None:
            self._writer = tf.summary.create_file_writer(
                str(self.directory),
                filename_suffix=f".worker-{job.topology.process}",
            )

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before = self._batches
        self._batches += self.model.steps_per_execution
        if self.every is None:
            return
        if before // self.every != self._batches // self.every:
            self._log(dict(logs or {}))

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._log({} if logs is None else logs)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _log(self, logs: dict[str, Any]) -> None:
        """Write all scalars; add the scalars of the model to `logs`."""
        steps = int(get_optimizer(self).method.job.clock)
        values = list(self._values(steps))
        # Some metrics of Keras are arrays, such as `F1Score`.
        scalars = [
            *(Value(k, float(v)) for k, v in logs.items() if not np.ndim(v)),
            *values,
        ]
        if self._writer is not None:
            with self._writer.as_default():
                for quantity, number, layer in scalars:
                    title = f"curvature/{quantity}/{layer}".rstrip("/")
                    tf.summary.scalar(title, number, steps)
            self._writer.flush()
        for value in values:
            if not value.layer:
                logs[f"curvature/{value.quantity}"] = value.value
        self._logged, self._last_time = steps, time.perf_counter()

    def _values(self, steps: int) -> Iterator[Value]:
        """Yield the current scalars of the optimizer, after `steps` updates."""
        optimizer = get_optimizer(self)
        if steps > self._logged:
            elapsed_s = time.perf_counter() - self._last_time
            self._seconds_per_step = elapsed_s / (steps - self._logged)
        yield Value("seconds_per_step", self._seconds_per_step)
        yield Value("skipped_steps", int(optimizer.skipped_steps))
        if isinstance(optimizer, FOSI):
            values = optimizer.spectrum()
            if not len(values):  # `CSVLogger` fixes its columns in epoch 1
                values = np.full([optimizer.method.geometry.directions], np.nan)
            for i, value in enumerate(values):
                yield Value(f"ritz_value_{i}", float(value))
        if not isinstance(optimizer, KFAC | GaussNewton):
            return
        last_step = optimizer.last_step
        yield from (Value(name, value) for name, value in last_step.items())
        if isinstance(optimizer, KFAC):
            yield Value("factor_updates", int(optimizer.factor_updates))
            yield Value("inverse_updates", int(optimizer.inverse_updates))
            if self.layers and self._writer and "damping" in last_step:
                damping = last_step["damping"]
                for path, factors in optimizer.factors().items():
                    trace, condition = layer_curvature(factors, damping)
                    yield Value("trace", trace, path)
                    yield Value("condition", condition, path)


def layer_curvature(
    factors: Mapping[str, np.ndarray], damping: float
) -> tuple[float, float]:
    """Compute the trace of a block A x G and the condition of A x G + damping.

    The eigenvalues of a Kronecker product are the products of the eigenvalues
    of its factors. A factor is a matrix, the diagonal as a vector, or a stack
    `(groups, n, n)` of one matrix per group.
    """
    if not all(np.all(np.isfinite(factor)) for factor in factors.values()):
        return math.nan, math.nan
    spectra = []
    for factor in factors.values():
        # The elements of a diagonal factor are its eigenvalues.
        eigenvalues = np.asarray(factor, np.float64)
        if eigenvalues.ndim > 1:
            eigenvalues = np.maximum(np.linalg.eigvalsh(eigenvalues), 0.0)
        spectra.append(eigenvalues)
    trace, largest, smallest = (
        functools.reduce(np.multiply, [reduce(s, axis=-1) for s in spectra])
        for reduce in (np.sum, np.max, np.min)
    )
    with np.errstate(divide="ignore"):
        condition = (np.max(largest) + damping) / (np.min(smallest) + damping)
    return float(np.sum(trace)), float(condition)
