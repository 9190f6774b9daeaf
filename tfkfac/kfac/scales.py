"""Units of the training data: spread of the labels, weights of the examples.

Also the other values that a spectral step reads from its batch, `Batch`.

Squared errors are the negative log-likelihood of a normal distribution whose
variance is not known; location losses are similar. In the unit

    U = u S m

the loss of `a + b y` is the loss of y. u is the unit of `loss/terms.py`, m the
mean weight of the examples, and s_y the standard deviation of the labels. S
is the loss of the best constant prediction: `s_y^2` for squared errors, for
location losses the loss of normally distributed residuals, and 1 for other
losses. With several losses, U is the largest of their units.

s_y and m are running averages over the batches of all workers. Their numerators
and denominators decay by 0.99 and 0.999 a step, so the first step has the
values of its batch.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfkfac.blocks.statistics import Examples, Subsample
from tfkfac.capture.model_taps import ForwardTap
from tfkfac.compat.graphs import Sum, before_relu
from tfkfac.curvature.directional import (
    LossInputs,
    directional_curvature,
    takes_any_batch,
)
from tfkfac.curvature.hessian import ADVICE
from tfkfac.kfac.active import ActiveBlock
from tfkfac.linalg.tensors import all_finite, select
from tfkfac.loss.recognition import CROSS_ENTROPIES, LOCATION, NORMAL, POISSON
from tfkfac.loss.shares import LossMeasure, weighted
from tfkfac.loss.targets import label_count
from tfkfac.loss.terms import LossTerms, has_free_scale, needs_recognition
from tfkfac.training.step import Changes, Gradients, Step

# Fraction of the batch of a step from which `D^T F D` is computed.
_BATCH_FRACTION = 0.25
_LABEL_DECAY, _WEIGHT_DECAY = 0.99, 0.999
# Layers that `OutputFit` changes: the last axis of the kernel is the outputs.
_LAST_LAYERS = (
    keras.layers.Dense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)
_MIN_ROWS = 7.5  # rows of labels before a fit of outputs
_FAR = 4.0  # mean square error over `s_y^2` above which the outputs are fitted
# Variance over mean square below which labels are constant: float32 rounding.
_CONSTANT = 1e-13


class Batch(NamedTuple):
    """Values of a batch for a spectral step, created outside of any `tf.cond`.

    See `length.py` for the symbols.
    """

    labels: tf.Tensor
    """Number of labels of a term, weighted by the share of this replica."""
    curvature: Callable[[Gradients], tuple[tf.Tensor, tf.Tensor]]
    """Returns `D^T F D` in the unit u, and q; zeros if they are unknown."""
    power: float | None
    """Exponent of sigma; None for sigma = 1."""
    vanishes: bool
    """True if the loss is Keras' sum of cross-entropies without penalties."""
    moments: "Moments | None"
    """Sums from which the unit of the loss follows; None for a constant."""

    @classmethod
    def of(
        cls,
        step: Step,
        moments: "Moments | None",
        advise: Callable[[str, str], None],
        micro_batches: int,
    ) -> "Batch":
        """Read the values from the batch of a step.

        Args:
            step: The step.
            moments: See above.
            advise: Function of a warning and its key. It issues the first
                warning of each key.
            micro_batches: Number of micro-batches of a step. F uses the
                fraction `min(1, micro_batches / 4)` of the last one.
        """
        fraction = min(micro_batches * _BATCH_FRACTION, 1.0)
        job, loss, replicas = step.job, step.loss, step.job.topology.replicas
        labels = weighted(label_count(loss.losses) / replicas, loss.share)
        total: Sum = tf.identity
        if step.group.size > 1:
            total = step.group.differentiable_sum
        calls = ForwardTap.open(job.model).pop_items()

        def curvature(directions: Gradients) -> tuple[tf.Tensor, tf.Tensor]:
            # Two inputs of the loss for each output: itself and its logits.
            size = 2 * len(tree.flatten(step.batch.arguments.get("y_pred")))
            sums = tf.zeros([1 + 2 * size], tf.float64)
            try:
                if step.batch.arguments:
                    inputs = LossInputs.of(job.model, step.batch, loss, calls)
                    if takes_any_batch(job.model, inputs.call):
                        subsample = Subsample(fraction, job.clock)
                        inputs = inputs.select(
                            lambda size: Examples(size, subsample)
                        )
                    form = directional_curvature(
                        job.model,
                        inputs,
                        step.variables,
                        [directions],
                        loss.unit,
                        total,
                        replicas,
                    )
                    parts = [form.squared_slopes[0], form.curvatures[0]]
                    missing = [[0, 0], [0, size - form.curvatures.shape[1]]]
                    padded = tf.reshape(tf.pad(parts, missing), [-1])
                    sums = tf.concat([form.matrix[0], padded], 0)
            except Exception as error:  # the model may not allow a second call
                advise(
                    f"Optimizer '{job.name}' cannot compute the curvature of "
                    f"the loss of model '{job.model.name}' along its steps, "
                    "and estimates their length by the factors alone, which "
                    "may be a few times too long or too short: see the length "
                    "of spectral steps in the documentation. "
                    f"The reason: {str(error).removesuffix(ADVICE)}",
                    "no curvature",  # one warning, also for other reasons
                )
            # All replicas run this all-reduce, also where the result is 0.
            (sums,) = step.group.all_reduce([sums])
            matrix, slopes, curvatures = tf.split(sums, [1, size, size])
            shares = tf.math.divide_no_nan(slopes, tf.reduce_sum(slopes))
            q = tf.reduce_sum(tf.where(tf.equal(curvatures, 0), shares, 0))
            return matrix[0], q

        power = None
        names = {terms.likelihood.name for terms in loss.losses}
        if names and names <= {NORMAL, POISSON, LOCATION}:
            power = 1.0 if LOCATION in names else 0.5
        # `model.losses` adds regularizers to the graph; TensorFlow prunes them.
        vanishes = bool(names) and names <= {*CROSS_ENTROPIES}
        vanishes &= not job.model.losses
        vanishes &= type(job.model).compute_loss is keras.Model.compute_loss
        vanishes &= type(job.model).train_step is keras.Model.train_step
        return cls(labels, curvature, power, vanishes, moments)

    def accumulated(self, sums: tf.Variable) -> "Batch":
        """Return a copy with moments summed over the micro-batches so far."""
        if self.moments is None:
            return self
        return self._replace(moments=self.moments.accumulated(sums))


