"""Rest optimizer: trains the weights that the method does not cover."""

import warnings
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.capture.model_taps import replica_id
from tfkfac.compat.optimizers import rate_of
from tfkfac.shell.arguments import check_inner

# Value of `rest_optimizer` that leaves all weights to the inner optimizer.
INNER = "inner"
# Arguments of Keras optimizers for averages of the weights.
_AVERAGES = "use_ema", "ema_momentum", "ema_overwrite_frequency"
# Default learning rates of SGD with preconditioned gradients, and of Adam.
_SGD_RATE, _ADAM_RATE = 0.1, 0.001
# Default of r, the factor of spectral steps, for a model without directions.
LENGTH = 0.01


@keras.saving.register_keras_serializable(package="tfkfac")
class ProportionalRate(LearningRateSchedule):
    """Learning rate proportional to the rate of another optimizer.

    `peak * rate / reference` for the `rate` of the optimizer `followed`; `peak`
    while `followed` is None.
    """

    def __init__(self, peak: float, reference: float) -> None:
        super().__init__()
        self.peak = peak
        self.reference = reference
        self.followed: keras.optimizers.Optimizer | None = None

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate of the current step, float32."""
        if self.followed is None:
            return tf.constant(self.peak)
        rate = tf.cast(self.followed.learning_rate, tf.float32)
        return self.peak * (rate / self.reference)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"peak": self.peak, "reference": self.reference}


# Final training losses, means of three seeds, and in brackets those of the
# constant rates 0.01, 0.03 and 0.1: a GPT 1.087 (1.095, 1.091, 1.104), an LSTM
# 0.0016 (0.0058, 0.0021, 0.0003), a BERT 0.0017 (0.0018, 0.0030, 0.0019). With
# `min(2 r, 0.1)` they are 1.093, 0.0005 and 0.0018.
@keras.saving.register_keras_serializable(package="tfkfac")
class LengthRate(ProportionalRate):
    """Learning rate of the rest optimizer beside spectral steps.

    `min(peak, r) * rate`, where r is the factor of the directions of the step,
    and `rate` the followed learning rate. Without directions, r is 0.01. With
    equal learning rates, steps of Adam and Muon have about the same RMS.
    """

    def __init__(self, peak: float = 0.1, reference: float = 1.0) -> None:
        super().__init__(peak, reference)
        self.lengths: tuple[tf.Variable, ...] = ()

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate of the current step, float32."""
        length = tf.constant(LENGTH)
        if self.lengths:
            length = tf.identity(self.lengths[replica_id() % len(self.lengths)])
        return super().__call__(step) * tf.minimum(length / self.peak, 1.0)


def choose_rest(
    rest_optimizer: Any,
    inner: keras.optimizers.Optimizer,
    default_rate: ProportionalRate,
    weight_decay: float | None = None,
) -> keras.optimizers.Optimizer | None:
    """Create the rest optimizer from the argument; None for "inner".

    The argument None gives Adam with `default_rate` and `weight_decay`. For
    None or a name, the averages of weights are set as in the inner optimizer;
    an instance with other averages causes a warning.
    """
    if rest_optimizer == INNER:
        return None
    is_new = rest_optimizer is None or isinstance(rest_optimizer, str)
    if rest_optimizer is None:
        rest_optimizer = keras.optimizers.Adam(
            default_rate, weight_decay=weight_decay or None
        )
    rest = check_inner(rest_optimizer, "rest_optimizer")
    if rest is inner or rest.gradient_accumulation_steps:
        requirement = (
            "different from `inner_optimizer`"
            if rest is inner
            else "an optimizer without `gradient_accumulation_steps`"
        )
        raise ValueError(
            f"Argument `rest_optimizer` must be {requirement}. "
            f"Received: rest_optimizer={rest}"
        )
    if is_new:
        for name in _AVERAGES:
            setattr(rest, name, getattr(inner, name))
    elif averages(rest) != averages(inner):
        warnings.warn(
            f"Argument `rest_optimizer` should average the weights as the "
            "inner optimizer does: otherwise swapping or overwriting the "
            "weights by averages mixes averages and current weights. "
            f"Received: rest_optimizer={rest.name!r} with {averages(rest)}, "
            f"and the inner optimizer {inner.name!r} with {averages(inner)}",
            stacklevel=3,
        )
    rate = rate_of(rest)
    if isinstance(rate, ProportionalRate):  # from a default or a config
        rate.followed = inner
    return rest


def default_rest_rate(inner: keras.optimizers.Optimizer) -> ProportionalRate:
    """Default learning rate of Adam for uncovered weights.

    `0.001 * rate / reference`, where `rate` is the inner learning rate and
    `reference` the constant inner rate, if positive, else 0.1 for SGD and 0.001
    for other inner optimizers.
    """
    reference = 0.0
    if not isinstance(rate_of(inner), LearningRateSchedule):
        reference = float(tf.convert_to_tensor(inner.learning_rate))
    if reference <= 0:
        is_sgd = isinstance(inner, keras.optimizers.SGD)
        reference = _SGD_RATE if is_sgd else _ADAM_RATE
    return ProportionalRate(_ADAM_RATE, reference)


def averages(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer for averages of the weights."""
    used = _AVERAGES if optimizer.use_ema else _AVERAGES[:1]
    return {name: getattr(optimizer, name) for name in used}
