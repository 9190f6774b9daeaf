"""Exact Gauss-Newton as a Keras optimizer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, Self

import keras
import tensorflow as tf

from tfkfac.checks import check_count, check_positive
from tfkfac.gauss_newton.method import GaussNewtonMethod
from tfkfac.shell.arguments import check_rate, refuse_unknown
from tfkfac.shell.conditions import (
    MOST_STEPS,
    Conditions,
    Course,
    Points,
    check_conditions,
)
from tfkfac.shell.optimizer import SecondOrderOptimizer


@keras.saving.register_keras_serializable(package="tfkfac")
class GaussNewton(SecondOrderOptimizer):
    """Exact damped Gauss-Newton steps, for small and physics-informed models.

    With the residuals r of the batch and their Jacobian J, a step is

    ```
    (J^T J + lambda s I) d = -J^T r,      s = trace(J^T J) / n
    ```

    exactly, where the damping lambda adapts itself: a step that lowers the
    loss as its model says makes it smaller, one that does not is tried again
    with more damping (Levenberg-Marquardt, by Nielsen's rule). The valleys of
    such losses are curved, and steps bend with them (geodesic acceleration):
    to d is added -1/2 (J^T J + lambda s I)^-1 J^T r'', with the second
    derivatives r'' of the residuals along d, for three forward passes and a
    backward one. The loss never rises on the batch of a step.

    It is made for whole batches and up to a few thousand weights, in float64
    where errors are to become small: a network for Poisson's equation on a
    square (`examples/equations.py`) was within 7e-7 of the solution after 6
    seconds on one core, within 2e-9 after 20 and 4e-11 after 60 (medians of
    three seeds). Its work
    grows as the number of residuals (examples times outputs) times that of
    weights times the smaller of both: `summary()` has the bytes of a step. It
    is the wrong tool for classifiers of 10^4 weights, and small noisy tables it
    interpolates. Functions of many waves, as sin(20 x) e^x on [-1, 1], keep it
    for about a hundred steps before the error falls.

    The residuals of a mean squared error are the errors, with sample weights,
    masks, loss weights and several outputs as in `fit`. For cross-entropies
    and other negative log-likelihoods (`tfkfac.register_distribution`) they
    are those of the Fisher matrix at the logits, the generalised
    Gauss-Newton matrix. L2 regularisers are part of the sum of squares.

    For a differential equation see `minimize`, which trains by conditions of
    any kind. In `fit` the model has to return what the equation says of the
    network's function, the labels being the right-hand sides:
    `examples/poisson.py`.

    Refused, with the layer or loss by name, is what has no residuals of single
    examples: batch normalisation in training, dropout, losses added by layers,
    absolute and Huber errors, constraints, regularisers other than L2, half
    precision. Grouped convolutions and recurrent layers with a mask, or with
    weights before them, are exact but slow, as TensorFlow does not vectorise
    them over examples.

    Under several replicas each makes the rows of its own examples, and their
    J^T J and J^T r, n (n + 3) / 2 numbers, are added up. `state_bytes` has the
    bytes of the "previous_step" and of "counters", `communication_bytes` those
    of "gradients", of the "curvature" (J^T J as a triangle) and, with one try,
    of "losses" and the "acceleration".

    Args:
        damping: The initial damping, in units of the mean of the diagonal of
            J^T J. It hardly matters. Defaults to 1e-3.
        momentum: What part of the step before the first try of a step is
            pulled to, in [0, 1), as in SPRING (Goldshlager, Abrahamsen & Lin,
            2024). Defaults to 0.5.
        acceleration: True bends steps, see above (Transtrum & Sethna, arXiv
            1201.5885, eq. 9), where the bend is a small correction. Defaults
            to True.
        solve: "parameters" factorises a matrix of the weights, "residuals"
            one of the residuals, with the same steps. "auto" is the smaller.
            With several replicas, whose J^T J are added up, and with
            regularisers it is that of the weights. Defaults to "auto".
        max_tries: Most dampings that are tried in a step. If none lowers the
            loss, the weights stay and the step is counted. Defaults to 6.
        max_bytes: Most bytes that the matrices of a step may take. None is
            2 GiB.
        learning_rate: What a step is multiplied by: a float, a schedule or a
            callable. Defaults to 1.0.
        max_skipped_steps: Steps in a row, at least 1, skipped because their
            loss was not finite, that end the training with an error. Defaults
            to None: any number of them.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is not allowed.
    """

    method_type = GaussNewtonMethod
    method: GaussNewtonMethod
    # The method's, shown as attributes.
    damping: float
    momentum: float
    acceleration: bool
    solve: str
    max_tries: int
    max_bytes: int | None

    def __init__(
        self,
        damping: float = 1e-3,
        *,
        momentum: float = 0.5,
        acceleration: bool = True,
        solve: str = "auto",
        max_tries: int = 6,
        max_bytes: int | None = None,
        learning_rate: Any = 1.0,
        max_skipped_steps: int | None = None,
        name: str = "gauss_newton",
        **unknown: Never,
    ) -> None:
        refuse(unknown)
        method = GaussNewtonMethod(locals())
        rate = check_rate("learning_rate", learning_rate)
        inner = keras.optimizers.SGD(rate)
        super().__init__(inner, method, name, max_skipped_steps)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config = super().get_config()
        inner = config.pop("inner_optimizer")
        return config | {"learning_rate": inner["config"]["learning_rate"]}

    def attach(self, model: keras.Model, **kwargs: Any) -> Self:
        """Binds the optimizer to the model that it will train.

        See `tfkfac.KFAC.attach`. A loop of your own has to compute the loss by
        `model.compute_loss`.

        Args:
            model: The model.
            **kwargs: Others of `tfkfac.KFAC.attach`.

        Raises:
            ValueError: If there is a `LossScaleOptimizer` around this one.
        """
        if kwargs.get("loss_scaler") is not None:
            raise ValueError(
                "A `LossScaleOptimizer` must not be around `GaussNewton`, "
                "which needs float32 or float64."
            )
        return super().attach(model, **kwargs)

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
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> keras.callbacks.History:
        """Makes the residuals of named conditions small, by `fit`.

        The loss is the sum of `weight mean(r^2)` over the conditions. Another
        call with the same variables goes on, with other conditions too.

        Args:
            residuals: For each condition a function of its points, `(batch,
                ...)`, that returns r, `(batch,)` or `(batch, k)`, in which row
                i is of point i alone.
            variables: Whatever is to be found: weights of networks, unknown
                coefficients.
            points: For each condition an array of its points, or a function
                of the number of steps so far that returns one, of the same
                shape in all calls.
            weights: Weights of conditions. That of the others is 1.
            steps: Number of steps. Defaults to None: as many as there is time
                for.
            seconds: Wall-clock seconds after which no other step begins, the
                first trace included. Defaults to None: no limit.
            every: Steps between calls of the functions in `points`, and those
                of an epoch, as callbacks know it.
            callbacks: Callbacks of Keras. Their model is one whose weights are
                the variables, to be saved with the optimizer's state.

        Returns:
            The history of the epochs' "loss".

        Raises:
            ValueError: If an argument is not allowed, if there is neither a
                number of steps nor of seconds, or if the optimizer belongs to
                other variables.
        """
        weights = {} if weights is None else weights
        check_conditions(residuals, variables, points, weights)
        every = check_count("every", every, 1)
        if steps is None and seconds is None:
            raise ValueError(
                "Argument `steps` or `seconds` must be a number. Received: "
                f"steps={steps}, seconds={seconds}"
            )
        steps = MOST_STEPS if steps is None else check_count("steps", steps, 1)
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
        history: keras.callbacks.History = model.fit(
            model.stand_ins(),
            steps_per_epoch=every,
            epochs=-(-steps // every),
            verbose=0,
            shuffle=False,
            callbacks=[*callbacks, Course(steps, seconds, every)],
        )
        return history

    @property
    def last_step(self) -> dict[str, float]:
        """The numbers of the last step; empty before the first.

        "damping" and "tries" are those of the step; "predicted_reduction" and
        "actual_reduction", how much smaller its model and the loss itself
        have become with the last try; "accepted", 1 if it was taken;
        "residuals", their number, of this replica.
        """
        return self.method.last_step()


def refuse(unknown: Mapping[str, Any]) -> None:
    """Refuses the arguments that a constructor does not know.

    Raises:
        ValueError: If one is of other optimizers.
        TypeError: If one is of nobody.
    """
    others = inspect.signature(keras.optimizers.SGD.__init__).parameters
    for name, value in unknown.items():
        if name == "inner_optimizer" or name in others:
            raise ValueError(
                f"Argument `{name}` must be left out: `GaussNewton` makes "
                "whole steps by itself, each of one batch. In the place of "
                "weight decay there are L2 regularisers. "
                f"Received: {name}={value!r}"
            )
    refuse_unknown(GaussNewton, unknown, keras.optimizers.SGD)