class Moments:
    """Sums over the labels, weights and outputs of a batch.

    Attributes:
        layers: For each loss, the layer that computes its outputs, or None.
        values: The sums of this replica, a float64 vector.
        averaged_sizes: Sizes of the running sums of weights, then of labels.

    Args:
        loss: The losses of the batch.
        layers: See above.
        is_early: Scalar bool, True in the steps that may fit the outputs.
    """

    def __init__(
        self,
        loss: LossMeasure,
        layers: Sequence[ActiveBlock | None],
        is_early: tf.Tensor,
    ) -> None:
        self._losses, self._units, self.layers = loss.losses, loss.units, layers
        # Fit no layer of two losses: outputs that are fitted to one loss may be
        # far from the labels of the other.
        positions = [None if x is None else x.position for x in layers]
        self._fits = [
            OutputFit.of(terms, layer, is_early)
            if layer is not None and positions.count(layer.position) == 1
            else None
            for terms, layer in zip(loss.losses, layers, strict=True)
        ]
        none = tf.zeros([0], tf.float64)
        weights = [_weight_sums(terms) for terms in loss.losses]
        labels = [_label_sums(terms) for terms in loss.losses]
        fits = [None if fit is None else fit.sums for fit in self._fits]
        sums = [none if x is None else x for x in (*weights, *labels, *fits)]
        self._sizes = [int(x.shape[0]) for x in sums]
        # Reserve elements for the mean weight even if the batch has no weights.
        count = len(loss.losses)
        self.averaged_sizes = [2] * count + self._sizes[count : 2 * count]
        self._decays = [_WEIGHT_DECAY] * count + [_LABEL_DECAY] * count
        self.values = tf.concat([none, *sums], 0)

    def accumulated(self, sums: tf.Variable) -> "Moments":
        """Add these sums to the running `sums`; return the total."""
        moments = copy.copy(self)
        moments.values = _read(sums, sum(self._sizes)) + self.values
        sums.assign(moments.values)
        return moments

    def update(
        self, averages: tf.Variable, totals: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor | None], Changes]:
        """Add the sums of all workers to the running sums.

        Returns:
            `U / u`, the largest unit over the largest u; the standard deviation
            s_y of the labels of each loss, None for a loss without a free
            scale; and the changes of weights by `OutputFit`.
        """
        old = _read(averages, sum(self.averaged_sizes))
        batch = tf.split(totals, self._sizes)
        sums = [
            total + decay * part if total.shape[0] else part
            for part, total, decay in zip(
                tf.split(old, self.averaged_sizes),
                batch,
                self._decays,
                strict=False,
            )
        ]
        new = select(all_finite([totals]), tf.concat(sums, 0), old)
        averages.assign(new)
        parts, count = tf.split(new, self.averaged_sizes), len(self._losses)
        units: list[tf.Tensor] = []
        deviations: list[tf.Tensor | None] = []
        changes: Changes = {}
        for i, (terms, unit, fit) in enumerate(
            zip(self._losses, self._units, self._fits, strict=True)
        ):
            weights, labels, deviation = parts[i], parts[count + i], None
            if self._sizes[i]:
                mean = tf.math.divide_no_nan(weights[0], weights[1])
                unit *= tf.where(mean > 0, mean, 1.0)
            if labels.shape[0]:
                deviation, power = _deviation(labels)
                spread = terms.likelihood.spread or tf.square
                unit *= spread(deviation)
                if fit is not None:
                    fit_sums = batch[2 * count + i]
                    changes |= fit.changes(fit_sums, deviation, power)
            units.append(unit)
            deviations.append(deviation)
        factor = tf.math.divide_no_nan(
            tf.reduce_max(units), tf.reduce_max(self._units)
        )
        return tf.where(factor > 0, factor, 1.0), deviations, changes


