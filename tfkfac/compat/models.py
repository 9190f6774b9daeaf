"""What Keras keeps of a model and its layers without promising it."""

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def kept_losses(model: keras.Model) -> Iterator[None]:
    """Keeps the losses that layers have added in their last call."""
    layers = list(model._flatten_layers())
    kept = [(list(x._losses), set(x._loss_ids)) for x in layers]
    try:
        yield
    finally:
        for layer, (losses, identities) in zip(layers, kept, strict=True):
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(identities)
