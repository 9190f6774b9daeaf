"""The arguments of K-FAC that say who does what."""

import dataclasses
import re
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.expressions import check_expression
from tfkfac.capture.walk import SkipRule
from tfkfac.checks import check_choice, is_number
from tfkfac.distributed.plan import MODES, POLICIES, Mode
from tfkfac.kfac.length import LevenbergMarquardt


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the work is distributed; see `KFAC`.

    Attributes:
        distribution: "comm_opt", "mem_opt", "hybrid_opt", "dp_kfac", or "auto"
            where it is still to be chosen.
        fraction: Share of the workers that are gradient workers of a layer.
        assignment: What the assignment balances.
        symmetric: Whether symmetric matrices travel as triangles.
        factor_dtype: Dtype of statistics on the wire.
        inverse_dtype: Dtype of decompositions in storage and on the wire.
    """

    distribution: str = "comm_opt"
    fraction: float | None = None
    assignment: str | None = None
    symmetric: bool = False
    factor_dtype: tf.DType | None = None
    inverse_dtype: tf.DType | None = None

    @property
    def mode(self) -> Mode:
        """The distribution mode, once it has been chosen."""
        return MODES[self.distribution]


# The distribution that the cost model chooses.
AUTO = "auto"
# A layer class in a config.
_CLASS = "layer_class"
_FLAGS = (
    ("a", re.ASCII),
    ("i", re.IGNORECASE),
    ("m", re.MULTILINE),
    ("s", re.DOTALL),
    ("x", re.VERBOSE),
)


def check_decay(value: Any) -> float:
    """Returns `factor_decay` as a float in [0, 1).

    Raises:
        ValueError: If it is not.
    """
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(
            "Argument `factor_decay` must be a number in [0, 1). "
            f"Received: factor_decay={value!r}"
        )
    return float(value)


def check_batch_fraction(name: str, value: Any) -> float | None:
    """Returns a share of a batch as a float in (0, 1], or None.

    Raises:
        ValueError: If it is not.
    """
    if value is None:
        return None
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(
            f"Argument `{name}` must be a number in (0, 1] or None. "
            f"Received: {name}={value!r}"
        )
    return float(value)


def check_step(
    step: Any,
    inner: keras.optimizers.Optimizer,
    damping: Any,
    accumulation: int | None,
) -> str:
    """Returns `step` if all that it needs is there.

    Raises:
        ValueError: If it is not one of the two, or does not go with the
            inner optimizer, the damping or an accumulation.
    """
    check_choice("step", step, ("inner", "quadratic"))
    adaptive = isinstance(damping, LevenbergMarquardt)
    if step == "quadratic":
        check_plain(inner)
    elif adaptive:
        raise ValueError(
            "Argument `damping` must be a number, a schedule or a callable "
            "with step='inner': it can adapt itself only where the quadratic "
            "model has chosen the step and predicts what it does, with "
            f"step='quadratic'. Received: damping={damping!r}"
        )
    if adaptive and accumulation is not None:
        raise ValueError(
            "Argument `damping` must not be a `LevenbergMarquardt` with "
            "`gradient_accumulation_steps`: it compares losses of the whole "
            "batch, whose first parts are gone. Received: "
            f"damping={damping!r} with "
            f"gradient_accumulation_steps={accumulation}"
        )
    return str(step)


def check_plain(inner: keras.optimizers.Optimizer) -> None:
    """Refuses inner optimizers that would change a step of the model.

    Raises:
        ValueError: If it is anything but SGD with a learning rate alone.
    """
    changes = [
        name
        for name in (
            "momentum",
            "weight_decay",
            "clipnorm",
            "clipvalue",
            "global_clipnorm",
        )
        if getattr(inner, name, None)
    ]
    if type(inner) is keras.optimizers.SGD and not changes:
        return
    what = f"{type(inner).__name__}({', '.join(changes)})"
    raise ValueError(
        "Argument `inner_optimizer` must be SGD without momentum, clipping "
        "or weight decay with step='quadratic': the quadratic model chooses "
        "length and momentum of a step, which another rule would spoil. For "
        "decay use a layer's `kernel_regularizer`, which the model knows. "
        f"Received: inner_optimizer={what}"
    )


def check_dtype(
    name: str, value: Any, choices: tuple[str, ...]
) -> tf.DType | None:
    """Returns a floating point dtype, or None for None.

    Raises:
        ValueError: If it is not one of the choices.
    """
    if value is None:
        return None
    text = getattr(value, "name", value)
    return tf.as_dtype(check_choice(name, text, choices))


def check_inverse_dtype(value: Any) -> tf.DType | None:
    """Returns `inverse_dtype`, see `check_dtype`.

    Raises:
        ValueError: If it is not one of the choices.
    """
    if getattr(value, "name", value) == "float16":
        raise ValueError(
            "Argument `inverse_dtype` must be 'float32', 'bfloat16' or None. "
            "In float16 inverses overflow and eigenvalues vanish; bfloat16 "
            "takes as much memory. Received: inverse_dtype='float16'"
        )
    return check_dtype("inverse_dtype", value, ("float32", "bfloat16"))


def make_settings(
    distribution: Any,
    fraction: Any,
    assignment: Any,
    symmetric: Any,
    factor_dtype: Any,
    inverse_dtype: Any,
) -> Settings:
    """Returns the distribution arguments of `KFAC` as checked settings.

    Raises:
        ValueError: If one is not allowed.
    """
    check_choice("distribution", distribution, (*MODES, AUTO))
    if assignment is not None:
        check_choice("assignment", assignment, POLICIES)
    if not isinstance(symmetric, bool):
        raise ValueError(
            "Argument `symmetric_communication` must be True or False. "
            f"Received: symmetric_communication={symmetric!r}"
        )
    number = is_number(fraction) and 0 < fraction <= 1
    mode = MODES.get(distribution)
    wanted = mode is not None and mode.gradient_workers == "fraction"
    if number != wanted or (fraction is not None and not number):
        raise ValueError(
            "Argument `gradient_worker_fraction` must be a number in (0, 1] "
            "with distribution='hybrid_opt', and None with any other. "
            f"Received: gradient_worker_fraction={fraction!r} with "
            f"distribution={distribution!r}"
        )
    return Settings(
        distribution,
        fraction,
        assignment,
        symmetric,
        check_dtype(
            "factor_dtype", factor_dtype, ("float32", "bfloat16", "float16")
        ),
        check_inverse_dtype(inverse_dtype),
    )


def settings_config(settings: Settings) -> dict[str, Any]:
    """Returns settings as the arguments of `KFAC`."""
    dtypes = (settings.factor_dtype, settings.inverse_dtype)
    factor, inverse = (d.name if d is not None else None for d in dtypes)
    return {
        "distribution": settings.distribution,
        "gradient_worker_fraction": settings.fraction,
        "assignment": settings.assignment,
        "symmetric_communication": settings.symmetric,
        "factor_dtype": factor,
        "inverse_dtype": inverse,
    }


def check_skip_layers(value: Any) -> tuple[SkipRule, ...]:
    """Returns `skip_layers` as a tuple of names, patterns and classes.

    Raises:
        ValueError: If an entry is none of these or not a regular expression.
        TypeError: If the argument is not a sequence.
    """
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(
            "Argument `skip_layers` must be a list or tuple of layer names, "
            "regular expressions or layer classes. "
            f"Received: skip_layers={value!r}"
        )
    return tuple(check_skip_rule(rule) for rule in value)


def check_skip_rule(rule: Any) -> SkipRule:
    """Returns one entry of `skip_layers`, a class if it stands for one."""
    if isinstance(rule, dict) and _CLASS in rule:
        name = rule[_CLASS]
        registered = keras.saving.get_registered_object(name)
        rule = registered or getattr(keras.layers, name, name)
    if isinstance(rule, re.Pattern):
        return rule
    if isinstance(rule, type) and issubclass(rule, keras.layers.Layer):
        return rule
    if isinstance(rule, str):
        try:
            check_expression(rule)
        except ValueError as error:
            raise ValueError(
                "Argument `skip_layers` must hold valid regular expressions. "
                f"Received: {rule!r} ({error})"
            ) from error
        return rule
    raise ValueError(
        "Argument `skip_layers` must hold layer names, regular expressions or "
        f"layer classes. Received: {rule!r} (of type {type(rule)})"
    )


def serialize_skip_rule(rule: SkipRule) -> Any:
    """Returns the form of a rule in a config."""
    if isinstance(rule, re.Pattern):
        # Flags such as IGNORECASE travel inside the pattern.
        flags = "".join(letter for letter, flag in _FLAGS if rule.flags & flag)
        return f"(?{flags}){rule.pattern}" if flags else rule.pattern
    if isinstance(rule, type):
        return {_CLASS: keras.saving.get_registered_name(rule)}
    return rule
