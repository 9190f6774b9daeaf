"""Test in each batch whether a loss is a multiple of a known likelihood.

For each candidate likelihood, compare the values of the loss with
`u * nll`, where `u = sum(values) / sum(nll)`. The loss is a multiple of the
likelihood if all compared terms agree within 0.1 %. `u` is computed in each
step, because a loss weight may be a variable. A Huber loss agrees with the
normal likelihood only in batches without large residuals.

To limit the cost, compare at most `_MAX_ROWS` terms, including the term with
the largest value, because robust losses differ at large residuals. The values
of fewer than `_MIN_TERMS` terms, or a scalar loss, could be a multiple of any
likelihood. In these cases, compare the gradients at the outputs, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfkfac.compat.losses import Leaves, LossCall, Reduction

# Names of likelihoods; the outputs are means, rates, probabilities or logits.
NORMAL, POISSON = "normal", "poisson"
BERNOULLI, CATEGORICAL = "bernoulli", "categorical"
BERNOULLI_LOGITS = "bernoulli logits"
CATEGORICAL_LOGITS = "categorical logits"
LOGITS = {BERNOULLI: BERNOULLI_LOGITS, CATEGORICAL: CATEGORICAL_LOGITS}

# Relative tolerance of the comparison; rounding error of float32 probabilities;
# Keras clips probabilities to [_EPSILON, 1 - _EPSILON].
_TOLERANCE, _ROUNDING, _EPSILON = 1e-3, 1e-6, 1e-7


class Verdict(NamedTuple):
    """Likelihood and unit of a loss, from the comparisons of all replicas.

    Attributes:
        names: Names of the candidate likelihoods.
        index: Index of the likelihood in `names`, an int32 scalar;
            `len(names)` if no likelihood agrees.
        unit: Unit of the loss; 1 if no likelihood agrees.
        is_counted: Scalar bool, False if the step is not reported although no
            likelihood agrees, as for a loss that is not finite.
    """

    names: tuple[str, ...]
    index: tf.Tensor
    unit: tf.Tensor
    is_counted: tf.Tensor

    @property
    def is_known(self) -> tf.Tensor:
        """Scalar bool, True if a likelihood agrees."""
        return self.index < len(self.names)


class Recognition(NamedTuple):
    """Comparison of a loss with all candidate likelihoods on one replica.

    Attributes:
        sums: Numbers to sum over the replicas, float64 `(len(names), 7)`.
        is_reported: True to report a loss that matches no likelihood.
    """

    names: tuple[str, ...]
    sums: tf.Tensor
    is_reported: bool = True

    def times(self, factor: tf.Tensor) -> "Recognition":
        """Return the `Recognition` of `factor` times the loss."""
        powers = tf.constant([0, 1, 0, 2, 1, 0, 0], tf.float64)
        return self._replace(sums=self.sums * tf.pow(factor, powers))

    def verdict(self, sums: tf.Tensor) -> Verdict:
        """Choose the likelihood, given `sums` summed over all replicas."""
        wrong, product, square, spread, values, nll, floor = tf.unstack(
            sums, axis=1
        )
        unit = tf.math.divide_no_nan(product, square)
        expected = unit * nll
        tolerance = _TOLERANCE * tf.abs(expected) + unit * floor
        # The units of all replicas must be equal: test their variance.
        variance = spread - tf.math.divide_no_nan(product**2, square)
        equal = variance <= _TOLERANCE**2 * spread
        fits = (wrong == 0) & equal & (tf.abs(values - expected) <= tolerance)
        is_zero = (wrong == 0) & (values == 0) & (nll <= floor)
        fits = is_zero | (fits & (unit > 0) & tf.math.is_finite(unit))
        number = len(self.names)
        index = tf.reduce_min(tf.where(fits, tf.range(number), number))
        unit = tf.where(is_zero, tf.ones_like(unit), unit)
        units = tf.concat([unit, tf.ones([1], unit.dtype)], 0)
        return Verdict(
            self.names,
            index,
            tf.gather(units, index),
            tf.math.is_finite(values[0]) & self.is_reported,
        )


class _Form(NamedTuple):
    """A candidate likelihood as functions of labels y and outputs z.

    Attributes:
        nll: `nll(y, z)`, the negative log-likelihood of each output or term.
        residuals: `residuals(y, z)`, the gradient of the negative
            log-likelihood in its natural parameters: mean - label.
        slopes: `slopes(z, g)`, converts the gradient g of the loss at z to
            the gradient in the natural parameters.
        of_classes: True if labels may be integer classes.
        by_logits: True if z are Keras' logits behind the outputs.
    """

    name: str
    nll: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    residuals: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    slopes: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    of_classes: bool = False
    by_logits: bool = False


def _bernoulli(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    p = tf.clip_by_value(p, _EPSILON, 1 - _EPSILON)
    return -y * tf.math.log(p) - (1 - y) * tf.math.log(1 - p)


def _normalized(z: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(z, _row_sum(z))


def _row_sum(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tensor, -1, keepdims=True)


_NORMAL = _Form(
    NORMAL,
    lambda y, z: tf.square(z - y) / 2,
    lambda y, z: z - y,
    lambda z, g: g,
)
_BERNOULLI = _Form(
    BERNOULLI, _bernoulli, lambda y, z: z - y, lambda z, g: g * z * (1 - z)
)
_BERNOULLI_LOGITS = _Form(
    BERNOULLI_LOGITS,
    lambda y, z: tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=z),
    lambda y, z: tf.sigmoid(z) - y,
    lambda z, g: g,
)
# Normalise the outputs, as the loss may do: p = z / sum z.
_CATEGORICAL = _Form(
    CATEGORICAL,
    lambda y, z: (
        -y * tf.math.log(tf.clip_by_value(_normalized(z), _EPSILON, 1))
    ),
    lambda y, z: _normalized(z) * _row_sum(y) - y,
    lambda z, g: z * g - _normalized(z) * _row_sum(z * g),
    of_classes=True,
)
_CATEGORICAL_LOGITS = _Form(
    CATEGORICAL_LOGITS,
    lambda y, z: -y * tf.nn.log_softmax(z),
    lambda y, z: tf.nn.softmax(z) * _row_sum(y) - y,
    lambda z, g: g,
    of_classes=True,
)
_LOGIT_FORMS = (_BERNOULLI_LOGITS, _CATEGORICAL_LOGITS)
# Likelihoods of Keras' softmax or sigmoid outputs, computed from the logits.
_BEHIND_OUTPUTS = (
    _BERNOULLI_LOGITS._replace(name=BERNOULLI, by_logits=True),
    _CATEGORICAL_LOGITS._replace(name=CATEGORICAL, by_logits=True),
)
# Maximum number of compared terms, and of outputs in these terms. With fewer
# than `_MIN_TERMS` terms, compare gradients, too.
_MAX_ROWS, _MAX_NUMBERS, _MIN_TERMS = 64, 4096, 4


class _Labels(NamedTuple):
    """Labels of a batch as a tensor, in a shape that matches the outputs.

    Attributes:
        values: Labels in the shape of the outputs, or an integer class per
            term; 0 where `fit` is False.
        fit: Scalar bool, False if the labels have the wrong shape.
    """

    values: tf.Tensor
    are_classes: bool
    fit: tf.Tensor


def compare_with_likelihoods(
    call: LossCall, leaves: Leaves, reduction: Reduction
) -> Recognition | None:
    """Compare a loss with the likelihoods of its labels; None if none fits."""
    labels = _labels_of(call.y_true, leaves.output)
    if labels is None:
        return None
    forms = [_NORMAL, *_LOGIT_FORMS, _BERNOULLI, _CATEGORICAL]
    if leaves.logits is not None:  # softmax or sigmoid outputs
        forms = [*_BEHIND_OUTPUTS, _NORMAL, _BERNOULLI, _CATEGORICAL]
    if labels.are_classes:
        forms = [form for form in forms if form.of_classes]
    names = tuple(form.name for form in forms)
    sums = _Comparison(forms, leaves, reduction, labels).compare()
    return Recognition(names, tf.stop_gradient(sums))


class _Comparison:
    """Compare a loss with likelihoods; rows hold the outputs of one term."""

    def __init__(
        self,
        forms: Sequence[_Form],
        leaves: Leaves,
        reduction: Reduction,
        labels: _Labels,
    ) -> None:
        values = self._values = tf.stop_gradient(reduction.values)
        self._forms, self._leaves = forms, leaves
        self._reduction, self._labels = reduction, labels
        self._is_scalar = values.shape.rank == 0
        output = leaves.output
        rank = max(output.shape.rank, 2)
        axes = min(values.shape.rank, rank - 1) if values.shape.rank else 1
        self._size = output.shape[-1] if output.shape.rank > 1 else 1
        if self._size is None:
            self._size = tf.shape(output)[-1]
        shape = tf.shape(output)[:axes]
        self.terms = tf.reduce_prod(shape)
        self.fit = labels.fit
        if not self._is_scalar:
            shapes_agree = tf.equal(tf.shape(values)[:axes], shape)
            self.fit &= tf.reduce_all(shapes_agree)
        self._mask, mask = None, reduction.mask
        if mask is not None and values.shape.rank and mask.shape.rank:
            if mask.shape.rank == values.shape.rank + 1:
                mask = tf.squeeze(mask, -1)
            if mask.shape.rank == axes:
                self._mask = tf.reshape(tf.cast(mask, tf.bool), [-1])
        self._length = output.shape[axes:].num_elements()
        self._wide = tf.float64 if output.dtype == tf.float64 else tf.float32

    def compare(self) -> tf.Tensor:
        """Return the `sums` of a `Recognition`."""
        any_terms, are_few = self.terms > 0, self.terms < _MIN_TERMS
        by_values = any_terms & tf.logical_not(are_few | self._is_scalar)
        branch = tf.cast(any_terms, tf.int32) + tf.cast(by_values, tf.int32)
        return tf.switch_case(
            tf.where(self.fit, branch, 0),
            [self._empty, self._by_gradients, self._by_values],
        )

    def _empty(self) -> tf.Tensor:
        """Return zero sums; the first column is 1 if shapes disagree."""
        wrong = tf.cast(tf.logical_not(self.fit), tf.float64)
        return tf.pad(tf.fill([len(self._forms), 1], wrong), [[0, 0], [0, 6]])

    # ------------------------------------------------------------- rows
    def _sample(self) -> tf.Tensor:
        """Return indices of rows: evenly spaced, and the largest value."""
        length = self._length or _MAX_NUMBERS // 16
        limit = max(_MIN_TERMS, min(_MAX_ROWS, _MAX_NUMBERS // length))
        count = tf.minimum(limit, self.terms)
        spaced = tf.range(count) * (self.terms // count)
        if self._is_scalar:
            return spaced
        largest = tf.argmax(self._row_values(), output_type=tf.int32)
        return tf.concat([[largest], spaced], 0)

    def _row_values(self) -> tf.Tensor:
        """Return the loss value of each term, 0 for masked terms."""
        rows = tf.reshape(self._values, [self.terms, -1])
        return self._masked(tf.reduce_sum(rows, -1), None)

    def _rows(
        self, tensor: tf.Tensor, index: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Reshape a tensor shaped like the outputs; gather rows at `index`."""
        rows = _gather(tf.reshape(tensor, [self.terms, -1, self._size]), index)
        return tf.cast(tf.stop_gradient(rows), self._wide)

    def _label_rows(self, index: tf.Tensor | None = None) -> tf.Tensor:
        """Return rows of the labels, one-hot for classes."""
        values = self._labels.values
        if not self._labels.are_classes:
            return self._rows(values, index)
        rows = _gather(tf.reshape(values, [self.terms, -1]), index)
        rows = tf.cast(tf.stop_gradient(rows), tf.int32)
        return tf.one_hot(rows, self._size, dtype=self._wide)

    def _inputs(self, form: _Form) -> tf.Tensor:
        """Return the outputs or the logits, as the form requires."""
        logits = self._leaves.logits
        return logits if form.by_logits else self._leaves.output

    def _masked(self, rows: tf.Tensor, index: tf.Tensor | None) -> tf.Tensor:
        """Set masked rows to 0."""
        if self._mask is None:
            return rows
        keep = _gather(self._mask, index)
        for _ in range(rows.shape.rank - 1):
            keep = keep[:, None]
        return tf.where(keep, rows, tf.zeros_like(rows))

    def _nll(self, form: _Form, y: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Return the negative log-likelihood of each row in `index`."""
        nll = form.nll(y, self._rows(self._inputs(form), index))
        return self._masked(tf.reduce_sum(nll, [1, 2]), index)

    # ------------------------------------------------------ comparisons
    def _by_values(self) -> tf.Tensor:
        """Compare the values of the terms with each likelihood."""
        index = self._sample()
        y = self._label_rows(index)
        values = tf.cast(tf.gather(self._row_values(), index), self._wide)
        nll = tf.stack([self._nll(form, y, index) for form in self._forms])
        nll, values = tf.cast(nll, tf.float64), tf.cast(values, tf.float64)
        product, square = tf.reduce_sum(values), tf.reduce_sum(nll, 1)
        unit = tf.math.divide_no_nan(product, square)
        expected = unit[:, None] * nll
        floor = tf.stack([self._floor(form, y) for form in self._forms])
        min_tolerance = unit * floor + 10 * _ROUNDING * tf.abs(product)
        tolerance = _TOLERANCE * tf.abs(expected)
        tolerance += min_tolerance[:, None] / _count(values)
        agrees = tf.reduce_all(tf.abs(values - expected) <= tolerance, 1)
        wrong = tf.cast(tf.logical_not(agrees), tf.float64)
        total = tf.fill(tf.shape(square), product)
        columns = [wrong, total, square, unit * product, total, square, floor]
        return tf.stack(columns, 1)

    def _by_gradients(self) -> tf.Tensor:
        """Compare the loss gradients and total value with each likelihood.

        The unit is the least-squares fit of residuals r to gradients g:
        `u = sum(r g) / sum(r^2)`.
        """
        index = self._sample()
        y = self._label_rows(index)
        slopes = self._slopes()
        values = self._values
        if not self._is_scalar:
            values = tf.gather(self._row_values(), index)
        value = _total(values)
        rows = []
        for form in self._forms:
            g = slopes[form.by_logits]
            z = self._rows(self._inputs(form), index)
            r = self._masked(form.residuals(y, z), index)
            is_read = g is not None  # else the loss does not read `z`
            if is_read:
                g = self._masked(form.slopes(z, self._rows(g, index)), index)
            else:
                g = tf.zeros_like(r)
            product, square = _total(r * g), _total(tf.square(r))
            unit = tf.math.divide_no_nan(product, square)
            u = tf.cast(unit, r.dtype)
            # Add an absolute tolerance, for terms with residuals near 0.
            minimum = 1.0 if form is not _NORMAL else square / _count(r)
            limit = tf.square(_TOLERANCE * u) * tf.reduce_sum(tf.square(r), -1)
            limit += tf.square(10 * _ROUNDING * u) * tf.cast(minimum, u.dtype)
            error = tf.reduce_sum(tf.square(g - u * r), -1)
            agrees = tf.reduce_all(error <= limit) & is_read
            nll = _total(self._nll(form, y, index))
            row = agrees, product, square, unit * product, value, nll
            rows.append([*row, self._floor(form, y)])
        if self._is_scalar:
            self._use_all_terms(rows)
        wide = [[tf.cast(x, tf.float64) for x in row] for row in rows]
        return tf.stack([tf.stack([1 - agrees, *x]) for agrees, *x in wide])

    def _use_all_terms(self, rows: list[list[Any]]) -> None:
        """Replace likelihoods of sampled terms by the likelihood of all terms.

        A scalar loss has only a total value, not a value per term. To save
        time, compute only the first likelihood whose gradients agree.
        """
        number = len(rows)
        flags = tf.stack([row[0] for row in rows])
        first = tf.reduce_min(tf.where(flags, tf.range(number), number))

        def nll(form: _Form) -> tf.Tensor:
            z = self._rows(self._inputs(form))
            return _total(form.nll(self._label_rows(), z))

        branches = [functools.partial(nll, form) for form in self._forms]
        zero = functools.partial(tf.zeros, [], tf.float64)
        total = tf.switch_case(first, [*branches, zero])
        for i, row in enumerate(rows):
            row[0] = tf.equal(first, i)
            row[5] = total
            row[6] = self._floor(self._forms[i], self._leaves.output)

    def _slopes(self) -> dict[bool, tf.Tensor | None]:
        """Return the loss gradients at outputs (False) and logits (True)."""
        try:
            output, logits = self._leaves.slopes(self._reduction.values)
        except LookupError:  # an operation of the loss has no gradient
            return {False: None, True: None}
        if output is not None and logits is not None:
            output = logits = None
        return {False: output, True: logits}

    def _floor(self, form: _Form, outputs: tf.Tensor) -> tf.Tensor:
        """Return the rounding error of the negative log-likelihood."""
        if form is _NORMAL:
            return tf.zeros([], tf.float64)
        return _ROUNDING * _count(outputs)


def _gather(rows: tf.Tensor, index: tf.Tensor | None) -> tf.Tensor:
    return rows if index is None else tf.gather(rows, index)


def _count(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.size(tensor), tf.float64)


def _total(tensor: tf.Tensor) -> tf.Tensor:
    """Sum a tensor in float64."""
    rows = tf.reduce_sum(tensor, -1) if tensor.shape.rank else tensor
    return tf.reduce_sum(tf.cast(rows, tf.float64))


def _labels_of(y_true: Any, outputs: tf.Tensor) -> _Labels | None:
    """Convert labels to the shape of the outputs, or of the terms (classes)."""
    if not isinstance(y_true, (tf.Tensor, tf.Variable, np.ndarray)):
        return None
    y = tf.convert_to_tensor(y_true)
    is_number = y.dtype.is_floating or y.dtype.is_integer or y.dtype.is_bool
    if not is_number or y.shape.rank is None:
        return None
    rank, shape = outputs.shape.rank, outputs.shape
    extra_axes = y.shape.rank - rank
    are_classes = False
    if extra_axes == 1 and y.shape[-1] == 1:
        y = y[..., 0]
    elif extra_axes == -1 and shape[-1] == 1:
        y = y[..., None]
    elif extra_axes == -1:
        are_classes = True
    elif extra_axes == 0 and y.shape[-1] == 1 and shape[-1] not in (1, None):
        y, are_classes = y[..., 0], True
    elif extra_axes != 0:
        return None
    expected = shape[:-1] if are_classes else shape
    if not y.shape.is_compatible_with(expected):
        return None
    if y.shape.is_fully_defined() and expected.is_fully_defined():
        return _Labels(y, are_classes, tf.constant(True))
    # Replace labels of another shape, which the loss may broadcast, by zeros.
    label_shape = tf.shape(outputs)[: expected.rank]
    fit = tf.reduce_all(tf.equal(tf.shape(y), label_shape))
    values = tf.cond(fit, lambda: y, lambda: tf.zeros(label_shape, y.dtype))
    values.set_shape(expected)
    return _Labels(values, are_classes, fit)
