"""The command line of train_classifier.py."""

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from networks import NETWORKS

# Each decays linearly to 0 over the run.
LEARNING_RATES = {"kfac": 0.1, "sgd": 0.05, "adam": 0.001}
# Passed on only if given: KFAC has defaults of its own.
KFAC_OPTIONS = {
    "damping": "damping",
    "factor_interval": "factor_update_interval",
    "inverse_interval": "inverse_update_interval",
    "kl_clip": "kl_clip",
    "distribution": "distribution",
    "gradient_worker_fraction": "gradient_worker_fraction",
}
PLOT_FORMATS = (".png", ".pdf", ".svg")


@dataclasses.dataclass(frozen=True)
class RunDefaults:
    """What suits a data set unless the user says otherwise."""

    epochs: int = 5
    batch_size: int = 250
    target: float | None = None
    learning_rates: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )


RUN_DEFAULTS = {
    # The rates of sgd and adam are the best of four each, for cnn.
    "digits": RunDefaults(
        epochs=20,
        batch_size=64,
        target=0.98,
        learning_rates={"sgd": 0.1, "adam": 0.008},
    ),
    "mnist": RunDefaults(epochs=2, target=0.98),
    "fashion_mnist": RunDefaults(epochs=2, target=0.90),
    "kmnist": RunDefaults(epochs=5, target=0.90),
    "cifar10": RunDefaults(epochs=5, target=0.70),
}


def number(
    kind: type, valid: Callable[[Any], bool], demand: str
) -> Callable[[str], Any]:
    """A type of argument: numbers of a kind that satisfy a condition."""

    def parse_number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not valid(value):
            raise argparse.ArgumentTypeError(
                f"must be {demand}; received {text!r}"
            )
        return value

    return parse_number


positive_int = number(int, lambda value: value > 0, "a whole number above 0")
natural_int = number(
    int, lambda value: value >= 0, "a whole number, not below 0"
)
positive_float = number(
    float, lambda value: 0 < value < math.inf, "a number above 0"
)
natural_float = number(
    float, lambda value: 0 <= value < math.inf, "a number, not below 0"
)
fraction = number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")


def float_or_none(text: str) -> float | None:
    return None if text == "none" else positive_float(text)


def learning_rate(text: str) -> tuple[str | None, float]:
    """Parses VALUE or NAME=VALUE."""
    name, equals, value = text.rpartition("=")
    return name if equals else None, positive_float(value)


def plot_path(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if path.suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(
            f"must end with {', '.join(PLOT_FORMATS)}; received {text!r}"
        )
    return path


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and checks the command line.

    The learning rates come out as a dictionary by optimizer, KFAC's options as
    the dictionary `kfac_options` of what was given.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if len(set(options.optimizer)) < len(options.optimizer):
        parser.error("argument --optimizer: each can be given once")
    defaults = RUN_DEFAULTS.get(options.dataset, RunDefaults())
    options.epochs = options.epochs or defaults.epochs
    options.batch_size = options.batch_size or defaults.batch_size
    options.target = options.target or defaults.target
    options.learning_rate = learning_rates(
        parser, options, {**LEARNING_RATES, **defaults.learning_rates}
    )
    options.kfac_options = kfac_options(parser, options)
    return options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains an image classifier with each of the given "
        "optimizers, from the same weights on the same batches, and compares "
        "them.",
    )
    add_data_arguments(parser.add_argument_group("data and model"))
    add_training_arguments(parser.add_argument_group("training"))
    add_kfac_arguments(parser.add_argument_group("K-FAC (its own defaults)"))
    add_output_arguments(parser.add_argument_group("output"))
    return parser


