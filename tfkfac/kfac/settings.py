"""Arguments of K-FAC that are more than a number."""

import dataclasses
import re
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfkfac.capture.walk import SkipRule
from tfkfac.checks import (
    check_choice,
    check_count,
    check_positive,
    check_range,
    is_number,
)
from tfkfac.distributed.plan import MODES, POLICIES
from tfkfac.shell.arguments import Hyperparameter, Schedule, Settings
from tfkfac.shell.rest import INNER

# Default learning rate of natural steps, which the clip bounds.
RATE = 0.1
# Share of gradient workers between MEM-OPT and COMM-OPT (KAISA, section 5).
_HALF = 0.5
_DTYPES = ("float32", "bfloat16", "float16")
# A layer class in a config.
_CLASS = "layer_class"
_FLAGS = (
    ("a", re.ASCII),
    ("i", re.IGNORECASE),
    ("m", re.MULTILINE),
    ("s", re.DOTALL),
    ("x", re.VERBOSE),
)


@keras.saving.register_keras_serializable(package="tfkfac")
@dataclasses.dataclass(frozen=True)
class Distribution(Settings):
    """Who does what of K-FAC's work, and how it travels.

    >>> tfkfac.KFAC(distribution=tfkfac.Distribution(
    ...     "hybrid_opt", gradient_worker_fraction=0.25, symmetric=True))

    Args:
        mode: "comm_opt" (factors are all-reduced, each is decomposed by one
            worker and its decomposition sent to all: plain steps send nothing
            extra), "mem_opt" (a layer's owner keeps its decompositions,
            preconditions and sends the result), "hybrid_opt" (a group of
            gradient workers does; KAISA, SC'21) or "dp_kfac" (the owner also
            keeps the factors, of its own batch alone: no factor is ever
            sent). Defaults to "comm_opt".
        gradient_worker_fraction: With "hybrid_opt", the share of the workers
            that are gradient workers of a layer, in (0, 1]: times the number
            of workers it must be whole and divide that number. Defaults to
            0.5 there, and must be None with the other modes.
        assignment: What the owners are balanced by: "compute" (n^3 for a
            factor of size n), "memory" (n^2) or "round_robin". None is
            "round_robin" for "dp_kfac" and "compute" for the others.
        symmetric: Whether symmetric matrices are sent as triangles (KAISA,
            section 4.3). Defaults to False.
        factor_dtype: Dtype of factors on the wire: "float32", "bfloat16" or
            "float16". None is that of the weights, at least float32. Their
            running averages are kept in that dtype in any case: half
            precision would round away what a new batch adds to them.
            TensorFlow adds no bfloat16 on GPUs: among several of them factors
            in it are sent as float32.
        inverse_dtype: Dtype of decompositions in storage and on the wire:
            "float32", "bfloat16" or None, that of the weights but at least
            float32. They are computed in float32 or better.

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
                "Argument `symmetric` must be True or False. "
                f"Received: symmetric={self.symmetric!r}"
            )
        self._check("gradient_worker_fraction", self._check_fraction)
        self._check("factor_dtype", _check_dtype)
        self._check("inverse_dtype", _check_dtype)
        if self.inverse_dtype == "float16":
            raise ValueError(
                "Argument `inverse_dtype` must be 'float32', 'bfloat16' or "
                "None. In float16 inverses overflow and eigenvalues "
                "vanish; bfloat16 takes as much memory. Received: "
                "inverse_dtype='float16'"
            )

    def _check_fraction(self, name: str, value: Any) -> float | None:
        """The share of gradient workers, in (0, 1] with "hybrid_opt" alone."""
        is_hybrid = self.mode == "hybrid_opt"
        if value is None:
            return _HALF if is_hybrid else None
        if not is_hybrid or not is_number(value) or not 0 < value <= 1:
            raise ValueError(
                f"Argument `{name}` must be a number in (0, 1] with "
                "mode='hybrid_opt', and None with any other. Received: "
                f"{name}={value!r} with mode={self.mode!r}"
            )
        return float(value)

    @property
    def wire_dtype(self) -> tf.DType | None:
        """Dtype of factors on the wire; None is their own."""
        return self.factor_dtype and tf.as_dtype(self.factor_dtype)

    @property
    def storage_dtype(self) -> tf.DType | None:
        """Dtype of decompositions; None is their own."""
        return self.inverse_dtype and tf.as_dtype(self.inverse_dtype)


def with_fraction(distribution: Any, fraction: Any) -> Distribution:
    """The distribution of a mode and a `gradient_worker_fraction` beside it.

    Raises:
        ValueError: If they do not fit.
    """
    if isinstance(distribution, Distribution):
        raise ValueError(
            "Argument `gradient_worker_fraction` must be given inside of "
            f"`distribution`. Received: gradient_worker_fraction={fraction!r} "
            f"with distribution={distribution!r}"
        )
    return Distribution(distribution, gradient_worker_fraction=fraction)


def _check_dtype(name: str, value: Any) -> str | None:
    """Returns the name of a dtype, of TensorFlow's too, or None."""
    value = getattr(value, "name", value)
    return None if value is None else check_choice(name, value, _DTYPES)


