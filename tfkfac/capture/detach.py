"""The end of the taps on a model."""

import keras

from tfkfac.capture.model_tap import ModelTap
from tfkfac.capture.taps import Tap, forget_first_call
from tfkfac.capture.walk import walk
from tfkfac.compat.overrides import release_moments


def detach(model: keras.Model, owner: object | None) -> None:
    """Removes everything that taps a model for somebody.

    Args:
        model: The model.
        owner: Whose taps on layers to remove; None for those that are gone.
    """
    for node in walk(model):
        forget_first_call(node.layer)
        release_moments(node.layer)
        Tap.close(node.layer, owner)
    ModelTap.close_all(model)
