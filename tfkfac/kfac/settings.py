"""Checks and defaults of the arguments of `KFAC`."""

import dataclasses
import re
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.walk import LayerRule
from tfkfac.checks import check_choice, check_count, is_number
from tfkfac.distributed.plan import MODES, POLICIES
from tfkfac.shell.arguments import (
    Hyperparameter,
    Settings,
    check_inner,
    choose_inner,
)
from tfkfac.shell.rest import INNER, LengthRate, choose_rest, default_rest_rate
from tfkfac.shell.small_rates import RATE
from tfkfac.training.fit_decay import FitDecay

# Default of `kl_clip`, the upper bound of a step's squared Fisher length.
DEFAULT_KL_CLIP = 0.02
STEPS = ("natural", "spectral")
AUTO = "auto"  # default of `max_factor_dim`
# Inner optimizers that rescale each element of the preconditioned gradient.
_ADAPTIVE = (
    keras.optimizers.Adam,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adafactor,
    keras.optimizers.Lion,
)
WEIGHT_SHARING = ("expand", "reduce", "average")
_DTYPES = ("float32", "bfloat16", "float16")
# Key under which a config stores the name of a layer class.
_CLASS = "layer_class"
_FLAGS = {"a": re.A, "i": re.I, "m": re.M, "s": re.S, "x": re.X}


@keras.saving.register_keras_serializable(package="tfkfac")
@dataclasses.dataclass(frozen=True)
class Distribution(Settings):
    """Distribution of the K-FAC work over workers, and message formats.

    >>> tfkfac.KFAC(distribution=tfkfac.Distribution(
    ...     "hybrid_opt", gradient_worker_fraction=0.25, symmetric=True))

    Args:
        mode: Workers that store decompositions and precondition gradients.
            "comm_opt": all workers; the owner of a factor decomposes the factor
            and broadcasts the decomposition. "mem_opt": the owner of a layer,
            which broadcasts the preconditioned gradient. "hybrid_opt": a group
            of gradient workers per layer (KAISA, SC'21). "dp_kfac": like
            "mem_opt", but the owner computes the factors from the local batch;
            other modes all-reduce the factors. Defaults to "comm_opt".
        gradient_worker_fraction: Fraction f of the N workers that are gradient
            workers of a layer, in (0, 1]. `f N` must be an integer that divides
            N. With "hybrid_opt", None means half of the workers if N is even,
            else the largest number below N / 2 that divides N (1 if N = 1), so
            any N works. Must be None with other modes.
        assignment: Cost that is balanced over the owners: "compute" (n^3 for a
            factor of size n) or "memory" (n^2); or "round_robin". None means
            "round_robin" for "dp_kfac" and "compute" for other modes.
        symmetric: True to send symmetric matrices as triangles (KAISA, section
            4.3). Defaults to False.
        factor_dtype: Dtype of factors in messages: "float32", "bfloat16" or
            "float16". None means the dtype of the weights, at least float32.
            The running averages always have the latter dtype: half precision
            would round the contribution of a new batch to zero. Several GPUs
            send "bfloat16" factors as float32, because TensorFlow cannot sum
            bfloat16 on GPUs.
        inverse_dtype: Dtype of stored and sent decompositions: "float32" or
            "bfloat16". None means the dtype of the weights, at least float32.
            Decompositions are computed in at least float32.

    Raises:
        ValueError: If an argument is not allowed.
    """

    mode: str = "comm_opt"
    gradient_worker_fraction: float | None = None
    assignment: str | None = None
    symmetric: bool = False
    factor_dtype: str | None = None
    inverse_dtype: str | None = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, tuple(MODES))
        if self.assignment is not None:
            check_choice("assignment", self.assignment, POLICIES)
        if not isinstance(self.symmetric, bool):
            raise ValueError(
                "Argument `symmetric` must be True or False. Received: "
                f"symmetric={self.symmetric!r}"
            )
        fraction = self.gradient_worker_fraction
        # Keep None in the config: the default depends on the number of workers.
        if fraction is not None:
            is_valid = is_number(fraction) and 0 < fraction <= 1
            if not is_valid or self.mode != "hybrid_opt":
                raise ValueError(
                    "Argument `gradient_worker_fraction` must be a number in "
                    "(0, 1] with mode='hybrid_opt', and None with any other. "
                    f"Received: gradient_worker_fraction={fraction!r} with "
                    f"mode={self.mode!r}"
                )
            object.__setattr__(
                self, "gradient_worker_fraction", float(fraction)
            )
        self._check("factor_dtype", _check_dtype)
        self._check("inverse_dtype", _check_dtype)
        if self.inverse_dtype == "float16":
            raise ValueError(
                "Argument `inverse_dtype` must be 'float32', 'bfloat16' or "
                "None. In float16 inverses overflow and eigenvalues "
                "vanish; bfloat16 takes as much memory. Received: "
                "inverse_dtype='float16'"
            )

    @property
    def storage_dtype(self) -> tf.DType | None:
        """Dtype of stored decompositions; None means the dtype of factors."""
        return self.inverse_dtype and tf.as_dtype(self.inverse_dtype)