def check_distribution(name: str, value: Any) -> str | Distribution:
    """Returns `value` if it is a `Distribution` or the name of a mode.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(value, Distribution):
        return value
    others = " or a `tfkfac.Distribution`"
    return check_choice(name, value, tuple(MODES), others)


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


def check_skip_layers(name: str, value: Any) -> tuple[SkipRule, ...]:
    """Returns a tuple of names, patterns and classes.

    Raises:
        ValueError: If an entry is none of these or not a regular expression.
        TypeError: If the argument is not a sequence.
    """
    if isinstance(value, (str, type, re.Pattern)):
        value = (value,)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(
            f"Argument `{name}` must be a list or tuple of layer names, "
            f"regular expressions or layer classes. Received: {name}={value!r}"
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
            re.compile(rule)
        except re.error as error:
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


# ------------------------------------------------------------ kinds of steps
@keras.saving.register_keras_serializable(package="tfkfac")
@dataclasses.dataclass(frozen=True)
class LevenbergMarquardt(Settings):
    """Damping that adapts itself to how far the quadratic model holds.

    For `KFAC(step="quadratic", damping=...)` (Martens & Grosse, 2015, section
    6.5). Every few steps the loss of the batch is computed at the new weights
    and the old ones, two forward passes more. With the ratio `rho` of its
    reduction to that which the model predicts, the damping is multiplied by
    `decay ** every` if `rho > 3/4`, and divided by it if `rho < 1/4`. A step
    that promises over four times the reduction of the last accepted one that
    was looked at is looked at too: where the model is of a part of the batch,
    a direction that hardly moves the outputs of these examples looks free, and
    one such step can undo a training.

    A step that raises the loss (`rho < 0`, or a loss that is not finite) is
    rejected: the weights stay as they are, the damping is multiplied by 4, all
    decompositions are renewed with it, and the next step is looked at as well
    (the rule of trust regions: Nocedal & Wright, 2006, algorithm 4.1). It is
    counted, and shown in `summary`. Changes of the loss within rounding count
    as predicted (Conn, Gould & Toint, 2000, section 17.4.2).

    It is refused with `gradient_accumulation_steps`, the inner optimizer's
    too: the losses that it compares are of the whole batch, whose first parts
    are gone when the step is made.

    >>> tfkfac.KFAC(
    ...     step="quadratic", damping=tfkfac.LevenbergMarquardt(initial=1.0))

    Args:
        initial: Damping of the first steps, positive. Defaults to 0.1.
        every: Steps between two looks at the loss, at least 1. Defaults to 5.
        decay: Factor on the damping for each step, in (0, 1). Defaults to
            19/20.
        minimum: Smallest damping, positive. Defaults to 1e-6.
        maximum: Largest damping. Defaults to 1e6.

    Raises:
        ValueError: If an argument is not allowed.
    """

    initial: float = 0.1
    every: int = 5
    decay: float = 19 / 20
    minimum: float = 1e-6
    maximum: float = 1e6

    def __post_init__(self) -> None:
        self._check("every", check_count, 1)
        for name in ("initial", "decay", "minimum", "maximum"):
            self._check(name, check_positive)
        self._check("decay", check_range, 0, 1)
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                "Argument `initial` must be between `minimum` and `maximum`. "
                f"Received: initial={self.initial}, minimum={self.minimum}, "
                f"maximum={self.maximum}"
            )


@keras.saving.register_keras_serializable(package="tfkfac")
@dataclasses.dataclass(frozen=True)
class QuadraticStep(Settings):
    """A step whose length and momentum a quadratic model of the loss chooses.

    For `KFAC(step=...)` (Martens & Grosse, 2015, sections 6.4 and 7). The
    update is `alpha Delta + mu d`, with `Delta` the negative preconditioned
    gradient, d the update before, and the `(alpha, mu)` for which the quadratic
    model of the loss, with its exact Gauss-Newton matrix and the damping, is
    least. That takes a forward pass and two Jacobian-vector products, in
    training mode on a part of the batch, which change no state. Weights without
    a block are moved along their negative gradient, by a third such number. The
    Gauss-Newton matrix is that of the loss of the model's outputs, for Keras'
    cross-entropies of the logits behind a softmax or sigmoid; regularisers of
    weights are part of the model, losses that layers add are so by their
    gradient alone.

    The inner optimizer must be SGD with a learning rate alone, a multiplier of
    the step that is 1.0 by default. The loss must be computed by
    `model.compute_loss`, as Keras does.

    >>> tfkfac.KFAC(step=tfkfac.QuadraticStep(
    ...     damping=tfkfac.LevenbergMarquardt()))

    Args:
        batch_fraction: Share of each worker's examples that the Gauss-Newton
            matrix is of, in (0, 1]: at least one, evenly spaced, and other ones
            in the next step; with `gradient_accumulation_steps`, of the last
            micro-batch. None is a quarter, but at least 64 examples of all
            workers together.
        damping: Damping of the model and of the factors, in place of that of
            `KFAC`: a number, a schedule or a
            `tfkfac.LevenbergMarquardt`. None is that of `KFAC`.

    Raises:
        ValueError: If an argument is not allowed.
    """

    batch_fraction: float | None = None
    damping: Schedule | LevenbergMarquardt | None = None

    def __post_init__(self) -> None:
        self._check("batch_fraction", check_batch_fraction)
        if self.damping is not None:
            Hyperparameter("damping", self.damping, also=LevenbergMarquardt)


@keras.saving.register_keras_serializable(package="tfkfac")
@dataclasses.dataclass(frozen=True)
class SpectralStep(Settings):
    """A step along the orthogonalised momentum of the preconditioned gradient.

    For `KFAC(step=...)`. For each block, with its gradient W as a matrix of
    inputs by outputs:

        M = mu M + W,  N = W + mu M        Nesterov, before it is preconditioned
        P = A^-1 N G^-1                    as `KFAC` does
        D = U V^T of P = U S V^T           its polar factor

    so that no direction of a block is longer than another (Muon: Jordan et
    al., 2024), in blocks of columns of P, by a few polynomials of its singular
    values (Amsel et al., 2025). Vectors are divided by their norm. P is zero in
    rows and columns where N is, or is below its rounding errors: weights
    without a gradient do not move.

    With `length="fisher"` all D together get the length at which the loss
    decreases, to first order, as much as along a natural gradient step with a
    length, in the Fisher metric, of

        kappa s,   kappa = max(0.07, 0.02 sqrt(B), sqrt(0.005 L)),

    where B is the number of blocks, s the learning rate over the largest one
    of its schedule in the run, at most 1, and L the negative log-likelihood of
    a term of the loss, 0 if nobody sees it or if it is not finite. The run is
    the one that `fit` announces; elsewhere a rate that grows for ever has a
    share of 1. So a learning rate
    says nothing but its schedule's shape, and it needs one: at a constant rate
    these steps do not get shorter by themselves. That length takes
    `<D, N> / sqrt(<P, N>)`, a lower bound of the Fisher length of D by Cauchy
    and Schwarz. Another one is the root of the damping times `|D|^2`; the
    larger one counts.

    With `length="rms"` the elements of a block's step have the root mean square
    0.2 times the learning rate, 0.01 by default (Liu et al., 2025: that of
    Adam's steps). It has to be tuned; from 0.008 to 0.016 were best.

    The inner optimizer must be SGD without momentum. Embeddings, of which
    each row sees little of the data, are left to the rest optimizer.

    >>> tfkfac.KFAC(step=tfkfac.SpectralStep(momentum=0.95))

    Args:
        length: "fisher" or "rms". Defaults to "fisher".
        momentum: mu, in [0, 1). Defaults to 0.9.
        block: Most columns of a block of P, at least 1. None is no limit.
            Defaults to 32.
        iterations: Number of polynomials, at least 1. Defaults to 5.

    Raises:
        ValueError: If an argument is not allowed.
    """

    length: str = "fisher"
    momentum: float = 0.9
    block: int | None = 32
    iterations: int = 5

    @property
    def rate(self) -> float:
        """The learning rate if none is given."""
        return 1.0 if self.length == "fisher" else 0.01

    def __post_init__(self) -> None:
        self._check("length", check_choice, ("fisher", "rms"))
        self._check("momentum", check_range, 0, 1)
        if self.block is not None:
            self._check("block", check_count, 1)
        self._check("iterations", check_count, 1)


Rule: TypeAlias = QuadraticStep | SpectralStep
# Rules of the kinds of steps that have a name; None is the clip.
RULES: dict[str, type[Rule] | None] = {
    "inner": None,
    "quadratic": QuadraticStep,
    "spectral": SpectralStep,
}


def check_step(name: str, value: Any) -> str | Rule:
    """Returns `value` if it is a kind of step.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(value, Rule) or (isinstance(value, str) and value in RULES):
        return value
    raise ValueError(
        f"Argument `{name}` must be one of {tuple(RULES)}, a "
        "`tfkfac.QuadraticStep` or a `tfkfac.SpectralStep`. "
        f"Received: {name}={value!r}"
    )


def rule_of(step: str | Rule) -> Rule | None:
    """Returns the rule that a kind of step stands for; None is the clip."""
    if not isinstance(step, str):
        return step
    kind = RULES[step]
    return None if kind is None else kind()


def with_momentum(
    step: str | Rule, rule: SpectralStep, momentum: float
) -> SpectralStep:
    """Returns the rule of a step with a momentum that a user gives beside it.

    Raises:
        ValueError: If the step has its own.
    """
    if step is rule:
        raise ValueError(
            "Argument `momentum` must be left out where `step` has a momentum "
            f"of its own. Received: momentum={momentum!r} with step={step!r}"
        )
    return dataclasses.replace(rule, momentum=momentum)


def check_rest(rest_optimizer: Any, rule: Rule | None) -> None:
    """Refuses rest optimizers that do not go with the rule of a step.

    Raises:
        ValueError: If it is one with quadratic steps, or "inner" with spectral
            ones.
    """
    if isinstance(rule, QuadraticStep) and rest_optimizer not in (None, INNER):
        must = "be left out with quadratic steps, which move all weights"
    elif isinstance(rule, SpectralStep) and rest_optimizer == INNER:
        must = (
            "be an optimizer with spectral steps, whose learning rate is none "
            "for gradients"
        )
    else:
        return
    raise ValueError(
        f"Argument `rest_optimizer` must {must}. "
        f"Received: rest_optimizer={rest_optimizer!r}"
    )


def check_damping(
    damping: Any, rule: Rule | None, accumulation: int | None
) -> None:
    """Refuses a damping that adapts itself where nothing tells it how.

    Raises:
        ValueError: If it is one without quadratic steps, or with micro-batches.
    """
    if not isinstance(damping, LevenbergMarquardt):
        return
    if not isinstance(rule, QuadraticStep):
        raise ValueError(
            "Argument `damping` must be a number or a schedule "
            "without step='quadratic': it can adapt itself only where the "
            "quadratic model has chosen the step and predicts what it does. "
            f"Received: damping={damping!r}"
        )
    if accumulation is not None:
        raise ValueError(
            "Argument `damping` must not be a `LevenbergMarquardt` with "
            "`gradient_accumulation_steps`: it compares losses of the whole "
            "batch, whose first parts are gone. Received: "
            f"damping={damping!r} with "
            f"gradient_accumulation_steps={accumulation}"
        )


def check_plain(inner: keras.optimizers.Optimizer, rule: Rule) -> None:
    """Refuses inner optimizers that would change a step of a rule.

    Raises:
        ValueError: If it is anything but SGD with a learning rate alone; a
            spectral step may have a weight decay beside it.
    """
    is_quadratic = isinstance(rule, QuadraticStep)
    names = ["momentum", "clipnorm", "clipvalue", "global_clipnorm"]
    names += ["weight_decay"] * is_quadratic
    changes = [name for name in names if getattr(inner, name, None)]
    if type(inner) is keras.optimizers.SGD and not changes:
        return
    what = f"{type(inner).__name__}({', '.join(changes)})"
    if not is_quadratic:
        raise ValueError(
            "Argument `inner_optimizer` must be SGD without momentum or "
            "clipping with step='spectral', which has a length and a momentum "
            "of its own. An optimizer with a rate that is tuned is the "
            "`rest_optimizer`, whose schedule the steps follow. "
            f"Received: inner_optimizer={what}"
        )
    raise ValueError(
        "Argument `inner_optimizer` must be SGD without momentum, clipping "
        "or weight decay with step='quadratic': the quadratic model chooses "
        "length and momentum of a step, which another rule would spoil. For "
        "decay use a layer's `kernel_regularizer`, which the model knows. "
        f"Received: inner_optimizer={what}"
    )
