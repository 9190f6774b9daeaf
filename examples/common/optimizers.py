"""The optimizers of the examples, by name."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import keras

import tfkfac

FIRST_ORDER = {
    "sgd": lambda rate, **settings: keras.optimizers.SGD(
        rate, **{"momentum": 0.9, **settings}
    ),
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "rmsprop": keras.optimizers.RMSprop,
}
# The optimizer inside, whose learning rate is meant.
FOSI_BASES = {"fosi": "adam", "fosi_adam": "adam", "fosi_sgd": "sgd"}
NAMES = ("kfac", *FIRST_ORDER, *FOSI_BASES)
RATES = {"kfac": 0.1, "sgd": 0.05, "adam": 1e-3, "adamw": 1e-3, "rmsprop": 1e-3}


@dataclasses.dataclass(frozen=True)
class Choice:
    """An optimizer on the command line, with settings for its constructor.

    Attributes:
        text: As it was given.
        name: One of `NAMES`.
        settings: Keyword arguments; `learning_rate` is the first one of a
            linear decay to 0.
    """

    text: str
    name: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"{self.name!r} is none of {', '.join(NAMES)}")

    def rate(self, defaults: Mapping[str, float]) -> float:
        """The first learning rate.

        Args:
            defaults: What suits the data, by the name of the optimizer.
        """
        base = FOSI_BASES.get(self.name, self.name)
        default = defaults.get(base, RATES[base])
        return self.settings.get("learning_rate", default)

    def make(
        self, steps: int, defaults: Mapping[str, float]
    ) -> keras.optimizers.Optimizer:
        """An optimizer for a training of so many steps.

        Raises:
            TypeError, ValueError: If it refuses its settings.
        """
        rate = keras.optimizers.schedules.PolynomialDecay(
            self.rate(defaults), steps, end_learning_rate=0.0
        )
        settings = dict(self.settings)
        settings.pop("learning_rate", None)
        if self.name == "kfac":
            names = {f.name for f in dataclasses.fields(tfkfac.Distribution)}
            wire = {k: settings.pop(k) for k in names & set(settings)}
            if wire:
                mode = settings.get("distribution", "comm_opt")
                settings["distribution"] = tfkfac.Distribution(mode, **wire)
            return tfkfac.KFAC(rate, **settings)
        if self.name in FOSI_BASES:
            inner = FIRST_ORDER[FOSI_BASES[self.name]](rate)
            return tfkfac.FOSI(inner, **settings)
        return FIRST_ORDER[self.name](rate, **settings)


def parse_optimizer(text: str) -> Choice:
    """Parses NAME[:KEY=VALUE...]; values are JSON or else text."""
    name, *pairs = text.split(":")
    try:
        return Choice(text, name, dict(map(_setting, pairs)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _setting(pair: str) -> tuple[str, Any]:
    key, equals, text = pair.partition("=")
    if not key.isidentifier() or not equals:
        raise ValueError(f"{pair!r} is not KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text
