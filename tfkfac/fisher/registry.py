"""Which distribution a loss is the negative log-likelihood of."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfkfac.fisher.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Normal,
    Poisson,
    chosen,
)
from tfkfac.loss import recognition, units
from tfkfac.loss.terms import LossTerms

Maker = Callable[[keras.losses.Loss], Distribution | None]

_NAMED: dict[str | None, Distribution] = {
    recognition.NORMAL: Normal(),
    recognition.POISSON: Poisson(),
    recognition.BERNOULLI: Bernoulli(),
    recognition.BERNOULLI_LOGITS: Bernoulli(from_logits=True),
    recognition.CATEGORICAL: Categorical(),
    recognition.CATEGORICAL_LOGITS: Categorical(from_logits=True),
}


# What users have registered, by class or function.
_registered: dict[Any, Maker] = {}


def distribution_of(terms: LossTerms) -> Distribution | None:
    """The distribution of a loss, None if it is not known to have one."""
    if terms.call is None:
        return None
    make = units.declared(_registered, terms.call.loss)
    if make is not None:
        return make(terms.call.loss)
    if terms.verdict is not None:
        among = [_NAMED[name] for name in terms.verdict.names]
        return chosen(among, terms.verdict.index)
    return _NAMED.get(terms.likelihood)


def register_distribution(
    loss: type[keras.losses.Loss] | Callable[..., Any],
    distribution: Distribution | Maker,
    *,
    unit: float | None = None,
    features: str = "sum",
) -> None:
    """Tells `KFAC` the distribution that a loss is the likelihood of.

    With it, the Fisher matrix can be that of labels drawn from the model's own
    predictions (`KFAC(fisher="monte_carlo")`) or the exact one ("type2").
    Keras' mean squared error, binary, categorical and sparse categorical
    cross-entropy, Kullback-Leibler divergence and Poisson loss are known, and
    so is a loss that is a multiple of one of the first four: a function of
    yours that sums squares, say.

    `tfkfac.fisher` has the distributions `Normal`, `Bernoulli`, `Categorical`
    and `Poisson`, and `Distribution` and `Independent` to write others. For
    example, labels whose logarithm has a standard deviation of 0.1 around the
    outputs:

    ```python
    class LogNormal(tfkfac.fisher.Independent):
        def sample(self, outputs, seed):
            return 10 * tf.random.stateless_normal(tf.shape(outputs), seed)

        def fisher(self, outputs):
            return tf.fill(tf.shape(outputs), 100.0)

    def log_squares(y_true, y_pred):
        return 50 * tf.reduce_sum((tf.math.log(y_true) - y_pred) ** 2, -1)

    tfkfac.register_distribution(log_squares, LogNormal())
    ```

    Args:
        loss: A class of losses, without its subclasses, or the function that
            is passed to `compile`. Its outputs are the last axis of one
            tensor of predictions.
        distribution: The distribution; or a function that takes the loss, a
            `keras.losses.Loss`, and returns its distribution, or None if it
            has none.
        unit: What the loss of a term is of the negative log-likelihood of its
            labels. None is 1 for a loss that is not a known one or a multiple
            of it.
        features: With a `unit`, whether the loss of a term is the "sum" over
            its outputs or the "mean", as Keras' `mse` with the unit 2.

    Raises:
        TypeError: If `loss` or `distribution` is not what it must be.
        ValueError: If `unit` or `features` is not allowed.
    """
    is_class = inspect.isclass(loss) and issubclass(loss, keras.losses.Loss)
    if not is_class and not inspect.isroutine(loss):
        raise TypeError(
            "Argument `loss` must be a subclass of `keras.losses.Loss` or a "
            f"function. Received: loss={loss!r}"
        )
    made = isinstance(distribution, Distribution)
    if not made and not inspect.isroutine(distribution):
        raise TypeError(
            "Argument `distribution` must be a `tfkfac.fisher.Distribution` "
            "or a function of the loss that returns one. Received: "
            f"distribution={distribution!r}"
        )
    if features not in ("sum", "mean"):
        raise ValueError(
            'Argument `features` must be "sum" or "mean". '
            f"Received: features={features!r}"
        )
    if unit is not None and not unit > 0:
        raise ValueError(
            f"Argument `unit` must be positive. Received: unit={unit!r}"
        )
    units.declare(loss, unit, features == "mean")
    if isinstance(distribution, Distribution):
        known = distribution
        _registered[loss] = lambda _: known
    else:
        _registered[loss] = distribution
