"""The optimizers by name, and the settings that are tried of each.

A method is NAME[:KEY=VALUE...] with arguments of the constructor. Of "kfac",
`rest=adam` makes the rest optimizer Adam with the rate that was best for Adam.
With `schedule=constant` at the end, rates are constant. "kfac" alone is
`KFAC()` with Adam's batch, `epochs=0.5` in half of Adam's epochs.
"""

import argparse
import hashlib
import math
import pathlib
import runpy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common.arguments import Variant, parse_variant
from targets.problems import Problem
from targets.run import Run

BASELINES = ("sgd", "adam", "adamw", "muon")
SCHEDULE_FREE = "schedulefree"
# Classes of Keras by the names of the methods.
KERAS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "muon": "Muon",
    SCHEDULE_FREE: "ScheduleFreeAdamW",
}
KFAC = "kfac"
OUTSIDE = ".py"  # part of the name of an optimizer that a file defines
CONSTANT = ":schedule=constant"  # ends the name of a method


class Grid(NamedTuple):
    """The settings that are tried: all rates with all batches, then decays.

    Attributes:
        rates: Initial learning rates; None is the optimizer's default.
        decays: Fractions of the weights that weight decay removes over a
            training; the first is tried with all rates and batches, the others
            with the best setting of the first.
        shares: Lengths of the schedule over the problem's epochs.
    """

    rates: Sequence[float | None]
    decays: Sequence[float] = (0.0, 0.05, 0.25)
    shares: Sequence[float] = (1.0,)


def parse(text: str) -> Variant:
    """Parse a method."""
    variant = parse_variant(text)
    known = (*KERAS, KFAC)
    if variant.name not in known and OUTSIDE not in variant.name:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(known)}"
        )
    return variant


def outside(text: str) -> tuple[str, str]:
    """Return the name and the path of the optimizer FILE:FUNCTION.

    The name has a hash of the file, which distinguishes its versions.
    """
    file, _, function = text.rpartition(":")
    path = pathlib.Path(file).resolve()
    if path.suffix != OUTSIDE or not path.is_file():
        raise argparse.ArgumentTypeError(
            f"must be FILE.py:FUNCTION; received {text!r}"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return f"{path.name}:{function}={digest}", str(path)


def is_untuned(method: str) -> bool:
    """Return True for `KFAC()`, with Adam's batch and no other setting."""
    variant = parse(method)
    return variant.name == KFAC and set(variant.arguments) <= {"epochs"}


def is_baseline(method: str) -> bool:
    """Return True if a method is not K-FAC."""
    return parse(method).name != KFAC


def grid_of(method: str, problem: Problem) -> Grid:
    """Return the settings that are tried of a method on a problem."""
    name = parse(method).name
    if is_untuned(method):
        share = float(parse(method).arguments.get("epochs", 1))
        return Grid((None,), (0.0,), (share,))
    if name == KFAC:
        return Grid((None,), shares=(0.5, 1.0))
    rates = problem.rates.get(name, problem.rates["adam"])
    if name == "adamw":
        return Grid(rates, (0.05, 0.25))
    if name in ("adam", SCHEDULE_FREE):
        return Grid(rates, (0.0,))
    return Grid(rates)


def follows_adam(method: str) -> bool:
    """Return True if a method needs the best rate or batch of Adam."""
    is_rest = parse(method).arguments.get("rest") == "adam"
    return is_rest or is_untuned(method)


def is_constant(method: str) -> bool:
    """Return True if the learning rate is constant."""
    return method.endswith(CONSTANT)


def keras_decay(fraction: float, rate: float, steps: int) -> float | None:
    """Return the `weight_decay` of Keras that removes a fraction of weights.

    In each step Keras removes the learning rate times `weight_decay` of each
    weight; rates that fall linearly to 0 have the sum `rate (steps + 1) / 2`.
    """
    if not fraction:
        return None
    return -math.log1p(-fraction) / (rate * (steps + 1) / 2)


def make_optimizer(run: Run, steps: int, model: Any, path: str | None) -> Any:
    """Return an optimizer for a training of `steps` steps.

    `path` is the file of a method that `outside` has parsed, else None.
    """
    import keras

    variant = parse(run.method)
    arguments = dict(variant.arguments)

    def falling(rate: float) -> Any:
        return keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)

    schedule: Callable[[float], Any] = falling
    if arguments.pop("schedule", None) is not None:
        schedule = float
    if variant.name == KFAC:
        return _kfac(run, steps, arguments, schedule)
    assert run.rate is not None
    options = {
        "learning_rate": schedule(run.rate),
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
        # As the documentation of Muon recommends; embeddings are excluded by
        # default.
        options["exclude_layers"] = [f"^{output_layer(model).path}/"]
    optimizer = getattr(keras.optimizers, KERAS[variant.name])
    return optimizer(**{**options, **arguments})


def _kfac(
    run: Run,
    steps: int,
    arguments: dict[str, Any],
    schedule: Callable[[float], Any],
) -> Any:
    """Return K-FAC; `run.rest` is the rate of its rest optimizer."""
    import keras

    import tfkfac

    if is_untuned(run.method):
        return tfkfac.KFAC()
    spectral = arguments.get("step") == "spectral"
    rate = run.rate or (1.0 if spectral else 0.1)
    if arguments.pop("rest", None) is not None:
        assert run.rest is not None
        arguments["rest_optimizer"] = keras.optimizers.Adam(
            schedule(run.rest),
            weight_decay=keras_decay(run.decay, run.rest, steps),
        )
    inner = keras.optimizers.SGD(
        schedule(rate),
        momentum=0.0 if spectral else 0.5,  # spectral: momentum of `KFAC`
        weight_decay=keras_decay(run.decay, rate, steps),
    )
    return tfkfac.KFAC(inner, **arguments)