def _read(sums: tf.Variable, size: int) -> tf.Tensor:
    """Read `size` running sums; zeros if their stored number differs."""
    with tf.init_scope():
        # XLA would compile a second time if the first step set the size.
        if sums.read_value().shape != [size]:
            sums.assign(tf.zeros([size], tf.float64))
    value = sums.read_value()
    fits = tf.cast(tf.equal(tf.size(value), size), tf.float64)
    return tf.ensure_shape(tf.pad(value, [[0, size]])[:size], [size]) * fits


class OutputFit(NamedTuple):
    """Fit of a scale and an offset of each output.

    The outputs z of a new model may be far from labels whose unit is not that
    of the initial weights. If their mean square error is more than `4 s_y^2`,
    half of the mean square of the labels, and twice the error of
    `alpha z + beta`, one of the first 10 steps sets the kernel and the bias of
    the last layer so that its outputs are `alpha z + beta`. It does so for any
    learning rate, and changes no other weight. `alpha z` has at most the
    standard deviation s_y; beta is the mean error. Needs 8 rows of labels.
    """

    layer: ActiveBlock
    sums: tf.Tensor
    """Sums of `w, w z, w z^2, w y z, w y, w y^2` for each output, or zeros."""

    @classmethod
    def of(
        cls, terms: LossTerms, layer: ActiveBlock, is_early: tf.Tensor
    ) -> "OutputFit | None":
        """Return the fit; None if the layer or labels do not allow it."""
        if not has_free_scale(terms):
            return None
        if not isinstance(layer.block.layer, _LAST_LAYERS):
            return None
        assert terms.call is not None
        y, z = map(tf.convert_to_tensor, (terms.call.y_true, terms.call.y_pred))
        if before_relu(z) is not z:  # an offset could make all outputs 0
            return None
        y, z = (x[:, None] if x.shape.rank == 1 else x for x in (y, z))
        variables = layer.block.variables
        shapes = [tuple(v.shape) for v in variables]
        columns = z.shape[-1]
        is_plain = None not in layer.indices and columns is not None
        is_plain &= tf.TensorShape(y.shape[1:]).is_compatible_with(z.shape[1:])
        is_plain &= shapes[0][-1:] == (columns,)
        is_plain &= shapes[1:] in ([], [(columns,)])
        if not is_plain:
            return None

        def sums() -> tf.Tensor:
            y64, z64 = (
                tf.reshape(tf.cast(x, tf.float64), [-1, columns])
                for x in (y, z)
            )
            factors = [tf.ones_like(z64), z64, z64**2, y64 * z64, y64, y64**2]
            w = _label_weights(terms, z, columns)
            products = tf.math.multiply_no_nan(tf.stack(factors), w)
            return tf.reshape(tf.reduce_sum(products, 1), [-1])

        # Sum on all workers, even zeros: workers must run the same collectives.
        zeros = tf.zeros([6 * columns], tf.float64)
        return cls(layer, tf.cond(is_early, sums, lambda: zeros))

    def changes(
        self, sums: tf.Tensor, deviation: tf.Tensor, power: tf.Tensor
    ) -> Changes:
        """Return the changes of the kernel and the bias."""
        totals, *products = tf.unstack(tf.reshape(sums, [6, -1]))
        z, zz, yz, y, yy = (tf.math.divide_no_nan(x, totals) for x in products)
        has_bias = len(self.layer.indices) > 1
        variance = tf.maximum(zz - z * z if has_bias else zz, 0.0)
        alpha = tf.minimum(
            tf.math.divide_no_nan(deviation, tf.sqrt(variance)), 1.0
        )
        beta = y - alpha * z if has_bias else tf.zeros_like(y)
        error = tf.reduce_mean(yy - 2 * yz + zz)
        fitted = yy + alpha * (alpha * zz - 2 * yz)
        fitted += beta * (beta - 2 * y + 2 * alpha * z)
        # The labels of one batch may vary less than the labels of others: a
        # trained model has a smaller error than outputs of 0.
        due = (error > _FAR * tf.square(deviation)) & (error > power / 2)
        due &= (error > 2 * tf.reduce_mean(fitted)) & tf.math.is_finite(error)
        offsets = tf.zeros_like(beta), beta
        return {
            i: (due, alpha - 1, offset)
            for i, offset in zip(self.layer.present, offsets, strict=False)
        }


