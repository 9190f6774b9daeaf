"""Levenberg-Marquardt steps with momentum in float64 NumPy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.curvature_models import split
from tests.support.harness import flat, weights_of
from tests.support.reference import Array

# Loss of flat weights; rows J and residuals r there. Up to a constant, the
# loss is `|r|^2 / 2`.
Loss = Callable[[Array], float]
Rows = Callable[[Array], tuple[Array, Array]]
# Function of weights and a direction: `J^T W y''` with the second derivative
# y'' of the outputs along the direction.
Pull = Callable[[Array, Array], Array]


@dataclasses.dataclass
class Reference:
    """Steps of the optimizer, one at a time.

    The ridge is the Hessian of a penalty `1/2 sum ridge_i w_i^2`. With a pull,
    half the geodesic acceleration a is added to the velocity v if
    `|a| <= 0.75 |v|` (Transtrum & Sethna 2012, eq. 9 and 15).
    """

    loss: Loss
    rows: Rows
    weights: Array
    pull: Pull | None = None
    damping: float = 1e-3
    momentum: float = 0.5
    max_tries: int = 6
    rate: float = 1.0
    ridge: Any = 0.0
    rounding: float = 2.0**-52

    def __post_init__(self) -> None:
        self.weights = np.array(self.weights, float)
        self.previous = np.zeros_like(self.weights)
        self.tries: list[int] = []
        self.dampings: list[float] = []
        self.accepted: list[bool] = []
        self.bent: list[bool] = []  # of each try

    def step(self) -> None:
        rows, residuals = self.rows(self.weights)
        ridge = self.ridge * np.ones_like(self.weights)
        matrix = rows.T @ rows + np.diag(ridge)
        gradient = rows.T @ residuals + ridge * self.weights
        before, growth = self.loss(self.weights), 4.0
        scale = np.trace(matrix) / len(matrix)
        taken = np.zeros_like(self.weights)
        for index in range(self.max_tries):
            start = self.momentum * self.previous * (index == 0)
            used = self.damping
            shift = used * scale
            # Minimum of the model plus shift/2 |d - start|^2.
            change = np.linalg.solve(
                matrix + shift * np.eye(len(matrix)), shift * start - gradient
            )
            long = self.rate * change
            predicted = -(gradient @ long + long @ matrix @ long / 2)
            if self.pull is not None:
                acceleration = -np.linalg.solve(
                    matrix + shift * np.eye(len(matrix)),
                    self.pull(self.weights, change),
                )
                lengths = np.linalg.norm([acceleration, change], axis=1)
                self.bent.append(bool(lengths[0] <= 0.75 * lengths[1]))
                if self.bent[-1]:
                    change = change + self.rate * acceleration / 2
                    long = self.rate * change
            actual = before - self.loss(self.weights + long)
            if actual > 0 and predicted > 0:
                ratio = min(actual / predicted, 1)
                self.damping *= max(1 / 3, 1 - (2 * ratio - 1) ** 3)
                taken = change
                break
            if 0 <= predicted <= 8 * self.rounding * abs(before):
                break
            self.damping *= growth
            growth *= 2
        self.damping = float(np.clip(self.damping, 1e-14, 1e6))
        self.dampings.append(used)
        self.tries.append(index + 1)
        self.accepted.append(bool(np.any(taken)))
        self.weights = self.weights + self.rate * taken
        self.previous = taken


def set_flat(model: Any, weights: Array) -> None:
    values = split(model, weights)
    for v, value in zip(model.trainable_variables, values, strict=True):
        v.assign(value)


def get_flat(model: Any) -> Array:
    return flat(weights_of(model))


def loss_of(model: Any, x: Any, y: Any, **kwargs: Any) -> Loss:
    """Return the compiled loss of a model as a function of flat weights."""

    def loss(weights: Array) -> float:
        set_flat(model, weights)
        predictions = model(x, training=True)
        return float(model.compute_loss(x=x, y=y, y_pred=predictions, **kwargs))

    return loss


def outputs_and_jacobians(
    model: Any,
    x: Any,
    weights: Array,
    read: Callable[[Any], Any] = tf.nest.flatten,
) -> list[tuple[Array, Array]]:
    """Return the value and Jacobian of each output, or of what is read."""
    set_flat(model, weights)
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape(persistent=True) as tape:
        outputs = read(model(x, training=True))
    found = []
    for output in outputs:
        parts = tape.jacobian(
            output,
            variables,
            unconnected_gradients="zero",
            experimental_use_pfor=False,
        )
        rank = output.shape.rank
        blocks = [
            np.reshape(
                tf.convert_to_tensor(p),
                [*output.shape, int(np.prod(p.shape[rank:]))],
            )
            for p in parts
        ]
        found.append((np.array(output, float), np.concatenate(blocks, -1)))
    return found


def second(
    function: Callable[[Array], Array], point: Array, direction: Array
) -> Array:
    """Return the second derivative by central differences of step 0.1."""
    there, back = (function(point + s * direction) for s in (0.1, -0.1))
    return (there - 2 * function(point) + back) / 0.01
