"""FOSI and DHO2: Newton steps along extreme directions, Adam on the rest."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.checks import check_count
from tfkfac.fosi.method import FOSIMethod
from tfkfac.shell.arguments import Value, check_rate, is_rate
from tfkfac.shell.optimizer import SecondOrderOptimizer


@keras.saving.register_keras_serializable(package="tfkfac")
class FOSI(SecondOrderOptimizer):
    """Newton steps along extreme directions, any optimizer on the rest.

    After a warm-up a Lanczos iteration finds the directions `V` of extreme
    curvature `lambda` of the loss on the current batch (FOSI, Sivan et al.,
    2023), once or every `update_interval` steps. Each step then splits the
    gradient `g` (algorithm 3):

    ```
    c  = V^T g                      m = momentum m + c
    d  = inner optimizer's change of the weights, for the gradient g - V c
    w += s (d - V V^T d) - alpha V (m / |lambda|)
    ```

    The inner optimizer's change is the difference of the weights around its
    own `apply`, with its weight decay; its slots see the split gradient only.
    That of SGD without weight decay, clipping and accumulation is known before
    it is done, so that a step reads `V` twice and not four times.
    The rest is added where it has updated the weights, before it averages or
    constrains them. With directions of no curvature or before the first
    estimation, a step is the inner optimizer's, bit for bit (for dense
    gradients: those of embeddings are made dense).

    Under several replicas this is DHO2 (Gu et al., 2025): the basis of the
    Lanczos iteration and the directions are divided among them.

    It pays for losses that are nearly quadratic, with few extreme directions,
    on large batches, with SGD inside. In a study of an autoencoder, a CNN, a
    deep MLP and a character Transformer no setting was more than about 10 % of
    gradients better than the best first-order optimizer at its best rate.
    One estimation after 5 to 10 % of a run was as good as ten, 3 to 5
    directions as good as more. A constant `alpha` beside an inner rate that
    decays was ruinous (loss of the MLP .157, with `alpha` following it
    7.9e-4): it does follow.

    The optimizer needs the loss of the current batch: `fit` and
    `train_on_batch` compute it by `Model.compute_loss`, and a custom loop has
    to do so as well.

    >>> model.compile(optimizer=tfkfac.FOSI("adam"), loss="mse")

    Args:
        inner_optimizer: A Keras optimizer, its identifier or config, or a
            float or schedule, the learning rate of `Adam`. Defaults to "adam".
        num_largest: Number of directions of largest curvature. Defaults to 5.
        num_smallest: Number of directions of smallest (most negative)
            curvature.
        alpha: Learning rate of the Newton steps. A number follows the inner
            optimizer's learning rate: it is multiplied by that of the step
            over the largest so far, which is the first of one that decays. A
            schedule or a callable of the iteration is the rate itself.
            Defaults to 0.1.
        update_interval: Steps between estimations: an integer, a schedule or
            a callable of the iteration. None is a single estimation (repeated
            after 100 steps if no curvature was found); with accelerators,
            which estimate all the time, 800.
        warmup_steps: Number of steps that the inner optimizer does alone,
            before the first estimation. None is 7.5 % of the run, all epochs
            of the first `fit` that knows its steps, and 100 where nobody
            tells: a loop of your own, `train_on_batch`, batches that `fit`
            cannot count.
        lanczos_steps: Hessian-vector products of an estimation. None is
            `max(4 r, 2 ln n)` for `r` directions and `n` weights.
        momentum: Momentum of the Newton steps, in [0, 1). It is carried over
            to new directions. Defaults to 0.9.
        learning_rate_clip: Largest factor `s` on the inner optimizer's change.
            The factor is `lambda_max / lambda_k`, of the largest and the
            smallest of the `num_largest` curvatures: without the former,
            larger steps are stable. It is 1 for inner optimizers other than
            SGD, whose steps do not scale with the gradient. Defaults to 1.
        layout: What several replicas keep of the directions: "rows" (the same
            elements of all directions) or "columns" (whole directions, as
            published, which moves several times as much in each step).
        accelerator_fraction: Share of the replicas that are accelerators
            (MR-DHO2): the last ones, rounded to whole replicas. They train on
            no batch; in the time of an interval they do the estimation at its
            first weights, on their parts of its first batch, and the workers
            take over the result at its end. Defaults to 0: all train, and
            wait for each estimation.
        final_update: With accelerators, what workers do with the result:
            "stale" (steps as above with it, in the next interval) or "paper"
            (the inner optimizer's steps, and at the end of an interval one
            Newton step with the sum of all its gradients, which also takes
            back what those steps moved in the directions, as published in
            equation 17: there to reproduce the paper, as most such updates
            raise the loss, and with `alpha` times `update_interval` above 2 it
            can diverge). Defaults to "stale".
        seed: Seed of the Lanczos iteration's start vector.
        max_skipped_steps: Steps in a row, at least 1, skipped because their
            gradients were not finite, that end the training with an error on
            all workers; see `check_skipped_steps`. None is any number.
            Defaults to 100.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is not allowed.
    """

    method_type = FOSIMethod
    method: FOSIMethod
    # The method's, shown as attributes.
    alpha: Value
    update_interval: Value
    num_largest: int
    num_smallest: int
    warmup_steps: int | None
    lanczos_steps: int | None
    momentum: float
    learning_rate_clip: float
    layout: str
    accelerator_fraction: float
    final_update: str
    seed: int

    def __init__(
        self,
        inner_optimizer: Any = "adam",
        *,
        num_largest: int = 5,
        num_smallest: int = 0,
        alpha: Value = 0.1,
        update_interval: Value = None,
        warmup_steps: int | None = None,
        lanczos_steps: int | None = None,
        momentum: float = 0.9,
        learning_rate_clip: float = 1.0,
        layout: str = "rows",
        accelerator_fraction: float = 0.0,
        final_update: str = "stale",
        seed: int = 0,
        max_skipped_steps: int | None = 100,
        name: str = "fosi",
    ) -> None:
        largest = check_count("num_largest", num_largest)
        directions = largest + check_count("num_smallest", num_smallest)
        if directions == 0:
            raise ValueError(
                "Arguments `num_largest` and `num_smallest` must not both be 0."
            )
        if lanczos_steps is not None:
            check_count("lanczos_steps", lanczos_steps, directions)
        method = FOSIMethod(locals())
        if is_rate(inner_optimizer):
            rate = check_rate("inner_optimizer", inner_optimizer)
            inner_optimizer = keras.optimizers.Adam(rate)
        super().__init__(inner_optimizer, method, name, max_skipped_steps)

    @property
    def estimations(self) -> tf.Variable | int:
        """Number of estimations of the directions so far."""
        states = self.method.states
        return states[0].estimations if states else 0

    def spectrum(self) -> np.ndarray:
        """Returns the Ritz values of the last estimation.

        Returns:
            The values in use, ascending; empty before the first estimation
            that found any curvature (`summary` says when the first comes),
            and on accelerators.
        """
        return self.method.spectrum()

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of this replica's curvature state.

        Known before training, for a built model, but for the batch that an
        accelerator holds: its size counts from the first step on.

        Returns:
            The bytes of the "directions" and their momentum, of the "basis" of
            the Lanczos iteration with what goes with it, which lives during an
            estimation only (on accelerators, always), of "copies" (on
            accelerators the weights and the batch of an estimation, on workers
            with `final_update="paper"` the weights and the sum of the
            gradients of an interval), of "counters", and their "total".
        """
        return super().state_bytes()

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that this replica receives in a step.

        Known before training, for a built model.

        Returns:
            For a step of the "warmup", a "plain" one and one with an
            "estimation", the bytes of "gradients", of the "projections" of
            gradient and update, of the "lanczos" iterations, of "directions"
            on their way to who keeps them with the momentum on its way to
            them, and of the "weights" that accelerators follow. With
            accelerators an estimation is spread over an interval and its
            result handed over in one step. Single numbers are not counted:
            sizes of batches, whether gradients are finite, times.
        """
        return super().communication_bytes()

    def idle_share(self) -> np.ndarray:
        """Returns the share of the time that each replica has waited.

        That is for the others at the end of a step, counted from the second
        step on. If it is high on workers, the accelerators are too slow for
        `update_interval`; if it is high on accelerators, fewer would do.
        The hosts' clocks are read. A GPU may still work on what its host has
        launched: there this time counts as waiting too. It has not been run
        on a GPU.

        Returns:
            A number in [0, 1] for each replica, workers first; zeros without
            accelerators.
        """
        self._check_built()
        return self.method.estimator.idle_share()