def add_data_arguments(group: Any) -> None:
    group.add_argument(
        "--dataset",
        default="digits",
        metavar="NAME",
        help="digits (embedded, the default) or any image-classification set "
        "of TensorFlow Datasets",
    )
    group.add_argument(
        "--data-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="directory of idx files (mnist, fashion_mnist, kmnist), or of "
        "data that TensorFlow Datasets has prepared",
    )
    group.add_argument(
        "--cache-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="where TensorFlow Datasets keeps what it prepares (its own "
        "default: ~/tensorflow_datasets)",
    )
    group.add_argument("--model", choices=NETWORKS, default="mlp")


def add_training_arguments(group: Any) -> None:
    group.add_argument(
        "--optimizer",
        nargs="+",
        choices=LEARNING_RATES,
        default=list(LEARNING_RATES),
        help="those to compare (default: all)",
    )
    group.add_argument(
        "--learning-rate",
        nargs="+",
        type=learning_rate,
        default=[],
        metavar="[NAME=]VALUE",
        help="first learning rate, which decays linearly to 0: one value, or "
        "one per optimizer as in kfac=0.1 adam=0.002 (default: depends on the "
        "data set)",
    )
    for name in ("epochs", "batch-size"):
        group.add_argument(
            f"--{name}",
            type=positive_int,
            metavar="N",
            help="default: depends on the data set",
        )
    group.add_argument("--seed", type=natural_int, default=0, metavar="N")
    group.add_argument(
        "--target",
        type=fraction,
        metavar="ACCURACY",
        help="test accuracy, in (0, 1], whose cost in steps and seconds is "
        "reported (default: depends on the data set)",
    )


def add_kfac_arguments(group: Any) -> None:
    not_given = argparse.SUPPRESS  # leaves no attribute
    group.add_argument(
        "--damping", type=natural_float, default=not_given, metavar="VALUE"
    )
    for name in ("factor", "inverse"):
        group.add_argument(
            f"--{name}-interval",
            type=positive_int,
            default=not_given,
            metavar="STEPS",
            help=f"steps from one {name} update to the next",
        )
    group.add_argument(
        "--kl-clip",
        type=float_or_none,
        default=not_given,
        metavar="VALUE",
        help="bound on the change of the model's output in a step, or none",
    )
    group.add_argument(
        "--distribution",
        choices=("comm_opt", "mem_opt", "hybrid_opt", "dp_kfac"),
        default=not_given,
        help="how several workers share the work",
    )
    group.add_argument(
        "--gradient-worker-fraction",
        type=fraction,
        default=not_given,
        metavar="FRACTION",
        help="with hybrid_opt: share of the workers that precondition a layer",
    )


def add_output_arguments(group: Any) -> None:
    group.add_argument(
        "--plot",
        type=plot_path,
        metavar="FILE",
        help="plot of loss against steps and seconds "
        f"({', '.join(PLOT_FORMATS)})",
    )
    group.add_argument(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="a CSV file per optimizer, and TensorBoard logs if TensorBoard "
        "is installed",
    )


def learning_rates(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    defaults: Mapping[str, float],
) -> dict[str, float]:
    """The learning rate of each chosen optimizer."""
    rates = {name: defaults[name] for name in options.optimizer}
    for name, rate in options.learning_rate:
        if name is None and len(options.learning_rate) > 1:
            parser.error(
                "argument --learning-rate: several must be given as NAME=VALUE"
            )
        if name is not None and name not in rates:
            parser.error(
                f"argument --learning-rate: {name!r} is not among the chosen "
                f"optimizers ({', '.join(rates)})"
            )
        rates.update(dict.fromkeys(rates if name is None else [name], rate))
    return rates


def kfac_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> dict[str, float | None]:
    """The arguments of KFAC that were given."""
    given = {
        keyword: getattr(options, name)
        for name, keyword in KFAC_OPTIONS.items()
        if hasattr(options, name)
    }
    if given and "kfac" not in options.optimizer:
        parser.error(
            "--damping, --factor-interval, --inverse-interval, --kl-clip, "
            "--distribution and --gradient-worker-fraction go with "
            "--optimizer kfac"
        )
    return given