def _weight_sums(terms: LossTerms) -> tf.Tensor | None:
    """Return the sum and the number of the weights; None if all are 1."""
    reduction = None if terms.call is None else terms.call.reduction
    if reduction is None or reduction.weights is None:
        return None
    # This mean does not change if all weights are multiplied by a constant.
    if reduction.kind == "mean_with_sample_weight":
        return None
    weights = reduction.term_weights()
    mask = reduction.product(reduction.mask)
    assert weights is not None
    count = tf.cast(tf.size(weights), tf.float64)
    if mask is not None:
        count = tf.reduce_sum(tf.cast(mask, tf.float64))
    return tf.stack([tf.reduce_sum(tf.cast(weights, tf.float64)), count])


def _label_sums(terms: LossTerms) -> tf.Tensor | None:
    """Return `sum w^2`, `sum w y^2`, and for each output `sum w`, `sum w y`.

    None for a loss without a free scale. w are the weights of the labels.
    """
    if not has_free_scale(terms):
        return None
    assert terms.call is not None
    y = tf.convert_to_tensor(terms.call.y_true)
    columns = (y.shape[-1] if y.shape.rank > 1 else 1) or 1
    w = _label_weights(terms, y, columns)
    y = tf.reshape(tf.cast(y, tf.float64), [-1, columns])
    wy = tf.math.multiply_no_nan(y, w)
    squares = tf.reduce_sum(tf.math.multiply_no_nan(y, wy))
    first = tf.stack([tf.reduce_sum(w * w) / columns, squares])
    return tf.concat([first, tf.reduce_sum(w, 0), tf.reduce_sum(wy, 0)], 0)


def _label_weights(
    terms: LossTerms, labels: tf.Tensor, columns: int
) -> tf.Tensor:
    """Return the weights of labels or outputs, `(rows, columns)`.

    The weight is 0 for labels that a custom loss ignores.
    """
    assert terms.call is not None and terms.call.reduction is not None
    shape = tf.shape(labels)
    weights = terms.call.reduction.term_weights()
    if weights is None:
        weights = tf.ones([], tf.float32)
    ones = tf.ones([tf.maximum(tf.size(shape) - tf.rank(weights), 0)], tf.int32)
    weights = tf.reshape(weights, tf.concat([tf.shape(weights), ones], 0))
    weights = tf.reshape(tf.broadcast_to(weights, shape), [-1, columns])
    weights = tf.cast(weights, tf.float64)
    used = terms.likelihood.used
    if used is not None and needs_recognition(terms.call.loss):
        y = tf.convert_to_tensor(terms.call.y_true)
        flags = tf.reshape(used(y, terms.call.y_pred), [-1, columns])
        weights *= tf.cast(flags, tf.float64)
    return weights


def _deviation(sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the standard deviation and the mean square of the labels.

    The deviation is about each output's mean. Without a variance, as for a
    single row, use the root mean square; if this is 0, use 1. With fewer than
    `_MIN_ROWS` rows the mean square is the largest float.
    """
    columns = (sums.shape[0] - 2) // 2
    squares, power, totals, means = tf.split(sums, [1, 1, columns, columns])
    total = tf.reduce_sum(totals)
    means = tf.math.divide_no_nan(means, totals)
    power = tf.math.divide_no_nan(power[0], total)
    variance = power - tf.math.divide_no_nan(
        tf.reduce_sum(totals * tf.square(means)), total
    )
    # Effective number of rows
    rows = tf.math.divide_no_nan(tf.square(total / columns), squares[0])
    is_constant = (variance <= _CONSTANT * power) | (rows <= 1)
    variance *= tf.math.divide_no_nan(rows, rows - 1)
    variance = tf.where(is_constant, power, variance)
    deviation = tf.sqrt(tf.where(variance > 0, variance, 1.0))
    return deviation, tf.where(rows >= _MIN_ROWS, power, power.dtype.max)
