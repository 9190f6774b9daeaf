"""Length of spectral steps.

All directions D of the blocks have the root mean square 0.2, as in Muon. They
are multiplied by the learning rate s and by

    r = min(max(f c, w kappa / sqrt(rho sum |Q|^2)), 1),
    kappa = max(0.07 c, min(0.6 sqrt(c (L - H)), 0.45 c sqrt(n) sigma)),
    c = min(1, sqrt(400 / T)),

where T is the number of updates of the run (so far, if it is unknown), L the
negative log-likelihood of a term of the loss in nats, H the minimum of L for
the targets (the entropy of soft or binary targets), and n the number of labels
of a term. Losses with a free scale are in the unit of `scales.py`; sigma is the
size of their residuals over the standard deviation of the labels, at least 1:
`sqrt(2 (L - H) / n)` for squared errors and counts, `(L - H) / n` for location
losses. For other losses, sigma is 1. `|Q|^2` is the squared length of D in the
metric of K-FAC. The sum is over the blocks, or over all matrices of a model
without blocks, and

    rho = max(new, 0.9 rho + 0.1 new),   new = |D^T F D| / sum |Q|^2 + q

corrects the length of all D, including those of matrices without a block, by
the Gauss-Newton matrix F of a quarter of the batch, or of the whole batch if
the model may depend on the batch size. With micro-batches, F uses examples of
the last micro-batch: as many as a quarter of the large batch has, or all.

F is zero for losses that are linear in the outputs, such as absolute errors.
For these the factors alone estimate the curvature:

    q = (sum over linear losses of (g t)^2) / (sum over all losses of (g t)^2)

with t the change of the outputs along D, and g the gradient at the outputs. So
kappa is the square root of about twice the change of the predictions in nats.
`w = min(1, t / 10)` in step t: the first factors are rough.

The lower bound of r is f c. In general f is 0.006. Models with recurrent layers
train better with longer steps than rho allows. There, for all layers,

    f = max(0.006, min(0.05, 0.3 sqrt(L - H))).

Without a limit, steps would go on at the length f c where the predictions of
classes are certain and the gradient vanishes, and the weights would grow until
the loss jumps. So if all losses are cross-entropies, without penalties, added
losses, or a custom `compute_loss` or `train_step`, r is multiplied by

    min(1, |L - H| / (n 1e-5)),

also in the weight decay. A step that this factor shortens does not change rho.
"""

from collections.abc import Callable

import tensorflow as tf

from tfkfac.compat.functions import when
from tfkfac.kfac.averages import SPECTRAL
from tfkfac.saving.slots import Slots
from tfkfac.shell.rest import LENGTH
from tfkfac.shell.small_rates import RATE

# Root mean square of a direction D; Muon has the same at learning rate 1.
RMS = 0.2
# Constants of r and kappa in the module docstring, fitted to small problems.
_MIN_LENGTH, _PER_ROOT_OF_LOSS, _PER_ROOT_OF_LABELS = 0.07, 0.6, 0.45
_MIN_RATE = 0.006
# Constants of f for models with recurrent layers. In comparison with f = 0.006,
# nine small recurrent networks have 0.27 times the training loss and the same
# held-out loss (geometric means, seeds 0 and 1). With 0.1 in place of 0.05, the
# training of a convolutional recurrent network fails, and a GRU on noisy series
# overfits (held out 0.29 -> 0.42). A constant f of 0.05 has lower training
# losses, but higher held-out losses. With 0.15 in place of 0.3, an LSTM on 700
# sequences ends at 0.0016 in place of 0.0004 (means of three seeds).
_MAX_RECURRENT_BOUND, _RECURRENT_PER_ROOT_OF_LOSS = 0.05, 0.3
# Bound of r for saturated predictions, where the divisor `D^T F D` is near 0.
_MAX_RATE = 1.0
WARMUP = 10
_MEMORY = 0.9
# Number of updates T above which c = sqrt(_SHORT_RUN / T) shortens the steps.
# At 1,440 to 2,000 updates, classifiers and language models had better results
# with c (0.53 to 0.45) than with 1. A deep autoencoder had better results with
# 1 than with c, and with sqrt(c) on the loss bound than with c.
_SHORT_RUN = 400
# Bound of `(L - H) / n` under which steps are shorter. Keras clips
# probabilities at 1e-7; with logits, float32 resolves about 1e-7.
_CERTAIN = 1e-5
# Lower bound of `new` in the module docstring.
_MIN_RATIO = 1e-3
# steps: compute `D^T F D` in each of the first 100, then in every 10th
_EARLY, _INTERVAL = 100, 10


