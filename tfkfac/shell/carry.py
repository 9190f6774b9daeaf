"""Curvature in the ways of saving that Keras does not ask an optimizer in."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tfkfac.compat.saving import carry_in_legacy_files, carry_in_state_trees
from tfkfac.shell.optimizer import SecondOrderOptimizer


def ours(optimizer: Any) -> SecondOrderOptimizer | None:
    """The optimizer of ours that a model's optimizer is or has inside."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer if isinstance(optimizer, SecondOrderOptimizer) else None


def state_of(optimizer: Any) -> Mapping[str, np.ndarray] | None:
    """What an optimizer of ours writes into a `.keras` file too."""
    own = ours(optimizer)
    if own is None:
        return None
    store: dict[str, np.ndarray] = {}
    own.save_own_variables(store)
    return store


def set_state(optimizer: Any, store: Mapping[str, np.ndarray] | None) -> None:
    """Gives an optimizer of ours what `state_of` has returned."""
    own = ours(optimizer)
    if own is not None:
        own.load_own_variables({} if store is None else store)


def install() -> None:
    """From now on, state trees and `.h5` files carry curvature."""
    carry_in_state_trees(state_of, set_state)
    carry_in_legacy_files(state_of, set_state)
