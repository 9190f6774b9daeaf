"""The optimizers of the examples, by name."""

import argparse

import keras

import tfkfac

NAMES = ("kfac", "sgd", "adam", "sgdm", "fosi", "fosi_adam", "fosi_sgd")
FOSI_NAMES = ("fosi", "fosi_adam", "fosi_sgd")
# Those that are another one or wrap it, and so have its learning rate.
BASES = {
    "sgdm": "sgd",
    "fosi": "adam",
    "fosi_adam": "adam",
    "fosi_sgd": "sgd",
}


def base_of(name: str) -> str:
    """The name of the optimizer that the learning rate is meant for."""
    return BASES.get(name, name)


def make_optimizer(
    name: str, steps: int, options: argparse.Namespace
) -> keras.optimizers.Optimizer:
    """An optimizer whose learning rate decays linearly to 0."""
    rate = keras.optimizers.schedules.PolynomialDecay(
        options.learning_rate[name], steps, end_learning_rate=0.0
    )
    if name == "kfac":
        inner = keras.optimizers.SGD(rate, momentum=0.5)
        return tfkfac.KFAC(inner, **options.kfac_options)
    if base_of(name) == "adam":
        optimizer = keras.optimizers.Adam(rate)
    else:
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    if name in FOSI_NAMES:
        return tfkfac.FOSI(optimizer, **options.fosi_options)
    return optimizer
