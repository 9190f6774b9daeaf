"""Recognise the likelihood of a loss by its values for synthetic examples.

A loss is a multiple of a likelihood if the loss of a term is `u nll + h`, with
constants `u > 0` and `h`, for synthetic labels and outputs with the negative
log-likelihood `nll`. So the likelihood belongs to the definition of a loss, not
to a batch. `u` and `h` are computed again in each step if the loss reads a
variable, such as a weight that changes, or if a shape is not static.

A location loss is a multiple of no likelihood in the table. It depends only on
the residuals `z - y` of outputs z and labels y, and increases with their size:
absolute errors, Huber losses, quantile losses.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import paused
from tfkfac.compat.graphs import kept_variables, nonzero_variables, written_in
from tfkfac.compat.losses import LossCall, in_place_of, logits_of
from tfkfac.compat.overrides import keep_on

# Names of likelihoods; the outputs are means, rates, probabilities or logits.
NORMAL, POISSON, LOCATION = "normal", "poisson", "location"
# A normal distribution of labels 0, which the loss does not read.
RESIDUALS = "normal, without labels"
BERNOULLI, CATEGORICAL = "bernoulli", "categorical"
BERNOULLI_LOGITS = "bernoulli logits"
CATEGORICAL_LOGITS = "categorical logits"
LOGITS = {BERNOULLI: BERNOULLI_LOGITS, CATEGORICAL: CATEGORICAL_LOGITS}
CROSS_ENTROPIES = (*LOGITS, *LOGITS.values())
_ACTIVATIONS = {BERNOULLI: tf.sigmoid, CATEGORICAL: tf.nn.softmax}

# Attribute of a loss: cached results of the comparison.
_MATCHES = "_tfkfac_likelihoods"
# Relative tolerance of the comparison, and relative rounding error of u and h.
_TOLERANCE, _ROUNDING = 1e-3, 1e-5
# Scales of the residuals or logits of the synthetic examples.
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
# Scale of residuals for which robust losses differ from the normal likelihood.
_LARGE = 1e4
_SHIFT = 3.0  # added to labels and outputs, which changes no location loss
_OPEN_SIZE = 3  # size of axes that are not static, in the comparison
# Numbers with the mean size and nearly the variance of a standard normal
# distribution: its 16-quantiles of odd index, times 1.04.
_NORMAL_NUMBERS = [
    sign * x for x in (0.163, 0.509, 0.923, 1.6) for sign in (1.0, -1.0)
]

Sizes = Any  # sequence of sizes, None if not static, or a tensor


class Shapes(NamedTuple):
    """Shapes of the labels and outputs of an example."""

    labels: Sizes
    outputs: Sizes


class Likelihood(NamedTuple):
    """Likelihood of a loss: `u nll + h` for each term."""

    name: str | None = None  # None if the loss is a multiple of no likelihood
    unit: float | tf.Tensor = 1.0  # u; 1 for location and unknown losses
    # h; for location losses the loss of a term without residuals.
    constant: float | tf.Tensor = 0.0
    # For location losses, a function from a standard deviation to the increase
    # of the loss of a term, per output, by normally distributed residuals.
    spread: Callable[[tf.Tensor], tf.Tensor] | None = None
    # Function from labels and outputs to a bool for each output, False if the
    # loss ignores the label; None if it uses all.
    used: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None
    is_sum: bool = False  # True if the loss returns the sum over the examples


UNKNOWN = Likelihood()


def recognize(call: LossCall, name: str | None = None) -> Likelihood:
    """Compare a loss with the likelihoods of its labels, or with one name."""
    tensors = call.y_true, call.y_pred
    static = [tf.TensorShape(getattr(t, "shape", None)) for t in tensors]
    if not all(shape.rank for shape in static):
        return UNKNOWN
    shapes = Shapes(*(tuple(shape[1:]) for shape in static))
    has_logits = logits_of(call.y_pred) is not None
    matches = keep_on(call.loss, _MATCHES, _Cache)
    # Key by numbers of the loss, which the user may change before `compile`.
    numbers = tuple(
        (key, value)
        for key, value in sorted(vars(call.loss).items())
        if isinstance(value, (bool, int, float))
    )
    key = shapes, has_logits, name, numbers
    if key not in matches:
        with paused(), tf.init_scope():
            matches[key] = _find_match(call.loss, shapes, has_logits, name)
    match = matches[key]
    if isinstance(match, Likelihood):
        return match
    if match.constants is not None:
        return match.likelihood(shapes, *match.constants)
    sizes = Shapes(*(tf.shape(t)[1:] for t in tensors))
    return match.likelihood(sizes, *match.fit(sizes, _SCALES[::4]))


class _Cache(dict[Any, "_Match | Likelihood"]):
    """Results by shapes; copies of a loss do not share the cache."""

    def __reduce__(self) -> Any:
        return _Cache, ()


def _are_classes(shapes: Shapes) -> bool | None:
    """Return True if a label is a class per term; None if shapes differ."""
    labels, outputs = (tf.TensorShape(shape) for shape in shapes)
    forms = [labels, labels[:-1]] if labels[-1:] == [1] else [labels]
    if outputs.rank and outputs[-1] == 1:
        forms.append(labels.concatenate(1))
    if any(form.is_compatible_with(outputs) for form in forms):
        return False
    if any(form.is_compatible_with(outputs[:-1]) for form in forms):
        return True
    return None


# ------------------------------------------------------------ the comparison
class _Match:
    """Comparison of a loss with a likelihood on synthetic examples."""

    def __init__(
        self,
        loss: keras.losses.Loss,
        shapes: Shapes,
        name: str,
        has_logits: bool,
    ) -> None:
        activation = _ACTIVATIONS.get(name)

        def values(labels: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
            outputs = z
            if activation is not None:
                logits = z if has_logits else None
                outputs = in_place_of(z, activation(z), logits)
            try:
                return tf.convert_to_tensor(loss.call(labels, outputs))
            except Exception as error:  # user code may raise any error
                raise ValueError("The loss rejects the example") from error

        self.name, self._dtype = name, tf.as_dtype(loss.dtype)
        self._are_classes = _are_classes(shapes)
        specs = [tf.TensorSpec([None, *shape], self._dtype) for shape in shapes]
        function = tf.function(values, autograph=False)
        self._values = function.get_concrete_function(*specs)
        self._written = written_in(self._values.graph)
        self._rank = self._values.structured_outputs.shape.rank
        self._captured = [outer for outer, _ in self._values.graph.captures]
        self._shapes, self.is_sum = shapes, False
        self.constants: tuple[float, float] | None = None

    def compare(self) -> None:
        """Set `is_sum` and `constants`; raise an error if the loss differs."""
        sizes = Shapes(
            *(
                tuple(_OPEN_SIZE if size is None else size for size in shape)
                for shape in self._shapes
            )
        )
        with nonzero_variables(self._captured):
            if self._rank == 0:
                # Duplicate each example: this doubles a sum, but not a mean.
                # Use different examples: for n equal examples, a contrastive
                # loss is log n.
                pairs = [self._example(sizes, i, 1.0)[:2] for i in range(2)]
                batch = [tf.stack(x) for x in zip(*pairs, strict=True)]
                twice = [tf.concat([x, x], 0) for x in batch]
                once = float(self._loss(*batch))
                self.is_sum = 0 < abs(once) < math.inf and math.isclose(
                    float(self._loss(*twice)), 2 * once, rel_tol=_TOLERANCE
                )
            unit, constant = (float(x) for x in self._check(sizes))
        reads_variables = any(x.dtype == tf.resource for x in self._captured)
        if sizes == self._shapes and not reads_variables:
            self.constants = unit, constant

    def likelihood(self, sizes: Shapes, unit: Any, constant: Any) -> Likelihood:
        """Return the likelihood of a step, given u and h."""
        spread = None
        if self.name == LOCATION:
            spread = functools.partial(self._spread, sizes, constant)
        used = self._used if self.name in (NORMAL, LOCATION) else None
        return Likelihood(self.name, unit, constant, spread, used, self.is_sum)

    def fit(self, sizes: Shapes, scales: Sequence[float]) -> tuple[Any, Any]:
        """Fit u and h of `loss = u nll + h` on examples of several scales."""
        if self.name == LOCATION:
            return 1.0, self._at_residuals(sizes, [0.0, 0.0])
        losses, nlls = self._examples(sizes, scales)
        deviations = nlls - tf.reduce_mean(nlls)
        unit = tf.math.divide_no_nan(
            tf.reduce_sum(deviations * losses),
            tf.reduce_sum(tf.square(deviations)),
        )
        constant = tf.reduce_mean(losses - unit * nlls)
        ratio = tf.math.divide_no_nan(
            tf.reduce_sum(losses), tf.reduce_sum(nlls)
        )
        # For h = 0 use the ratio: its rounding error is below the slope's.
        has_none = tf.abs(constant) <= 10 * _ROUNDING * ratio * nlls[-1]
        unit = tf.where(has_none, ratio, unit)
        return unit, tf.where(has_none, tf.zeros_like(constant), constant)

    def _check(self, sizes: Shapes) -> tuple[Any, Any]:
        """Return u and h, or raise an error if the loss differs."""
        unit, constant = self.fit(sizes, _SCALES)
        if self.name == LOCATION:
            # A shift does not change the loss, residuals do.
            for i, scale in enumerate(_SCALES):
                random, noise = (
                    tf.random.stateless_normal(shape, [i, 0], dtype=self._dtype)
                    for shape in sizes
                )
                pair = [tf.stack([x, x]) for x in (random, scale * noise)]
                moved = [x + _SHIFT for x in pair]
                first, second = self._loss(*pair), self._loss(*moved)
                _require(bool(abs(second - first) <= _TOLERANCE * abs(first)))
            residuals = tf.constant([1.0, 10.0, 100.0], tf.float64)
            one, ten, many = (
                self._spread(sizes, constant, s) for s in residuals
            )
            _require(bool(0 < one <= ten <= many < math.inf))
            return unit, constant
        _require(unit > 0 and bool(tf.math.is_finite(unit)))
        has_residuals = self.name in (NORMAL, RESIDUALS)
        scales = (*_SCALES, _LARGE) if has_residuals else _SCALES
        losses, nlls = self._examples(sizes, scales)
        error = tf.abs(losses - unit * nlls - constant)
        limit = _TOLERANCE * unit * nlls + _ROUNDING * tf.abs(constant)
        _require(bool(tf.reduce_all(error <= limit)))
        return unit, constant

    def _examples(
        self, sizes: Shapes, scales: Sequence[float]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the loss and `nll` of a term for an example of each scale."""
        pairs = []
        for i, scale in enumerate(scales):
            labels, z, nll = self._example(sizes, i, scale)
            # Repeat the example: a loss may squeeze a batch of one row.
            loss = self._loss(tf.stack([labels, labels]), tf.stack([z, z]))
            pairs.append((loss, nll / self._terms(sizes)))
        losses, nlls = zip(*pairs, strict=True)
        return tf.stack(losses), tf.stack(nlls)

    def _example(
        self, sizes: Shapes, seed: int, scale: float
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return labels, outputs or logits z, and their `nll` (float64)."""
        random, noise = (
            tf.random.stateless_normal(
                sizes.outputs, [seed, i], dtype=self._dtype
            )
            for i in range(2)
        )
        z = scale * noise
        if self.name in (NORMAL, LOCATION):
            labels, z = random, random + z
            nll = tf.square(z - labels) / 2
        elif self.name == RESIDUALS:
            labels = tf.random.stateless_normal(
                sizes.labels, [seed, 2], dtype=self._dtype
            )
            nll = tf.square(z) / 2
        elif self.name in (BERNOULLI, BERNOULLI_LOGITS):
            labels = tf.cast(random > 0, self._dtype)
            nll = tf.nn.sigmoid_cross_entropy_with_logits(labels, z)
        else:
            classes = tf.argmax(random, -1)
            labels = tf.one_hot(classes, sizes.outputs[-1], dtype=self._dtype)
            nll = -labels * tf.nn.log_softmax(z)
            if self._are_classes:
                labels = tf.cast(classes, self._dtype)
        labels = tf.reshape(labels, sizes.labels)
        return labels, z, tf.reduce_sum(tf.cast(nll, tf.float64))

    def _loss(self, labels: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        """Return the mean loss of the terms of a batch, float64."""
        with kept_variables(self._written):
            values = self._values(labels, z)
        mean = tf.reduce_mean(tf.cast(values, tf.float64))
        if self.is_sum:
            examples, *sizes = tf.unstack(tf.shape(z))
            terms = self._terms(Shapes((), tf.stack(sizes)))
            mean /= tf.cast(examples, tf.float64) * terms
        return mean

    def _terms(self, sizes: Shapes) -> tf.Tensor:
        """Return the number of terms of an example, float64."""
        # For a scalar loss, each vector on the last axis is one term.
        axes = self._rank - 1 if self._rank else -1
        return _product(sizes.outputs[:axes])

    def _used(self, labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Return `Likelihood.used`: the loss has a gradient at residuals 1."""
        labels = tf.cast(labels, self._dtype)
        z = tf.reshape(labels, tf.shape(outputs)) + 1
        z.set_shape(outputs.shape)
        with paused(), kept_variables(self._written), tf.GradientTape() as tape:
            tape.watch(z)
            values = self._values(labels, z)
        gradient = tape.gradient(values, z, unconnected_gradients="zero")
        return tf.not_equal(gradient, 0)

    # ----------------------------------------------------- location losses
    def _spread(
        self, sizes: Shapes, constant: Any, deviation: tf.Tensor
    ) -> tf.Tensor:
        """Return `Likelihood.spread` of a standard deviation."""
        loss = self._at_residuals(sizes, deviation * _NORMAL_NUMBERS)
        return (loss - constant) * self._terms(sizes) / _product(sizes.outputs)

    def _at_residuals(self, sizes: Shapes, residuals: Any) -> tf.Tensor:
        """Return the mean loss of a term; all labels of a row are equal."""
        residuals = tf.cast(residuals, self._dtype)
        rows = tf.shape(residuals)
        ones = tf.ones(tf.concat([rows, sizes.labels], 0), self._dtype)
        axes = ones.shape.rank - 1
        labels = ones * tf.reshape(residuals, tf.concat([rows, [1] * axes], 0))
        z = tf.zeros(tf.concat([rows, sizes.outputs], 0), self._dtype)
        return self._loss(labels, z)


def _find_match(
    loss: keras.losses.Loss, shapes: Shapes, has_logits: bool, name: str | None
) -> _Match | Likelihood:
    """Return the likelihood that a loss is a multiple of, or `UNKNOWN`."""
    is_sum = False
    names: tuple[str, ...] = (RESIDUALS,)
    if name is not None:
        names = (name,)
    elif (are_classes := _are_classes(shapes)) is not None:
        binary, classes = (
            (x,) if has_logits else (LOGITS[x], x)
            for x in (BERNOULLI, CATEGORICAL)
        )
        names = (*classes, RESIDUALS)
        if not are_classes:
            names = (NORMAL, *binary, *names, LOCATION)
    for name in names:
        match = None
        # ValueError: the loss differs, rejects the example or has effects.
        # OpError: it fails at run time, or open sizes of the example differ.
        with contextlib.suppress(ValueError, tf.errors.OpError):
            match = _Match(loss, shapes, name, has_logits)
            match.compare()
            return match
        is_sum |= match is not None and match.is_sum
    return UNKNOWN._replace(is_sum=is_sum)


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("The loss is not a multiple of the likelihood")


def _product(sizes: Sizes) -> tf.Tensor:
    return tf.reduce_prod(tf.cast(sizes, tf.float64))