def _check_dtype(name: str, value: Any) -> str | None:
    """Check a dtype or its name; return the name, or None."""
    value = getattr(value, "name", value)
    return None if value is None else check_choice(name, value, _DTYPES)


def check_distribution(value: Any, fraction: Any) -> str | Distribution:
    """Return a `Distribution` or the name of a mode.

    `fraction` is the argument `gradient_worker_fraction` of `KFAC`.
    """
    if isinstance(value, Distribution):
        if fraction is None:
            return value
        raise ValueError(
            "Argument `gradient_worker_fraction` must be given inside of "
            f"`distribution`. Received: gradient_worker_fraction={fraction!r} "
            f"with distribution={value!r}"
        )
    if fraction is not None:
        return Distribution(value, gradient_worker_fraction=fraction)
    alternatives = " or a `tfkfac.Distribution`"
    return check_choice("distribution", value, tuple(MODES), alternatives)


def check_batch_fraction(name: str, value: Any) -> float:
    """Return a fraction of a batch, in (0, 1], as a float."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(
            f"Argument `{name}` must be a number in (0, 1] or None. "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_factor_dim(name: str, value: Any) -> int | str | None:
    """Return a number of rows, `AUTO` or None."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    return check_count(name, value, 1, f", or {AUTO!r} or None")


def check_layer_rules(name: str, value: Any) -> tuple[LayerRule, ...]:
    """Return an argument's rules (names, patterns, classes) as a tuple.

    Look up the class of a rule that comes from a config.
    """
    if isinstance(value, (str, type, re.Pattern)):
        value = (value,)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(
            f"Argument `{name}` must be a list or tuple of layer names, "
            f"regular expressions or layer classes. Received: {name}={value!r}"
        )
    rules: list[Any] = []
    layer_class = keras.layers.Layer
    for rule in value:
        if isinstance(rule, dict) and _CLASS in rule:
            class_name = rule[_CLASS]
            registered = keras.saving.get_registered_object(class_name)
            rule = registered or getattr(keras.layers, class_name, class_name)
        is_layer = isinstance(rule, type) and issubclass(rule, layer_class)
        is_pattern = isinstance(rule, re.Pattern) and isinstance(
            rule.pattern, str
        )
        if isinstance(rule, str):
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(
                    f"Argument `{name}` must hold valid regular expressions. "
                    f"Received: {rule!r} ({error})"
                ) from error
        elif not is_layer and not is_pattern:
            raise ValueError(
                f"Argument `{name}` must hold layer names, regular expressions "
                f"or layer classes. Received: {rule!r} (of type {type(rule)})"
            )
        rules.append(rule)
    return tuple(rules)


def serialize_layer_rule(rule: LayerRule) -> Any:
    """Return the JSON form of a rule for a config."""
    if isinstance(rule, re.Pattern):
        # Write flags such as IGNORECASE into the pattern.
        flags = "".join(
            letter for letter, flag in _FLAGS.items() if rule.flags & flag
        )
        return f"(?{flags}){rule.pattern}" if flags else rule.pattern
    if isinstance(rule, type):
        return {_CLASS: keras.saving.get_registered_name(rule)}
    return rule


