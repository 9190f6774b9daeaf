"""Overrides of methods of a model that trains with an optimizer of tfkfac.

Of Keras' classes only `compile` is overridden. All other overrides are
attributes of the compiled model. They are removed when the model is compiled
again.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfkfac.callbacks.backup import ChiefBackup
from tfkfac.callbacks.comparison import common_order
from tfkfac.callbacks.supervision import Supervision
from tfkfac.capture.model_taps import metrics_are_reset
from tfkfac.capture.walk import detach, unbuilt
from tfkfac.compat.models import (
    Arguments,
    Callbacks,
    override_averages,
    wrap_compiled_steps,
    wrap_fit,
)
from tfkfac.compat.overrides import (
    Below,
    Override,
    drop_from,
    keep_on,
    override,
)
from tfkfac.compat.strategies import build_from_specs
from tfkfac.shell.loss_scale import find_optimizer, undo_overflows
from tfkfac.shell.model import uses_xla
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.training.guards import as_errors

_OVERRIDES, _BOUND = "_tfkfac_supervision", "_tfkfac_optimizer"


def supervise(model: keras.Model) -> None:
    """Attach the tfkfac optimizer of a compiled model, and supervise the model.

    A Keras optimizer has no reference to its model. `compile` always runs
    before the first trace, also in `load_model`.
    """
    previous = drop_from(model, _OVERRIDES)
    if previous is not None:
        previous.close()
    # Detach the optimizer of an earlier `compile`.
    outer = getattr(model, "optimizer", None)
    optimizer = find_optimizer(outer)
    if (bound := drop_from(model, _BOUND)) is not None:
        # A method may outlive its optimizer until it is garbage-collected.
        earlier, method = (reference() for reference in bound)
        if earlier is None or earlier is not optimizer:
            detach(model, method)
    if optimizer is not None:
        scaler = None if outer is optimizer else outer
        optimizer.attach(model, loss_scaler=scaler)
        if type(scaler) is keras.optimizers.LossScaleOptimizer:
            undo_overflows(scaler, optimizer)
        bound = weakref.ref(optimizer), weakref.ref(optimizer.method)
        keep_on(model, _BOUND, lambda: bound)
        if model.built and not unbuilt(model):
            # Build now: building in the first step would cause a retrace.
            optimizer.build_in_scope(model.trainable_variables)
            if scaler is not None:
                # Build once: Keras calls `build` again when it loads a model,
                # which would create a new scale and counter.
                keep_on(
                    scaler,
                    "_tfkfac_build_once",
                    lambda: override(
                        scaler,
                        "build",
                        lambda below, *args, **kwargs: (
                            None if scaler.built else below(*args, **kwargs)
                        ),
                    ),
                )
                # Only a built optimizer can load its variables from files.
                with model.distribute_strategy.scope():
                    scaler.build(model.trainable_variables)
    overrides = _supervise(model, optimizer) + build_from_specs(model)
    if optimizer is not None:
        if uses_xla(model):
            run = optimizer.method.run_compiled
            overrides.append(wrap_compiled_steps(model, run))
        if optimizer.use_ema:
            names = "fit", "evaluate", "predict"
            overrides += [wrap_fit(model, _swap_averages, n) for n in names]
    if overrides:
        # Use an `ExitStack`: Keras would search a list for layers to save.
        stack = keep_on(model, _OVERRIDES, contextlib.ExitStack)
        for item in overrides:
            stack.callback(item.remove)


def _supervise(
    model: keras.Model, optimizer: SecondOrderOptimizer | None
) -> list[Override]:
    """Override `fit`, `evaluate`, `train_on_batch`, `get_metrics_result`.

    Under `tfkfac.MultiWorkerMirroredStrategy` the workers detect failures of
    each other in `fit` and `evaluate`, with any optimizer.
    """
    strategy = model.distribute_strategy
    watch = getattr(strategy, "watch", None)
    watched = contextlib.nullcontext if watch is None else watch.fit

    @contextlib.contextmanager
    def within(callbacks: Callbacks, kwargs: Arguments) -> Iterator[Callbacks]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(watched())
            extra = stack.enter_context(common_order(strategy, kwargs))
            callbacks = [*extra, *callbacks] if extra else callbacks
            if optimizer is None:
                yield callbacks
                return
            stack.enter_context(as_errors())
            if watch is not None:
                stack.enter_context(strategy.stall_detector.training())
            stack.callback(optimizer.plan.end_fit)
            for callback in callbacks:
                if isinstance(callback, ChiefBackup):
                    stack.enter_context(callback)
            first_epoch = kwargs.get("initial_epoch", 0)
            supervision = Supervision(optimizer, callbacks, first_epoch)
            yield [supervision, *callbacks, supervision.last]

    def evaluate(below: Below, *args: Any, **kwargs: Any) -> Any:
        with watched():
            return below(*args, **kwargs)

    def train_on_batch(below: Below, *args: Any, **kwargs: Any) -> Any:
        assert optimizer is not None
        optimizer.check_iterations()
        with as_errors():
            result = below(*args, **kwargs)
        optimizer.count_steps()
        return result

    def get_metrics_result(below: Callable[[], Any]) -> Any:
        results = below()
        if tf.inside_function() or not metrics_are_reset(model):
            return results
        streaks = optimizer.method.job.streaks if optimizer is not None else ()
        if not streaks or not int(streaks[0].excluded.numpy()):
            return results
        # Return NaN where no batch has counted; Keras' mean would be 0.
        return keras.tree.map_structure(
            lambda result: tf.fill(tf.shape(result), math.nan), results
        )

    overrides: list[Override] = []
    if watch is not None:
        overrides.append(override(model, "evaluate", evaluate))
    if watch is not None or optimizer is not None:
        overrides.append(wrap_fit(model, within))
    if optimizer is not None:
        methods = train_on_batch, get_metrics_result
        overrides += [override(model, f.__name__, f) for f in methods]
    return overrides


@contextlib.contextmanager
def _swap_averages(callbacks: Callbacks, _: Arguments) -> Iterator[Callbacks]:
    """Make `SwapEMAWeights` swap the weights of all wrapped optimizers."""

    def swap(callback: Any, below: Below, optimizer: Any) -> None:
        owner = find_optimizer(callback.model.optimizer)
        for x in [optimizer] if owner is None else owner.averaging_optimizers:
            below(x)

    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            override_averages(callback, functools.partial(swap, callback))
    yield callbacks
