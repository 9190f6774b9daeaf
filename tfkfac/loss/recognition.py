"""A loss held against the likelihoods that it may be a multiple of.

Nobody runs it for that: the batch of each step is the trial. Of every
likelihood that labels and predictions could be of, terms are compared with
the values of the loss. It is the likelihood times `u = sum(values) / sum(nll)`
if that is so for each of them (to 0.1 %). `u` is found anew in each step: a
weight of the loss may be in a variable. And a loss that is a likelihood for
some residuals alone, as Huber's, is one in the steps that have no others.

That costs little. Of many terms a few are compared, of which one is the
largest: what is no likelihood for all residuals is none for large ones. One
number for all terms, or the values of very few, could be a multiple of
anything: there the gradients at the outputs are compared, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfkfac.compat.losses import Leaves, LossCall, Reduction

# Of the predictions: means, probabilities or rates; or logits, if they are.
NORMAL, POISSON = "normal", "poisson"
BERNOULLI, CATEGORICAL = "bernoulli", "categorical"
BERNOULLI_LOGITS = "bernoulli logits"
CATEGORICAL_LOGITS = "categorical logits"
LOGITS = {BERNOULLI: BERNOULLI_LOGITS, CATEGORICAL: CATEGORICAL_LOGITS}

_TOLERANCE = 1e-3
# Errors of probabilities in float32, and what Keras clips them at.
_ROUNDING, _EPSILON = 1e-6, 1e-7


class Verdict(NamedTuple):
    """Likelihood and unit of a loss, by all replicas.

    Attributes:
        names: The likelihoods that it could be of.
        index: Index of its likelihood, an int32 scalar; their number if none.
        unit: Its unit; 1 if it is none.
        is_counted: Scalar bool, True if users want to know; False for a loss
            that is not finite.
    """

    names: tuple[str, ...]
    index: tf.Tensor
    unit: tf.Tensor
    is_counted: tf.Tensor

    @property
    def is_known(self) -> tf.Tensor:
        """True if it is any of them, a scalar bool."""
        return self.index < len(self.names)


class Recognition(NamedTuple):
    """Comparison of a loss with likelihoods, by one replica's batch."""

    names: tuple[str, ...]  # of those that it could be of
    sums: tf.Tensor  # of each what replicas add up, float64 `(names, 7)`
    is_reported: bool = True  # if it is none of them

    def times(self, factor: tf.Tensor) -> "Recognition":
        """That of the loss times a number."""
        powers = tf.constant([0, 1, 0, 2, 1, 0, 0], tf.float64)
        return self._replace(sums=self.sums * tf.pow(factor, powers))

    def verdict(self, sums: tf.Tensor) -> Verdict:
        """Decides by the sums of all replicas, added up."""
        wrong, product, square, spread, values, nll, floor = tf.unstack(
            sums, axis=1
        )
        unit = tf.math.divide_no_nan(product, square)
        expected = unit * nll
        room = _TOLERANCE * tf.abs(expected) + unit * floor
        # Replicas have found the same, each by itself.
        varied = spread - tf.math.divide_no_nan(product**2, square)
        alike = varied <= _TOLERANCE**2 * spread
        fits = (wrong == 0) & alike & (tf.abs(values - expected) <= room)
        nothing = (wrong == 0) & (values == 0) & (nll <= floor)
        fits = nothing | (fits & (unit > 0) & tf.math.is_finite(unit))
        number = len(self.names)
        places = tf.where(fits, tf.range(number), number)
        index = tf.reduce_min(places)
        unit = tf.where(nothing, tf.ones_like(unit), unit)
        found = tf.concat([unit, tf.ones([1], unit.dtype)], 0)
        return Verdict(
            self.names,
            index,
            tf.gather(found, index),
            tf.math.is_finite(values[0]) & self.is_reported,
        )