class SpectralLength(Slots):
    """Compute the length of spectral steps; store rho, step count and scales.

    Attributes:
        factor: r of the last step.
        is_recurrent: True if spectral steps train matrices of recurrent layers.
        scale_sums: Running sums of `scales.Moments`.
    """

    def __init__(self) -> None:
        super().__init__("length", section=SPECTRAL)
        self.is_recurrent = False
        self.steps = self.slot("length_steps")
        self.ratio = self.slot("length_ratio", (), "float64", 1.0)
        self.scale_sums = self.slot("scale_sums", (None,), "float64")
        self.factor = self.slot("length_factor", (), "float32", LENGTH, False)

    def rate(
        self,
        square: tf.Tensor,
        excess: tf.Tensor,
        labels: tf.Tensor,
        curvature: Callable[[], tuple[tf.Tensor, tf.Tensor]],
        updates: tf.Tensor,
        power: float | None = None,
        vanishes: bool = False,
    ) -> tf.Tensor:
        """Return r, the factor of all directions D, see the module docstring.

        Args:
            square: `sum |Q|^2`.
            excess: `L - H`.
            labels: n.
            curvature: Returns `D^T F D` and q; zeros if they are unknown.
            updates: T.
            power: Exponent of sigma; None for sigma = 1.
            vanishes: True if all gradients vanish where `L - H` is 0.
        """
        self.steps.assign_add(1)
        due = (self.steps <= _EARLY) | tf.equal(self.steps % _INTERVAL, 0)
        share = tf.ones([], tf.float64)
        if vanishes:
            # The excess is negative with negative weights of examples.
            share = tf.abs(excess) / (labels * _CERTAIN)
            share = tf.where(share < 1, share, 1)  # also if it is NaN
        is_full = share >= 1
        # `curvature` has collectives, so `due` must be equal on all replicas.
        when(due, lambda: self._update_ratio(*curvature(), square, is_full))
        # Use 0 if the loss is not finite; the gradients may still be finite.
        excess = tf.where(tf.math.is_finite(excess), tf.maximum(excess, 0), 0)
        c = tf.minimum(_SHORT_RUN / tf.cast(updates, tf.float64), 1.0)
        c = tf.sqrt(c)
        loss_bound = _PER_ROOT_OF_LOSS * tf.sqrt(excess * c)
        label_bound = _PER_ROOT_OF_LABELS * c * tf.sqrt(labels)
        if power is not None:
            # A residual of s_y is 1/2 nat (squared errors) or about 1 nat.
            sigma = tf.pow(excess / labels / power, power)
            label_bound *= tf.maximum(sigma, 1.0)
        kappa = tf.minimum(loss_bound, label_bound)
        kappa = tf.maximum(kappa, _MIN_LENGTH * c)
        warmup = tf.minimum(tf.cast(self.steps, tf.float64) / WARMUP, 1.0)
        length = tf.sqrt(self.ratio * square)
        rate = warmup * tf.math.divide_no_nan(kappa, length)
        f = tf.constant(_MIN_RATE, tf.float64)
        if self.is_recurrent:
            bound = _RECURRENT_PER_ROOT_OF_LOSS * tf.sqrt(excess)
            f = tf.clip_by_value(bound, f, _MAX_RECURRENT_BOUND)
        return share * tf.clip_by_value(rate, f * c, _MAX_RATE)

    def _update_ratio(
        self,
        form: tf.Tensor,
        q: tf.Tensor,
        square: tf.Tensor,
        is_full: tf.Tensor,
    ) -> None:
        """Update rho from `D^T F D` (`form`), q and `sum |Q|^2` (`square`).

        Keep rho if the step is shortened (not `is_full`), or if the form and q
        are 0: all sample weights are 0, or the curvature is unknown. The form
        of a concave loss, such as Dice, is negative.
        """
        form = tf.abs(form)
        usable = tf.math.is_finite(form + q) & (form + q > 0) & is_full
        new = tf.math.divide_no_nan(form, square) + q
        new = tf.maximum(new, _MIN_RATIO)
        old = tf.where(tf.equal(self.steps, 1), new, self.ratio)
        average = tf.maximum(new, _MEMORY * old + (1 - _MEMORY) * new)
        usable &= tf.math.is_finite(average)
        self.ratio.assign(tf.where(usable, average, self.ratio))


