"""Dynamic loss scaling for half precision, by tfkfac or by Keras."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import (
    BeforeTap,
    MetricsDecision,
    MetricsTap,
    restore,
)
from tfkfac.checks import check_count, check_positive
from tfkfac.compat.models import replica_variable
from tfkfac.compat.optimizers import on_overflow
from tfkfac.loss.batch import LossTap
from tfkfac.shell.arguments import wrapped_setting
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.training.step import is_lost


@keras.saving.register_keras_serializable(package="tfkfac")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """`keras.optimizers.LossScaleOptimizer` for any number of replicas.

    If the gradients of one replica overflow, the Keras class skips the step on
    that replica only, and training hangs. This class skips the same steps on
    all replicas, with the same scale on all replicas. On one device, both
    classes work; under the policy "mixed_float16" Keras adds its own class.

    A step skipped by an overflow counts in `skipped_steps` and towards
    `max_skipped_steps`.

    >>> optimizer = tfkfac.LossScaleOptimizer(tfkfac.KFAC())
    >>> model.compile(optimizer=optimizer, loss="mse")

    Args:
        inner_optimizer: A `tfkfac.KFAC` or `tfkfac.FOSI`.
        initial_scale: The first scale of the loss. Defaults to 2^15.
        dynamic_growth_steps: Number of steps without an overflow after which
            the scale is doubled. Defaults to 2,000.
        name: Name of the optimizer. Defaults to None, the name by Keras.

    Raises:
        TypeError: If `inner_optimizer` is not an optimizer of tfkfac.
    """

    def __init__(
        self,
        inner_optimizer: SecondOrderOptimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
    ) -> None:
        if not isinstance(inner_optimizer, SecondOrderOptimizer):
            raise TypeError(
                "Argument `inner_optimizer` must be an optimizer of tfkfac; "
                "wrap others in `keras.optimizers.LossScaleOptimizer`. "
                f"Received: inner_optimizer={inner_optimizer!r} "
                f"(of type {type(inner_optimizer)})"
            )
        super().__init__(
            inner_optimizer,
            initial_scale=check_positive("initial_scale", initial_scale),
            dynamic_growth_steps=check_count(
                "dynamic_growth_steps", dynamic_growth_steps, 1
            ),
            name=name,
        )

    weight_decay = wrapped_setting("weight_decay")
    clipnorm = wrapped_setting("clipnorm")
    clipvalue = wrapped_setting("clipvalue")
    global_clipnorm = wrapped_setting("global_clipnorm")

    @property
    def wrapped_hint(self) -> str:
        """The text of errors on arguments of the inner optimizer."""
        return str(self.inner_optimizer.wrapped_hint)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from weight decay, see `KFAC`.

        Args:
            var_list: Variables to exclude. Defaults to None.
            var_names: Regular expressions of names. Defaults to None.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Scale the loss and weight it by the replica's share of the batch.

        Args:
            loss: The loss that `compute_loss` returned.

        Returns:
            The loss to differentiate.
        """
        return super().scale_loss(self.inner_optimizer.scale_loss(loss))

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[tf.Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Update the variables and the scale; see `keras.Optimizer.apply`.

        Args:
            grads: Gradients of the scaled loss.
            trainable_variables: The variables; required in the first call.
        """
        if not self.built:
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        scale = tf.convert_to_tensor(replica_variable(self.dynamic_scale))
        job = self.inner_optimizer.method.job
        skipped = job.local_state(job.skipped)
        before = tf.convert_to_tensor(skipped)
        self.inner_optimizer.apply(
            [None if g is None else keras.ops.divide(g, scale) for g in grads],
            trainable_variables,
        )
        overflowed = skipped > before
        if len(self.inner_optimizer.method.peers(job.rank)) < (
            job.topology.replicas
        ):
            # Send the flag to MR-DHO2's accelerators, which train no batch.
            group = job.group("loss scale")
            (total,) = group.all_reduce([tf.cast(overflowed, tf.float32)])
            overflowed = total > 0
        # Halve the scale on overflow; double it after many valid steps.
        counter = replica_variable(self.step_counter)
        grows = tf.equal(counter, self.dynamic_growth_steps - 1)
        new_scale = tf.where(grows, 2 * scale, scale)
        new_scale = tf.where(overflowed, scale / 2, new_scale)
        replica_variable(self.dynamic_scale).assign(new_scale)
        zero = tf.zeros_like(counter)
        counter.assign(tf.where(overflowed | grows, zero, counter + 1))


def undo_overflows(scaler: Any, optimizer: SecondOrderOptimizer) -> None:
    """Restore the model when Keras' loss scaler skips a step."""

    def prepare() -> Callable[[], None]:
        job = optimizer.method.job
        streak = job.local_state(job.streaks)
        before = BeforeTap.open(job.model).items()
        batches = LossTap.open(job.model).items()
        loss = batches[-1].value if batches else None
        decision = MetricsDecision(streak.excluded, loss is not None)
        MetricsTap.open(job.model).record(decision)

        def undo() -> None:
            for values in before:
                restore(values)
            # Report no gradient: all are finite at a smaller scale.
            streak.extend(tf.constant([True]), is_lost(loss))

        return undo

    on_overflow(scaler, prepare)


def find_optimizer(optimizer: Any) -> SecondOrderOptimizer | None:
    """Return a tfkfac optimizer, unwrapped from a loss scaler; else None."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer if isinstance(optimizer, SecondOrderOptimizer) else None
