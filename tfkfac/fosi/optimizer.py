"""Keras optimizer `FOSI`; with several replicas it is DHO2."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.checks import check_choice, check_count, check_range, if_given
from tfkfac.fosi.layouts import LAYOUTS
from tfkfac.fosi.method import FOSIMethod, Settings
from tfkfac.fosi.multirole import MultiRoleMethod
from tfkfac.shell.arguments import (
    Hyperparameter,
    Schedule,
    check_rate,
    interval,
    is_rate,
)
from tfkfac.shell.optimizer import SecondOrderOptimizer


@keras.saving.register_keras_serializable(package="tfkfac")
class FOSI(SecondOrderOptimizer):
    """Add Newton steps along extreme curvature to an inner optimizer.

    After a warm-up, a Lanczos iteration estimates the directions `V` of
    extreme curvature `lambda` of the loss on the current batch (FOSI, Sivan
    et al., 2023), once or every `update_interval` steps. Each step then splits
    the gradient `g` (algorithm 3):

    ```
    c  = V^T g                      m = momentum m + c
    d  = inner optimizer's weight change for the gradient g - V c
    w += s (d - V V^T d) - alpha V (m / |lambda|)
    ```

    The change `d` includes the inner optimizer's weight decay; its slots see
    only `g - V c`. The correction is added before the inner optimizer averages
    or constrains the weights. A step reads `V` four times, or twice for SGD
    without weight decay, clipping and gradient accumulation.
    Before the first estimation, or if the curvature is zero, a step equals the
    inner optimizer's bit for bit (after conversion of sparse embedding
    gradients to dense gradients).

    Under several replicas this is DHO2 (Gu et al., 2025, first version): each
    replica has a part of the Lanczos basis and of the directions.

    FOSI helps for nearly quadratic losses with few extreme directions, on
    large batches, with SGD as inner optimizer. On other networks
    `FOSI` needed fewer steps than Adam at first, but no fewer to the end. One
    estimation after 5 to 10 % of a run was as good as ten; 3 to 5 directions
    were as good as more.

    `state_bytes()` has the keys "directions" (with momentum), "basis" (of the
    Lanczos iteration; temporary, except on accelerators), "copies" (weights of
    an estimation on accelerators; weights and sum of gradients on workers with
    `final_update="paper"`) and "counters", without an accelerator's batch.
    `communication_bytes()` has the keys "gradients" (all-reduce), "projections"
    (of gradient and weight change), "lanczos" (iterations; with accelerators
    spread over an interval), "directions" (exchange of new directions and
    momentum) and "weights" (copies for accelerators), without scalars, for a
    step of the "warmup", a "plain" step and a step with an "estimation".

    The optimizer needs the loss of the current batch. `fit` and
    `train_on_batch` compute it by `Model.compute_loss`; a custom training loop
    must call this method too.

    >>> model.compile(optimizer=tfkfac.FOSI("adam"), loss="mse")
    >>> model.fit(x, y, epochs=10)
    >>> curvatures = model.optimizer.spectrum()

    Args:
        inner_optimizer: A Keras optimizer, its identifier or config, or a
            float or schedule, the learning rate of `Adam`. Defaults to "adam".
        num_largest: Number of directions of largest curvature. Defaults to 5.
        num_smallest: Number of directions of smallest (most negative)
            curvature. Defaults to 0.
        alpha: Learning rate of the Newton steps. A number is scaled by the
            inner learning rate of the step over the largest so far. A schedule
            is the rate itself. Defaults to 0.1.
        update_interval: Steps between estimations: an integer or a schedule.
            Defaults to None: a single estimation (repeated after 100 steps if
            the curvature was zero), or 800 with accelerators.
        warmup_steps: Steps of the inner optimizer alone before the first
            estimation. Defaults to None: 7.5 % of the steps of all epochs of
            the first `fit` with a known number of steps, else 100 (custom
            loops, `train_on_batch`, data of unknown size).
        lanczos_steps: Hessian-vector products of an estimation. Defaults to
            None: `max(4 r, 2 ln n)` for `r` directions and `n` weights.
        momentum: Momentum of the Newton steps, in [0, 1). New directions
            inherit its projection. Defaults to 0.9.
        learning_rate_clip: Upper bound of the factor `s`, at least 1. For SGD,
            `s` is `lambda_max / lambda_k`, the largest over the k-th largest
            curvature, `k = num_largest`: larger steps are stable without the
            directions. For other inner optimizers `s` is 1. Defaults to 1.
        layout: Part of the directions on each replica: "rows" (the same
            elements of all directions) or "columns" (whole directions, as
            published; several times the communication). Defaults to "rows".
        accelerator_fraction: Fraction of the replicas, the last ones, that are
            accelerators (MR-DHO2). They do not train. During an interval, they
            estimate at its first weights on their parts of its first batch,
            and the workers receive the result at its end. Defaults to 0: all
            replicas train, and estimate together.
        final_update: With accelerators, use of the result by the workers.
            "stale": steps as above during the next interval. "paper": inner
            optimizer steps, and at the end of an interval one Newton step with
            the sum of its gradients, which replaces the inner steps' component
            along the directions (equation 17 of DHO2, to reproduce the paper:
            most such updates increase the loss, and training can diverge for
            `alpha * update_interval > 2`). Defaults to "stale".
        seed: Seed of the Lanczos iteration's start vector. Defaults to 0.
        max_skipped_steps: Consecutive skipped steps (gradients that are not
            finite), at least 1, that end the training with an error on all
            workers; see `check_skipped_steps`. None: no limit. Defaults to
            100.
        name: Name of the optimizer. Defaults to "fosi".

    Raises:
        ValueError: If an argument is not allowed.
    """

    settings_type = Settings
    inner_class = keras.optimizers.Adam
    rate_argument = "inner_optimizer"
    wrapped_hint = (
        "Pass it to the inner optimizer: "
        "`inner_optimizer=keras.optimizers.Adam(0.001, {})`."
    )
    method: FOSIMethod

    def __init__(
        self,
        inner_optimizer: Any = "adam",
        *,
        num_largest: int = 5,
        num_smallest: int = 0,
        alpha: Schedule = 0.1,
        update_interval: Schedule | None = None,
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
        smallest = check_count("num_smallest", num_smallest)
        directions = largest + smallest
        if directions == 0:
            raise ValueError(
                "Arguments `num_largest` and `num_smallest` must not both be 0."
            )
        settings = Settings(
            num_largest=largest,
            num_smallest=smallest,
            alpha=Hyperparameter("alpha", alpha),
            update_interval=interval("update_interval", update_interval),
            warmup_steps=if_given(check_count, "warmup_steps", warmup_steps),
            lanczos_steps=if_given(
                check_count, "lanczos_steps", lanczos_steps, directions
            ),
            momentum=check_range("momentum", momentum, 0, 1),
            learning_rate_clip=check_range(
                "learning_rate_clip", learning_rate_clip, 1
            ),
            layout=check_choice("layout", layout, LAYOUTS),
            accelerator_fraction=check_range(
                "accelerator_fraction", accelerator_fraction, 0, 1
            ),
            final_update=check_choice(
                "final_update", final_update, ("stale", "paper")
            ),
            seed=check_count("seed", seed),
        )
        has_roles = settings.accelerator_fraction > 0
        method = (MultiRoleMethod if has_roles else FOSIMethod)(settings)
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
        """Return the Ritz values of the last estimation.

        Returns:
            The values in use, ascending; empty on accelerators and before the
            first estimation of nonzero curvature (see `summary`).
        """
        return self.method.spectrum()