# --------------------------------------------------- metrics of a step

# Names of the step metrics; a metric is NaN where it does not apply.
_NAMES = ("clip_factor", "length", "damping")
# Print the clip hint in step `HINT_STEP` if in at least `MIN_CLIPPED` steps the
# clip factor was below `LOW_FACTOR` and the squared length over `_LONG`.
HINT_STEP, MIN_CLIPPED, LOW_FACTOR, _LONG = 20, 12, 0.1, 2.0
# Count a step for the hint on the scale of the inputs if its clip factor times
# `max(1, learning rate / RATE)` is below this bound. On raw pixels, dense
# layers of 64 units have factors of 0.1 to 0.15 from step 6 on.
LOW_SCALED_FACTOR = 0.25


class StepReport(Slots):
    """Metrics of the last step, in variables of one replica.

    Attributes:
        clipped: Number of the first steps with a clip factor below `LOW_FACTOR`
            and a squared length over `_LONG`.
        short: Number of the first steps with a scaled clip factor below
            `LOW_SCALED_FACTOR`.
    """

    def __init__(self) -> None:
        super().__init__("report")
        self.steps = self.slot("reported_steps", saved=False)
        self.clipped = self.slot("clipped_steps", saved=False)
        self.short = self.slot("short_steps", saved=False)
        self.hints = self.slot("clip_hints", saved=False)
        self._values = {
            name: self.slot(name, (), "float64", saved=False) for name in _NAMES
        }

    def record(
        self,
        factor: tf.Tensor,
        length: tf.Tensor,
        damping: tf.Tensor,
        rate: tf.Tensor | None,
    ) -> tf.Tensor:
        """Record the metrics of a step.

        Returns True in step `HINT_STEP` if most steps up to it were short.
        `factor` is the clip factor, `length` the squared Fisher length before
        the clip. `rate` is SGD's learning rate, or None for another inner
        optimizer.
        """
        clipped_length = tf.square(factor) * length
        self.assign(clip_factor=factor, length=clipped_length, damping=damping)
        is_early = self.steps <= HINT_STEP
        is_clipped = (factor < LOW_FACTOR) & (length > _LONG)
        self.clipped.assign_add(tf.cast(is_early & is_clipped, tf.int64))
        is_short = is_clipped
        if rate is not None:
            scaled = factor * tf.cast(rate / RATE, factor.dtype)
            is_short |= tf.maximum(scaled, factor) < LOW_SCALED_FACTOR
        self.short.assign_add(tf.cast(is_early & is_short, tf.int64))
        return tf.equal(self.steps, HINT_STEP) & (self.short >= MIN_CLIPPED)

    def assign(self, **values: tf.Tensor) -> None:
        """Assign metrics of a step, by name."""
        for name, value in values.items():
            self._values[name].assign(tf.cast(value, tf.float64))
        self.steps.assign_add(1)

    def values(self) -> dict[str, float]:
        """Return the metrics of the last step; empty before the first step."""
        if int(self.steps.numpy()) == 0:
            return {}
        return {name: float(v.numpy()) for name, v in self._values.items()}
