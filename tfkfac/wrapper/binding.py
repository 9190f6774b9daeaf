"""Binding of an optimizer to its model in `Model.compile`.

A Keras optimizer never learns which model it trains. `compile` is the one
moment that always comes before the first trace, also in `load_model`, so one
hook there calls `attach`.
"""

import functools
import weakref
from typing import Any

import keras

from tfkfac.capture.walk import unbuilt
from tfkfac.wrapper.optimizer import SecondOrderOptimizer, detach

_bound: weakref.WeakKeyDictionary[
    keras.Model, weakref.ref[SecondOrderOptimizer]
] = weakref.WeakKeyDictionary()


def bind(model: keras.Model) -> None:
    """Attaches the model's optimizer if it is one of ours.

    Args:
        model: A compiled model. An optimizer of ours that it was compiled with
            before is detached.
    """
    outer = getattr(model, "optimizer", None)
    scaler = None
    if isinstance(outer, keras.optimizers.LossScaleOptimizer):
        outer, scaler = outer.inner_optimizer, outer
    previous = _bound.pop(model, None)
    if previous is not None and previous() is not outer:
        # It may be gone already, but its taps are not.
        detach(model, previous())
    if isinstance(outer, SecondOrderOptimizer):
        outer.attach(model, loss_scaler=scaler)
        _bound[model] = weakref.ref(outer)
        if model.built and not unbuilt(model):
            # Variables created in the first step would cost a second trace.
            with keras.name_scope(outer.name):
                outer.build(model.trainable_variables)


def install() -> None:
    """Puts the hook on the class that defines `compile`.

    Not on `keras.Model`: `load_model` compares a model's `compile` with that
    class's and compiles nothing when they differ.
    """
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    original = owner.compile
    if getattr(original, "_tfkfac_hook", False):
        return

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        bind(self)

    compile._tfkfac_hook = True  # type: ignore[attr-defined]
    owner.compile = compile