class _Form(NamedTuple):
    """A likelihood in terms of what a loss has read.

    Attributes:
        nll: Of labels and outputs, that of each output or of each term.
        residuals: Of the same mean less label, its gradient at its natural
            parameters.
        slopes: Of outputs and the gradient of the loss there, the latter.
        by_logits: True if it is of the logits behind the outputs.
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


def _sigmoid(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=z)


def _categorical(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    return -y * tf.math.log(tf.clip_by_value(_shares(z), _EPSILON, 1))


def _shares(z: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(z, tf.reduce_sum(z, -1, keepdims=True))


def _mass(y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(y, -1, keepdims=True)


_NORMAL = _Form(
    NORMAL,
    lambda y, z: tf.square(z - y) / 2,
    lambda y, z: z - y,
    lambda z, g: g,
)
_BERNOULLI = _Form(
    BERNOULLI,
    _bernoulli,
    lambda y, z: z - y,
    lambda z, g: g * z * (1 - z),
)
_BERNOULLI_LOGITS = _Form(
    BERNOULLI_LOGITS,
    _sigmoid,
    lambda y, z: tf.sigmoid(z) - y,
    lambda z, g: g,
)
# Of probabilities that the loss may or may not divide by their sum.
_CATEGORICAL = _Form(
    CATEGORICAL,
    _categorical,
    lambda y, z: _shares(z) * _mass(y) - y,
    lambda z, g: z * g - _shares(z) * tf.reduce_sum(z * g, -1, keepdims=True),
    of_classes=True,
)
_CATEGORICAL_LOGITS = _Form(
    CATEGORICAL_LOGITS,
    lambda y, z: -y * tf.nn.log_softmax(z),
    lambda y, z: tf.nn.softmax(z) * _mass(y) - y,
    lambda z, g: g,
    of_classes=True,
)
_OF_LOGITS = (_BERNOULLI_LOGITS, _CATEGORICAL_LOGITS)
# Rows of a comparison, fewer if they are long; below so many, gradients too.
_MOST_ROWS, _MOST_NUMBERS, _FEW = 64, 4096, 4
_COLUMNS = 7


class _Labels(NamedTuple):
    """Labels of some outputs, or numbers of the classes of their terms."""

    values: tf.Tensor
    are_classes: bool
    fit: tf.Tensor  # True if their shape is what it must be; else they are 0


def recognise(
    call: LossCall, leaves: Leaves, reduction: Reduction
) -> Recognition | None:
    """Compares a loss with the likelihoods of labels of its shapes.

    There is no result if no likelihood can be meant.
    """
    labels = _labels_of(call.y_true, leaves.output)
    if labels is None:
        return None
    forms = _possible(labels.are_classes, leaves.logits is not None)
    names = tuple(form.name for form in forms)
    sums = _Trial(forms, leaves, reduction, labels).compare()
    return Recognition(names, tf.stop_gradient(sums))


def _possible(are_classes: bool, have_logits: bool) -> list[_Form]:
    """The likelihoods that a loss may be of, by what it can have read."""
    forms = [_NORMAL, *_OF_LOGITS, _BERNOULLI, _CATEGORICAL]
    if have_logits:  # that of the probabilities which the model returns
        behind = [
            form._replace(name=name, by_logits=True)
            for form, name in zip(_OF_LOGITS, LOGITS, strict=True)
        ]
        forms = [*behind, _NORMAL, _BERNOULLI, _CATEGORICAL]
    return [form for form in forms if form.of_classes or not are_classes]


class _Trial:
    """A batch of a loss, in rows: each the outputs of one of `terms` terms.

    It is `fit` if labels, values and outputs are of the same terms.
    """

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
        self._is_single = values.shape.rank == 0
        output = leaves.output
        rank = max(output.shape.rank, 2)
        axes = min(values.shape.rank, rank - 1) if values.shape.rank else 1
        self._size = output.shape[-1] if output.shape.rank > 1 else 1
        if self._size is None:
            self._size = tf.shape(output)[-1]
        there = tf.shape(output)[:axes]
        self.terms = tf.reduce_prod(there)
        self.fit = labels.fit
        if not self._is_single:
            same = tf.equal(tf.shape(values)[:axes], there)
            self.fit &= tf.reduce_all(same)
        mask = _mask_of(reduction)
        fits = mask is not None and mask.shape.rank == axes
        self._mask = tf.reshape(mask, [-1]) if fits else None
        self._length = output.shape[axes:].num_elements()
        self._wide = tf.float64 if output.dtype == tf.float64 else tf.float32

    def compare(self) -> tf.Tensor:
        """Sums of each likelihood for the replicas, see `Recognition`."""
        there, few = self.terms > 0, self.terms < _FEW
        by_values = there & tf.logical_not(few | self._is_single)
        how = tf.cast(there, tf.int32) + tf.cast(by_values, tf.int32)
        return tf.switch_case(
            tf.where(self.fit, how, 0),
            [self._nothing, self._by_gradients, self._by_values],
        )

    def _nothing(self) -> tf.Tensor:
        """That of no term, or of what nothing can be compared with."""
        wrong = tf.cast(tf.logical_not(self.fit), tf.float64)
        row = tf.concat([[wrong], tf.zeros([_COLUMNS - 1], tf.float64)], 0)
        return tf.tile(row[None], [len(self._forms), 1])

    # ------------------------------------------------------------- rows
    def _sample(self) -> tf.Tensor:
        """Rows that stand for all: some evenly spaced, and the largest."""
        length = self._length or _MOST_NUMBERS // 16
        most = max(_FEW, min(_MOST_ROWS, _MOST_NUMBERS // length))
        count = tf.minimum(most, self.terms)
        spaced = tf.range(count) * (self.terms // count)
        if self._is_single:
            return spaced
        largest = tf.argmax(self._each(), output_type=tf.int32)
        return tf.concat([[largest], spaced], 0)

    def _each(self) -> tf.Tensor:
        """The value of each row, 0 where a mask is False."""
        rows = tf.reshape(self._values, [self.terms, -1])
        each = tf.reduce_sum(rows, -1)
        if self._mask is not None:
            each = tf.where(self._mask, each, tf.zeros_like(each))
        return each

    def _rows(
        self, tensor: tf.Tensor, index: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Some rows of a tensor of the shape of the outputs, or all."""
        rows = _some(tf.reshape(tensor, [self.terms, -1, self._size]), index)
        return tf.cast(tf.stop_gradient(rows), self._wide)

    def _label_rows(self, index: tf.Tensor | None = None) -> tf.Tensor:
        """The same of the labels."""
        values = self._labels.values
        if not self._labels.are_classes:
            return self._rows(values, index)
        rows = _some(tf.reshape(values, [self.terms, -1]), index)
        rows = tf.cast(tf.stop_gradient(rows), tf.int32)
        return tf.one_hot(rows, self._size, dtype=self._wide)

    def _read(self, form: _Form) -> tf.Tensor:
        """The predictions that a loss of a form reads."""
        logits = self._leaves.logits
        return logits if form.by_logits else self._leaves.output

    def _kept(self, rows: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Rows with 0 where a mask is False."""
        if self._mask is None:
            return rows
        keep = tf.gather(self._mask, index)
        for _ in range(rows.shape.rank - 1):
            keep = keep[:, None]
        return tf.where(keep, rows, tf.zeros_like(rows))

    def _nll(self, form: _Form, y: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """The negative log-likelihood of each of some rows."""
        each = form.nll(y, self._rows(self._read(form), index))
        return self._kept(tf.reduce_sum(each, [1, 2]), index)

    # ------------------------------------------------------ comparisons
    def _by_values(self) -> tf.Tensor:
        """Compares values of terms, with those of all forms at once."""
        index = self._sample()
        y = self._label_rows(index)
        values = tf.cast(tf.gather(self._each(), index), self._wide)
        nll = tf.stack([self._nll(form, y, index) for form in self._forms])
        nll, values = tf.cast(nll, tf.float64), tf.cast(values, tf.float64)
        product, square = tf.reduce_sum(values), tf.reduce_sum(nll, 1)
        unit = tf.math.divide_no_nan(product, square)
        expected = unit[:, None] * nll
        floor = tf.stack([self._floor(form, y) for form in self._forms])
        least = unit * floor + 10 * _ROUNDING * tf.abs(product)
        room = _TOLERANCE * tf.abs(expected) + least[:, None] / _count(values)
        right = tf.reduce_all(tf.abs(values - expected) <= room, 1)
        wrong = tf.cast(tf.logical_not(right), tf.float64)
        total = tf.fill(tf.shape(square), product)
        found = [wrong, total, square, unit * product, total, square, floor]
        return tf.stack(found, 1)

    def _by_gradients(self) -> tf.Tensor:
        """Compares gradients at the outputs, and values with these."""
        index = self._sample()
        y = self._label_rows(index)
        slopes = self._slopes()
        value = _total(
            self._values if self._is_single else tf.gather(self._each(), index)
        )
        rows = []
        for form in self._forms:
            g = slopes[form.by_logits]
            z = self._rows(self._read(form), index)
            r = self._kept(form.residuals(y, z), index)
            if g is None:
                g = tf.fill(tf.shape(r), tf.constant(np.nan, r.dtype))
            else:
                g = self._kept(form.slopes(z, self._rows(g, index)), index)
            product, square = _total(r * g), _total(tf.square(r))
            unit = tf.math.divide_no_nan(product, square)
            u = tf.cast(unit, r.dtype)
            # Where a term has next to nothing to compare.
            least = 1.0 if form is not _NORMAL else square / _count(r)
            room = tf.square(_TOLERANCE * u) * tf.reduce_sum(tf.square(r), -1)
            room += tf.square(10 * _ROUNDING * u) * tf.cast(least, u.dtype)
            off = tf.reduce_sum(tf.square(g - u * r), -1)
            right = tf.reduce_all(off <= room)
            nll = _total(self._nll(form, y, index))
            found = right, product, square, unit * product, value, nll
            rows.append([*found, self._floor(form, y)])
        if self._is_single:
            self._of_all(rows)
        wide = [[tf.cast(x, tf.float64) for x in row] for row in rows]
        return tf.stack([tf.stack([1 - right, *x]) for right, *x in wide])

    def _of_all(self, rows: list[list[Any]]) -> None:
        """Puts the likelihood of all terms where one of some terms is.

        That is worked out for the first form alone that is right.
        """
        number = len(rows)
        flags = tf.stack([row[0] for row in rows])
        first = tf.reduce_min(tf.where(flags, tf.range(number), number))

        def nll(form: _Form) -> tf.Tensor:
            z = self._rows(self._read(form))
            return _total(form.nll(self._label_rows(), z))

        branches = [functools.partial(nll, form) for form in self._forms]
        none = functools.partial(tf.zeros, [], tf.float64)
        total = tf.switch_case(first, [*branches, none])
        for place, row in enumerate(rows):
            row[0] = tf.equal(first, place)
            row[5] = total
            row[6] = self._floor(self._forms[place], self._leaves.output)

    def _slopes(self) -> dict[bool, tf.Tensor | None]:
        """Gradients at the outputs, and at the logits; None if not there."""
        try:
            output, logits = self._leaves.slopes(self._reduction.values)
        except LookupError:  # TensorFlow has none of an operation of the loss
            return {False: None, True: None}
        if output is not None and logits is not None:
            output = logits = None
        return {
            by_logits: None if g is None else tf.convert_to_tensor(g)
            for by_logits, g in ((False, output), (True, logits))
        }

    def _floor(self, form: _Form, outputs: tf.Tensor) -> tf.Tensor:
        """Rounding errors of the likelihood of some outputs."""
        exact = form is _NORMAL
        return (
            tf.zeros([], tf.float64) if exact else _ROUNDING * _count(outputs)
        )


def _mask_of(reduction: Reduction) -> tf.Tensor | None:
    """The mask of the terms, of the shape of their values."""
    values, mask = reduction.values, reduction.mask
    if mask is None or not values.shape.rank or mask.shape.rank is None:
        return None
    if mask.shape.rank == values.shape.rank + 1:
        mask = tf.squeeze(mask, -1)
    return tf.cast(mask, tf.bool)


def _some(rows: tf.Tensor, index: tf.Tensor | None) -> tf.Tensor:
    return rows if index is None else tf.gather(rows, index)


def _count(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.size(tensor), tf.float64)


def _total(tensor: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor, float64."""
    rows = tf.reduce_sum(tensor, -1) if tensor.shape.rank else tensor
    return tf.reduce_sum(tf.cast(rows, tf.float64))


def _labels_of(y_true: Any, outputs: tf.Tensor) -> _Labels | None:
    """Labels in the shape of outputs, or of their terms if they are classes."""
    if not isinstance(y_true, (tf.Tensor, tf.Variable, np.ndarray)):
        return None
    y = tf.convert_to_tensor(y_true)
    known = y.dtype.is_floating or y.dtype.is_integer or y.dtype.is_bool
    if not known or y.shape.rank is None:
        return None
    rank, shape = outputs.shape.rank, outputs.shape
    more = y.shape.rank - rank
    are_classes = False
    if more == 1 and y.shape[-1] == 1:
        y = y[..., 0]
    elif more == -1 and shape[-1] == 1:
        y = y[..., None]
    elif more == -1:
        are_classes = True
    elif more == 0 and y.shape[-1] == 1 and shape[-1] not in (1, None):
        y, are_classes = y[..., 0], True
    elif more != 0:
        return None
    wanted = shape[:-1] if are_classes else shape
    if not y.shape.is_compatible_with(wanted):
        return None
    if y.shape.is_fully_defined() and wanted.is_fully_defined():
        return _Labels(y, are_classes, tf.constant(True))
    # Where they differ the loss knows what it does, but nothing here may fail.
    there = tf.shape(outputs)[: wanted.rank]
    fit = tf.reduce_all(tf.equal(tf.shape(y), there))
    values = tf.cond(fit, lambda: y, lambda: tf.zeros(there, y.dtype))
    values.set_shape(wanted)
    return _Labels(values, are_classes, fit)
