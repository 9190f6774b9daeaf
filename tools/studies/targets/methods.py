"""The optimizers by name, and what is tried of each.

A method is NAME[:KEY=VALUE...] with arguments of the constructor. Of "kfac",
`rest=adam` makes the rest optimizer Adam with the rate that was best for Adam
itself. With `schedule=constant` at the end rates do not fall.
"""

import argparse
import dataclasses
import hashlib
import math
import pathlib
import runpy
from collections.abc import Callable, Sequence
from typing import Any

from command import Variant, parse_variant
from targets.problems import Problem
from targets.run import Run

BASELINES = ("sgd", "adam", "adamw", "muon")
KFAC = "kfac"
OUTSIDE = ".py"  # is in the name of an optimizer from a file
CONSTANT = ":schedule=constant"  # of no optimizer; ends the name of a method
FIRST_KFAC_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is tried of a method: all rates with all batches, then decays.

    Attributes:
        rates: First learning rates; None is the optimizer's own.
        decays: Parts of the weights that weight decay takes away over a
            training; the others are tried with what was best with the first.
        shares: Lengths of the schedule over the problem's epochs.
    """

    rates: Sequence[float | None]
    decays: Sequence[float] = (0.0, 0.05, 0.25)
    shares: Sequence[float] = (1.0,)


def parse(text: str) -> Variant:
    """Parses a method.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    variant = parse_variant(text)
    known = (*BASELINES, KFAC)
    if variant.folder or (
        variant.name not in known and OUTSIDE not in variant.name
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(known)}"
        )
    return variant


def outside(text: str) -> tuple[str, str]:
    """Name and place of an optimizer of FILE:FUNCTION.

    The name tells versions of the file apart.

    Raises:
        argparse.ArgumentTypeError: If there is no such function.
    """
    place, _, function = text.rpartition(":")
    path = pathlib.Path(place).resolve()
    if path.suffix != OUTSIDE or not path.is_file():
        raise argparse.ArgumentTypeError(
            f"must be FILE.py:FUNCTION; received {text!r}"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return f"{path.name}:{function}={digest}", str(path)


def is_baseline(method: str) -> bool:
    """Whether a method is not one of ours."""
    return parse(method).name != KFAC


def grid_of(method: str, problem: Problem) -> Grid:
    """What is tried of a method on a problem."""
    variant = parse(method)
    name = variant.name
    if name == KFAC:
        return Grid((None,), shares=(0.5, 1.0))
    rates = problem.rates.get(name, problem.rates["adam"])
    if name in ("adam", "adamw"):
        return Grid(rates, (0.0,) if name == "adam" else (0.05, 0.25))
    return Grid(rates)


def follows_adam(method: str) -> bool:
    """Whether a method has a rate that was searched for Adam."""
    return parse(method).arguments.get("rest") == "adam"


def is_constant(method: str) -> bool:
    """Whether its learning rate does not fall."""
    return method.endswith(CONSTANT)


def keras_decay(part: float, rate: float, steps: int) -> float | None:
    """The `weight_decay` of Keras that takes away a part of all weights.

    In each step Keras takes away the learning rate times that many of them, and
    the rates of a schedule that falls linearly to 0 have the sum
    `rate (steps + 1) / 2`.

    Args:
        part: What is taken away over the whole training, in [0, 1).
        rate: First learning rate.
        steps: Number of steps.
    """
    if not part:
        return None
    return -math.log1p(-part) / (rate * (steps + 1) / 2)


def make_optimizer(run: Run, steps: int, model: Any, path: str | None) -> Any:
    """Makes an optimizer for a training of so many steps.

    Args:
        run: The training.
        steps: Number of its steps.
        model: What is trained.
        path: The file of an optimizer from outside.
    """
    import keras

    variant = parse(run.method)
    arguments = dict(variant.arguments)
    make_rate = _decaying
    if is_constant(run.method):
        make_rate = _constant
        del arguments["schedule"]
    if variant.name == KFAC:
        return _kfac(run, steps, arguments, make_rate)
    assert run.rate is not None
    options = {
        "learning_rate": make_rate(run.rate, steps),
        "weight_decay": keras_decay(run.decay, run.rate, steps),
    }
    if path is not None:
        [function] = arguments
        return runpy.run_path(path)[function](**options)
    if variant.name == "sgd":
        options["momentum"] = 0.9
    if variant.name == "muon":
        from targets.models import output_layer

        options["adam_weight_decay"] = options["weight_decay"]
        # As its documentation asks for; embeddings are left out by themselves.
        options["exclude_layers"] = [f"^{output_layer(model).path}/"]
    types = {
        "sgd": keras.optimizers.SGD,
        "adam": keras.optimizers.Adam,
        "adamw": keras.optimizers.AdamW,
        "muon": keras.optimizers.Muon,
    }
    return types[variant.name](**{**options, **arguments})


def _kfac(
    run: Run,
    steps: int,
    arguments: dict[str, Any],
    make_rate: Callable[[float, int], Any],
) -> Any:
    """K-FAC, with a step and a rest optimizer of its own where these are."""
    import keras

    import tfkfac

    step = arguments.get("step")
    rate, momentum = FIRST_KFAC_RATE, 0.5
    if step == "spectral":
        rate, momentum = 1.0, 0.0  # `KFAC` has the momentum
    if arguments.pop("rest", None) is not None:
        assert run.rest is not None
        arguments["rest_optimizer"] = keras.optimizers.Adam(
            make_rate(run.rest, steps),
            weight_decay=keras_decay(run.decay, run.rest, steps),
        )
    rate = run.rate or rate
    inner = keras.optimizers.SGD(
        make_rate(rate, steps),
        momentum=momentum,
        weight_decay=keras_decay(run.decay, rate, steps),
    )
    return tfkfac.KFAC(inner, **arguments)


def _constant(rate: float, steps: int) -> float:
    """No schedule."""
    del steps
    return rate


def _decaying(rate: float, steps: int) -> Any:
    """A schedule that falls linearly to 0."""
    import keras

    return keras.optimizers.schedules.PolynomialDecay(
        rate, steps, end_learning_rate=0.0
    )
