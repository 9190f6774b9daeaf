"""Length of a step: the clip, damping that adapts, and what is said of them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfkfac.checks import (
    check_choice,
    check_count,
    check_positive,
    check_range,
)
from tfkfac.kfac.settings import check_batch_fraction
from tfkfac.linalg.tensors import stack_scalars
from tfkfac.saving.slots import Slots
from tfkfac.shell.arguments import Hyperparameter, Schedule, Settings
from tfkfac.shell.rest import share_of_largest
from tfkfac.training.accumulation import names_of
from tfkfac.training.guards import count_each


class Clip(NamedTuple):
    """Clip of one step."""

    factor: tf.Tensor
    """Factor on the preconditioned gradients."""
    length: tf.Tensor
    """The squared length of the step before."""


def clip_step(
    products: Sequence[tf.Tensor], kl_clip: tf.Tensor | None, learning_rate: Any
) -> Clip:
    """`nu = min(1, sqrt(kl_clip / (lr^2 |sum <P, W>|)))`.

    `lr^2 <P, W>` is the squared length of a step in the Fisher metric, about
    twice the change of the model's predictions in nats (Distributed K-FAC,
    eq. 16). All preconditioned gradients P are scaled by the same factor, 1 if
    there is nothing to clip. The products are `<P, W>` of each block.
    """
    total = tf.abs(tf.reduce_sum(stack_scalars(products)))
    length = tf.square(tf.cast(learning_rate, tf.float64)) * total
    if kl_clip is None:
        return Clip(tf.ones_like(length), length)
    clipped = tf.sqrt(
        tf.math.divide_no_nan(tf.cast(kl_clip, tf.float64), length)
    )
    factor = tf.where(length > 0, tf.minimum(clipped, 1.0), 1.0)
    return Clip(factor, length)


# The reduction ratios between which the damping stays.
_LOW, _HIGH = 1 / 4, 3 / 4
# A step that is rejected quarters the radius of a trust region, which damping
# is the inverse of.
_REJECTED = 4.0
# A step that predicts over 4x the last verified reduction is verified too.
_UNUSUAL = 4.0
# Rounding errors of a loss, relative to it.
_ROUNDING = 1e-6
# Names of these sections in a saved file.
ADAPTIVE = "adaptive_damping"
PREVIOUS = "previous"
SPECTRAL = "spectral"


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
            `KFAC`: a number, a schedule, a callable of the iteration or a
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
    values (Amsel et al., 2025). Vectors are divided by their norm.

    With `length="fisher"` all D together get the length at which the loss
    decreases, to first order, as much as along a natural gradient step with a
    length, in the Fisher metric, of

        kappa s,   kappa = max(0.07, sqrt(0.005 L)),

    where s is the learning rate over the largest one of its schedule, at most
    1, and L the negative log-likelihood of a term of the loss, 0 if nobody
    sees it or if it is not finite. So a learning rate says nothing but its
    schedule's shape, and it needs one: at a constant rate these steps do not
    get shorter by themselves. That length takes `<D, N> / sqrt(<P, N>)`, a
    lower bound of the Fisher length of D by Cauchy and Schwarz. Another one is
    the root of the damping times `|D|^2`; the larger one counts.

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
            "Argument `damping` must be a number, a schedule or a callable "
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


class AdaptiveDamping(Slots):
    """The damping of one replica, the same on all.

    Attributes:
        value: The damping, float64.
        rejected: Number of steps rejected.
        again: 1 after a step that was rejected, else 0.
        trusted: The reduction predicted of the last accepted step that was
            looked at, float64; infinite before the first.
    """

    def __init__(self, rule: LevenbergMarquardt) -> None:
        super().__init__("damping", part=ADAPTIVE)
        self.rule = rule
        self.value = self.slot("damping", (), "float64", rule.initial)
        self.rejected = self.slot("rejected_steps")
        self.again = self.slot("looks_again")
        self.trusted = self.slot(
            "trusted_reduction", (), "float64", math.inf, is_finite=False
        )

    def is_due(self, clock: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        """True if the update after `clock` others is to be verified."""
        last = tf.equal((clock + 1) % self.rule.every, 0)
        unusual = predicted > _UNUSUAL * self.trusted
        return last | unusual | (self.again > 0)

    def judge(
        self,
        before: tf.Tensor,
        after: tf.Tensor,
        predicted: tf.Tensor,
        name: str,
    ) -> tf.Tensor:
        """Adapts the damping to a step; returns a bool, true if it is accepted.

        The loss before and after it, and the reduction predicted, are float64.
        """
        rounding = _ROUNDING * tf.abs(before)
        # None is predicted of a learning rate of 2 or more.
        expected = tf.maximum(predicted, 0)
        ratio = (before - after + rounding) / (expected + rounding)
        accepted = ratio >= 0  # not if it is NaN
        step = tf.constant(self.rule.decay**self.rule.every, tf.float64)
        one = tf.ones_like(step)
        factor = tf.where(ratio > _HIGH, step, one)
        factor = tf.where(ratio < _LOW, 1 / step, factor)
        factor = tf.where(accepted, factor, _REJECTED)
        self.value.assign(
            tf.clip_by_value(
                self.value * factor, self.rule.minimum, self.rule.maximum
            )
        )
        self.again.assign(tf.cast(~accepted, tf.int64))
        self.trusted.assign(tf.where(accepted, expected, self.trusted))
        count_each(
            ~accepted,
            self.rejected,
            [name],
            "a step is rejected, it would raise the loss; the damping grows.",
        )
        return accepted

    def text(self) -> str:
        """A line of the summary."""
        return f"Damping now {float(self.value.numpy()):.4g}, {self.rule!r}."


# What may be said of a step; what is not is NaN.
_NAMES = (
    "clip_factor",
    "length",
    "damping",
    "alpha",
    "alpha_plain",
    "mu",
    "predicted_reduction",
    "actual_reduction",
)
# Steps that are looked at, how many of them are many, and what of a step is
# little. In healthy runs half of the clip factors are above 0.6 (autoencoders;
# of classifiers most are 1), on pixels times 4,080 below 0.07.
_FIRST, _MANY, _LITTLE = 200, 100, 0.25
# Learning rate of steps that the clip bounds. Below this share of it, where
# the clip has shortened none of the very first steps, it hardly trains.
RATE, SMALL = 0.1, 0.1
_VERY_FIRST = 50


class StepReport(Slots):
    """Numbers of the last step, in variables of one replica.

    Attributes:
        steps: Number of steps so far.
        clipped: Number of the first of them that the clip left little of.
        hints: 1 once the hint has been given.
        shortened: Number of the very first of them that the clip has shortened
            at all.
        slow: 1 once it has been said that the learning rate is too small.
        sums: Number of times that the loss has looked like a sum.
        lost: Number of steps whose quadratic model was not finite.
    """

    def __init__(self) -> None:
        super().__init__("report")
        self.steps = self.slot("reported_steps", saved=False)
        self.clipped = self.slot("clipped_steps", saved=False)
        self.hints = self.slot("clip_hints", saved=False)
        self.shortened = self.slot("shortened_steps", saved=False)
        self.slow = self.slot("rate_hints", saved=False)
        self.sums = self.slot("summed_losses", saved=False)
        self.lost = self.slot("lost_models", saved=False)
        self._values = {
            name: self.slot(name, (), "float64", math.nan, saved=False)
            for name in _NAMES
        }

    def note(
        self,
        clip: Clip,
        damping: tf.Tensor,
        name: str,
        rate: tf.Tensor | None,
    ) -> None:
        """Notes a step of the optimizer of this name.

        There is a learning rate if it may be too small, and SGD's.
        """
        if rate is not None:
            self._note_rate(clip, rate, name)
        length = tf.square(clip.factor) * clip.length
        self.assign(clip_factor=clip.factor, length=length, damping=damping)
        early = self.steps <= _FIRST
        clipped = tf.logical_and(early, clip.factor < _LITTLE)
        self.clipped.assign_add(tf.cast(clipped, tf.int64))
        ruled = tf.equal(self.steps, _FIRST) & (self.clipped >= _MANY)
        count_each(
            ruled,
            self.hints,
            [name],
            f"kl_clip has left less than {_LITTLE:.0%} of half of the first "
            f"{_FIRST} steps. Are the model's inputs normalised? If they "
            'cannot be, try KFAC(fisher="monte_carlo"). A smaller learning '
            "rate or a larger damping may help too; see `optimizer.last_step`.",
        )

    def _note_rate(self, clip: Clip, rate: tf.Tensor, name: str) -> None:
        """Says that a learning rate is one of Adam's."""
        shortened = (self.steps < _VERY_FIRST) & (clip.factor < 1)
        self.shortened.assign_add(tf.cast(shortened, tf.int64))
        last = tf.equal(self.steps, _VERY_FIRST - 1)
        small = tf.cast(rate, tf.float64) < SMALL * RATE
        count_each(
            last & tf.equal(self.shortened, 0) & small,
            self.slow,
            [name],
            f"kl_clip has shortened none of the first {_VERY_FIRST} steps, and "
            f"the learning rate is below {SMALL * RATE:g}. Rates of Adam are "
            f"too small here: the default is {RATE:g}.",
        )

    def assign(self, **values: tf.Tensor) -> None:
        """Notes numbers of a step, by name."""
        for name, value in values.items():
            self._values[name].assign(tf.cast(value, tf.float64))
        self.steps.assign_add(1)

    def note_sum(self, summed: tf.Tensor | None, name: str) -> None:
        """Notes whether the loss looks like a sum that is taken for a mean."""
        if summed is None:
            return
        count_each(
            summed,
            self.sums,
            [name],
            "the loss looks like the sum over the examples, but is taken for "
            "their mean, which makes steps too short. Divide it by their "
            "number, or say `optimizer.attach(model, loss_terms=1)`.",
        )

    def values(self) -> dict[str, float]:
        """The last step's numbers, by name; none before the first step."""
        if int(self.steps.numpy()) == 0:
            return {}
        every = {name: float(v.numpy()) for name, v in self._values.items()}
        return {name: v for name, v in every.items() if not math.isnan(v)}


