"""Length of a step: the clip, damping that adapts, and what is said of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.kfac.settings import LevenbergMarquardt
from tfkfac.linalg.tensors import stack_scalars
from tfkfac.saving.slots import Slots
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
# And so long of each block: the square is a sum over blocks. It is fitted to a
# MobileNet of 87 blocks, which 0.07 trains too slowly.
_OF_BLOCK = 0.02
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
    least = max(_LEAST, _OF_BLOCK * math.sqrt(len(products)))
    kappa = tf.sqrt(tf.maximum(_SHARE * loss, least**2))
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
