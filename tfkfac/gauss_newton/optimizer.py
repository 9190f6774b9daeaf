"""`GaussNewton`: exact Gauss-Newton steps as a Keras optimizer."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.checks import (
    check_choice,
    check_count,
    check_positive,
    check_range,
    if_given,
)
from tfkfac.gauss_newton.method import GaussNewtonMethod, Settings
from tfkfac.gauss_newton.support import ONE_LOSS, SPACES
from tfkfac.loss.batch import LossTap
from tfkfac.shell.arguments import check_rate
from tfkfac.shell.conditions import (
    MAX_STEPS,
    Conditions,
    Points,
    check_conditions,
)
from tfkfac.shell.optimizer import SecondOrderOptimizer


@keras.saving.register_keras_serializable(package="tfkfac")
class GaussNewton(SecondOrderOptimizer):
    """Optimizer with exact damped Gauss-Newton (Levenberg-Marquardt) steps.

    Meant for full batches and up to a few thousand weights, such as
    physics-informed networks. With the residuals r of the batch, their Jacobian
    J and n weights, a step d solves exactly

    ```
    (J^T J + lambda s I) d = -J^T r,      s = trace(J^T J) / n
    ```

    A step is accepted if it lowers the loss; otherwise it is tried again with
    a larger damping lambda (Nielsen's rule). The loss of the batch never
    increases. Geodesic acceleration adds the correction
    `-1/2 (J^T J + lambda s I)^-1 J^T r''` to d, with the second derivatives r''
    of the residuals along d. It costs three forward passes and a backward pass.

    Example:
    ```python
    keras.config.set_floatx("float64")
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(20, "tanh"),
         keras.layers.Dense(1)]
    )
    model.compile(optimizer=tfkfac.GaussNewton(), loss="mse")
    model.fit(x, y, batch_size=len(x), epochs=50)
    ```

    Small errors need float64. The work of a step is O(m n min(m, n)) for m
    residuals (examples times outputs); `summary()` shows its memory. Do not use
    it for classifiers with 10^4 or more weights. It overfits small noisy data.

    The residuals of a mean squared error are the errors, with the sample
    weights, masks, loss weights and outputs of `fit`. For cross-entropies and
    other negative log-likelihoods (`tfkfac.register_distribution`) J^T J is the
    Fisher matrix (generalised Gauss-Newton matrix). L2 penalties are part of
    the sum of squares.

    For differential equations see `minimize`. In `fit` the model has to return
    the left-hand side of the equation, and the labels are its right-hand side,
    see `examples/poisson.py`.

    Models without residuals of single examples raise an error that names the
    layer or loss: batch normalisation in training, dropout, losses added by
    layers, absolute and Huber errors, constraints, regularisers other than L2,
    half precision. Grouped convolutions, recurrent layers with a mask or with
    weights before them, and attention in float32 on a CPU are slow, because
    TensorFlow cannot vectorise them over examples.

    With several replicas, J^T J and J^T r, n (n + 3) / 2 scalars, are summed
    over the replicas. `state_bytes()` has the keys "previous_step" and
    "counters". `communication_bytes()` has the keys "gradients", "curvature"
    (J^T J as a triangle), "losses" and "acceleration" (for one try).

    Args:
        damping: Initial damping lambda, in units of the mean diagonal of
            J^T J. It has little influence. Defaults to 1e-3.
        momentum: Fraction of the previous step that the first try of a step
            is pulled to, in [0, 1), as in SPRING (Goldshlager, Abrahamsen &
            Lin, 2024, eq. 8). Defaults to 0.5.
        solve: "parameters" factorises an n x n matrix, "residuals" an m x m
            matrix; the steps are equal. "auto" uses the smaller matrix, and
            "parameters" with several replicas or regularisers. Defaults to
            "auto".
        max_tries: Upper bound: dampings tried in a step. If none lowers the
            loss, the weights stay and the step is counted as rejected.
            Defaults to 6.
        max_bytes: Upper bound: bytes of the matrices of a step. Defaults to
            None: 2 GiB.
        learning_rate: Factor of a step: a float or a schedule.
            Defaults to 1.0.
        max_skipped_steps: Number of consecutive steps with a loss that is not
            finite after which training raises an error, at least 1. None is no
            limit. Defaults to 100.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is not allowed.
    """

    settings_type = Settings
    wrapped_hint = (
        "An exact step is neither clipped, decayed, averaged nor accumulated: "
        "`damping` limits it, and `kernel_regularizer=keras.regularizers.L2()` "
        "penalises weights."
    )
    method: GaussNewtonMethod

    def __init__(
        self,
        damping: float = 1e-3,
        *,
        momentum: float = 0.5,
        solve: str = "auto",
        max_tries: int = 6,
        max_bytes: int | None = None,
        learning_rate: Any = 1.0,
        max_skipped_steps: int | None = 100,
        name: str = "gauss_newton",
    ) -> None:
        settings = Settings(
            damping=check_positive("damping", damping),
            momentum=check_range("momentum", momentum, 0, 1),
            solve=check_choice("solve", solve, SPACES),
            max_tries=check_count("max_tries", max_tries, 1),
            max_bytes=if_given(check_count, "max_bytes", max_bytes, 1),
        )
        method = GaussNewtonMethod(settings)
        inner = keras.optimizers.SGD(check_rate("learning_rate", learning_rate))
        super().__init__(inner, method, name, max_skipped_steps)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = super().get_config()
        inner = config.pop("inner_optimizer")
        return config | {"learning_rate": inner["config"]["learning_rate"]}

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Weight the loss by this replica's share of the batch.

        See `tfkfac.KFAC.scale_loss`.

        Args:
            loss: The result of `compute_loss`.

        Returns:
            The loss to differentiate.

        Raises:
            ValueError: If several replicas pass another loss.
        """
        job = self._job
        # One replica compares the gradients of its first step instead.
        if job is not None and job.topology.replicas > 1:
            batches = LossTap.open(job.model).current()
            is_other = loss.shape.rank == 0 and all(
                loss is not batch.value for batch in batches
            )
            if is_other or any(batch.ordinal for batch in batches):
                raise ValueError(
                    "Argument `loss` of `scale_loss` must be the loss that "
                    "`compute_loss` returned, which `GaussNewton` minimises. "
                    f"Received: loss={loss}. {ONE_LOSS}"
                )
        return super().scale_loss(loss)

    def minimize(
        self,
        residuals: Mapping[str, Callable[[tf.Tensor], tf.Tensor]],
        variables: Sequence[keras.Variable],
        points: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        every: int = 1,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
    ) -> keras.callbacks.History:
        """Minimise the residuals r of named conditions.

        The loss is `sum_c weight_c mean(r_c^2)` over the conditions c, such as
        an equation and its boundary values. Further calls with the same
        variables continue training, also with other conditions.

        For example, y' = -y with y(0) = 1, and a Keras model `net`:

        ```python
        def equation(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = net(x)
            return tape.gradient(y, x) + y

        optimizer.minimize(
            {"equation": equation, "start": lambda x: net(x) - 1.0},
            net.trainable_variables,
            {"equation": np.linspace(0, 1, 100)[:, None],
             "start": np.zeros((1, 1))},
            steps=100,
        )
        ```

        Args:
            residuals: For each condition, a function from points `(batch,
                ...)` to r, `(batch,)` or `(batch, k)`. Row i must depend only
                on point i.
            variables: The variables to optimise: weights of networks, unknown
                coefficients.
            points: For each condition, an array of points, or a function from
                the number of completed steps to an array of constant shape.
            weights: Weights of conditions. Missing weights are 1.
            steps: Number of steps. Defaults to None: no limit.
            seconds: Wall seconds after which no further step begins, including
                the first trace. Defaults to None: no limit.
            every: Steps per epoch of the callbacks, and between calls of the
                functions in `points`. Defaults to 1.
            callbacks: Keras callbacks. Their model has the variables as
                weights, and can be saved with the optimizer's state. Defaults
                to None: no callback.

        Returns:
            A `History` with the "loss" of each epoch.

        Raises:
            ValueError: If an argument is not allowed, if both `steps` and
                `seconds` are None, or if the optimizer is bound to other
                variables.
        """
        weights = {} if weights is None else weights
        check_conditions(residuals, variables, points, weights)
        every = check_count("every", every, 1)
        if steps is None and seconds is None:
            raise ValueError(
                "Argument `steps` or `seconds` must be a number. Received: "
                f"steps={steps}, seconds={seconds}"
            )
        steps = MAX_STEPS if steps is None else check_count("steps", steps, 1)
        if seconds is not None:
            seconds = check_positive("seconds", seconds)
        model = self.method.conditions
        if model is None:
            model = Conditions(variables)
        elif list(map(id, model.unknowns)) != list(map(id, variables)):
            raise ValueError(
                f"Optimizer '{self.name}' already belongs to other variables. "
                "Create a new optimizer."
            )
        model.residuals = dict(residuals)
        mse = keras.losses.MeanSquaredError
        model.compile(
            self,
            {name: mse(dtype=model.dtype) for name in residuals},
            loss_weights={name: weights.get(name, 1.0) for name in residuals},
        )
        self.method.conditions, job = model, self._bound_job()
        topology, step = job.topology, int(self.iterations.numpy())
        model.points = Points(points, model.dtype, step)
        if seconds is not None and topology.replicas > len(topology.local):
            raise ValueError(
                "Argument `seconds` must be None with several processes, whose "
                f"clocks differ. Received: seconds={seconds}"
            )
        end, num_done = time.monotonic() + (seconds or math.inf), 0

        def begin_epoch(epoch: int, logs: Any) -> None:
            nonlocal num_done
            num_done = epoch * every
            # After a backup within an epoch, use the points of its beginning.
            skipped = (getattr(x, "num_skipped", 0) for x in callbacks or ())
            first_step = int(self.iterations.numpy()) - max(skipped, default=0)
            model.points.resample(first_step)

        def end_step(batch: int, logs: Any) -> None:
            if num_done + batch + 1 >= steps or time.monotonic() > end:
                model.stop_training = True

        callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=begin_epoch, on_train_batch_end=end_step
        )
        history: keras.callbacks.History = model.fit(
            model.dummy_data(),
            steps_per_epoch=every,
            epochs=-(-steps // every),
            verbose=0,
            shuffle=False,
            callbacks=[*(callbacks or ()), callback],
        )
        return history

    @property
    def last_step(self) -> dict[str, float]:
        """Values of the last step; empty before the first step.

        - "damping": damping of the last try
        - "tries": number of tries
        - "predicted_reduction", "actual_reduction": reduction of the quadratic
          model and of the loss by the last try
        - "accepted": 1 if the last try was accepted, else 0
        - "residuals": number of residuals of this replica
        """
        return self.method.last_step()