class LargestRate(Slots):
    """The learning rate that those of spectral steps are shares of.

    A number is what callbacks reduce, before and after a model is saved.
    """

    def __init__(self, rate: float) -> None:
        super().__init__("rate", part=SPECTRAL)
        self.value = self.slot("largest_rate", (), "float64", rate)


# Fisher length of a spectral step: at least so long, or so large a share of
# the loss that its square is. Measured on tiny models of 13 kinds.
_LEAST, _SHARE = 0.07, 0.005
# Root mean square of a step's elements over the learning rate.
_RMS = 0.2


def spectral_length(
    products: Sequence[tf.Tensor],
    squares: Sequence[tf.Tensor],
    loss: tf.Tensor,
    damping: tf.Tensor,
    largest: LargestRate,
    rate: tf.Tensor,
) -> Clip:
    """Length of a spectral step, as `SpectralStep` has it.

    Args:
        products: `<D, N>` and `<P, N>` of each block.
        squares: `|D|^2` of each block.
        loss: The negative log-likelihood L of a term.
        damping: The damping.
        largest: The largest learning rate.
        rate: The learning rate, by which the inner optimizer multiplies.

    Returns:
        The factor on all D, and the squared length of the step.
    """
    numbers = tf.stack([tf.cast(pair, tf.float64) for pair in products])
    decrease, product = tf.unstack(tf.reduce_sum(numbers, 0))
    decrease = tf.maximum(decrease, 0)
    square = tf.math.divide_no_nan(tf.square(decrease), product)
    bound = tf.reduce_sum(stack_scalars(squares))
    bound *= tf.cast(damping, tf.float64)
    # Gradients may be finite where the loss is not.
    loss = tf.where(tf.math.is_finite(loss), loss, tf.zeros_like(loss))
    rate = tf.cast(rate, tf.float64)
    kappa = tf.sqrt(tf.maximum(_SHARE * loss, _LEAST**2))
    kappa *= share_of_largest(rate, largest.value)
    length = tf.sqrt(tf.maximum(square, bound))
    factor = tf.math.divide_no_nan(kappa, length * rate)
    return Clip(factor, tf.square(kappa))


def rms_factor(square: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Factor that gives a matrix of a squared norm the RMS of `_RMS`."""
    size = tf.constant(_RMS * math.sqrt(math.prod(shape)), square.dtype)
    return tf.math.divide_no_nan(size, tf.sqrt(square))


class Previous(Slots):
    """The update before, of one replica.

    Attributes:
        changes: What was added to each trainable weight.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__("previous", part=PREVIOUS)
        self.changes = [
            self.slot(f"previous_update_{name}", v.shape, v.dtype, layer=path)
            for v, (path, name) in zip(
                model.trainable_variables, names_of(model), strict=True
            )
        ]
