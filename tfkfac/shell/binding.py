"""Binding of an optimizer to its model in `Model.compile`.

A Keras optimizer never learns which model it trains. `compile` is the one
moment that always comes before the first trace, also in `load_model`, so one
hook there calls `attach`.
"""

import weakref

import keras

from tfkfac.capture.walk import detach, unbuilt
from tfkfac.compat.optimizers import build_once
from tfkfac.compat.overrides import drop_from, keep_on
from tfkfac.shell.loss_scale import undo_overflows
from tfkfac.shell.optimizer import SecondOrderOptimizer

_BOUND = "_tfkfac_optimizer"


def bind(model: keras.Model) -> None:
    """Attaches the optimizer of a compiled model if it is one of ours.

    One of ours that it was compiled with before is detached.
    """
    outer = getattr(model, "optimizer", None)
    scaler = None
    if isinstance(outer, keras.optimizers.LossScaleOptimizer):
        outer, scaler = outer.inner_optimizer, outer
    previous = drop_from(model, _BOUND)
    if previous is not None and previous() is not outer:
        # It may be gone already, but its taps are not.
        owner = previous()
        detach(model, None if owner is None else owner.method)
    if isinstance(outer, SecondOrderOptimizer):
        outer.attach(model, loss_scaler=scaler)
        if type(scaler) is keras.optimizers.LossScaleOptimizer:
            undo_overflows(scaler, outer)
        keep_on(model, _BOUND, lambda: weakref.ref(outer))
        if model.built and not unbuilt(model):
            # Variables created in the first step would cost a second trace.
            outer.build_in_scope(model.trainable_variables)
            if scaler is not None:
                # Weights in files are for an optimizer that is built.
                with model.distribute_strategy.scope():
                    build_once(scaler, model.trainable_variables)