def choose_step(
    step: Any, inner_optimizer: Any, learning_rate: Any, kl_clip: Any
) -> str:
    """Return the type of step; for None, choose by the other arguments."""
    if step is not None:
        return check_choice("step", step, STEPS, " or None")
    # Test with `is`: a user who passes 0.02 asks for natural-gradient steps.
    is_default = kl_clip is DEFAULT_KL_CLIP
    is_default &= inner_optimizer is None and learning_rate is None
    return "spectral" if is_default else "natural"


def choose_optimizers(
    step: str,
    inner_optimizer: Any,
    learning_rate: Any,
    momentum: float | None,
    rest_optimizer: Any,
    weight_decay: float | None,
) -> tuple[keras.optimizers.Optimizer, keras.optimizers.Optimizer | None]:
    """Return the inner and the rest optimizer for the arguments of `KFAC`."""
    defaults: dict[str, Any] = {
        "learning_rate": FitDecay(RATE),
        "momentum": 0.5,
    }
    arguments = {"learning_rate": learning_rate, "momentum": momentum}
    if step == "spectral":
        defaults = {"learning_rate": FitDecay(1.0), "momentum": 0.0}
        del arguments["momentum"]  # momentum of the spectral step, not of SGD
    inner = check_inner(choose_inner(inner_optimizer, defaults, arguments))
    if isinstance(inner, _ADAPTIVE):
        warnings.warn(
            f"{type(inner).__name__} as `inner_optimizer` rescales each "
            "element of the preconditioned gradient. On a small language model "
            "`KFAC()` reached a lower loss. Use it, or "
            "`KFAC(rest_optimizer=...)` for the weights without a block.",
            stacklevel=3,
        )
    if weight_decay is not None and inner.weight_decay is not None:
        raise ValueError(
            "Argument `weight_decay` must be left out with `inner_optimizer`, "
            "which has its own. Received: weight_decay="
            f"{weight_decay} with inner_optimizer.weight_decay="
            f"{inner.weight_decay}"
        )
    if step == "natural":
        rate = default_rest_rate(inner)
        return inner, choose_rest(rest_optimizer, inner, rate, weight_decay)
    names = ("momentum", "clipnorm", "clipvalue", "global_clipnorm")
    forbidden = [name for name in names if getattr(inner, name, None)]
    if type(inner) is not keras.optimizers.SGD or forbidden:
        raise ValueError(
            "Argument `inner_optimizer` must be SGD without momentum or "
            "clipping with step='spectral', which has a length and a momentum "
            "of its own. Pass step='natural' for another inner optimizer, or "
            "`rest_optimizer` for the uncovered weights. Received: "
            f"inner_optimizer={type(inner).__name__}({', '.join(forbidden)})"
        )
    if rest_optimizer == INNER:
        raise ValueError(
            "Argument `rest_optimizer` must be an optimizer with spectral "
            "steps; pass step='natural' to leave the uncovered weights to the "
            f"inner optimizer. Received: rest_optimizer={rest_optimizer!r}"
        )
    return inner, choose_rest(rest_optimizer, inner, LengthRate(), weight_decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KFACSettings:
    """Arguments of `KFAC` that the method uses."""

    step: str
    momentum: float | None  # None for natural-gradient steps
    weight_decay: float | None
    damping: Hyperparameter
    kl_clip: Hyperparameter
    fisher: str | None
    solver: str
    distribution: str | Distribution
    factor_update_interval: Hyperparameter
    inverse_update_interval: Hyperparameter
    factor_decay: float
    factor_batch_fraction: float | None
    weight_sharing: str
    max_factor_dim: int | str | None  # `AUTO` or a number of rows
    skip_layers: tuple[LayerRule, ...]
    only_layers: tuple[LayerRule, ...] | None
    gradient_accumulation_steps: int | None
