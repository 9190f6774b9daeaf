"""K-FAC and FOSI by hand for a stack of dense layers: the floor of a step.

They are the products and passes over memory that the formulas need, in the
cheapest order that is known here, and nothing else: no check, no other layer,
no schedule. What `tfkfac` takes above them is the price of the rest.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from benchmarks.data import make_batch
from benchmarks.keras_models import build
from benchmarks.keras_training import RATE, make_loss
from benchmarks.task import Task, UnavailableError
from tfkfac.linalg.symmetric import damped_inverse

MOMENTUM = 0.9
# Those of `tfkfac.KFAC` and `tfkfac.FOSI`.
DECAY, DAMPING, KL_CLIP = 0.95, 0.01, 0.02
DIRECTIONS = 10


class BareTraining:
    """A stack of dense layers, SGD with momentum, and a batch."""

    def __init__(self, task: Task) -> None:
        keras.utils.set_random_seed(0)
        layers = build(task.model).layers
        if not all(type(layer) is keras.layers.Dense for layer in layers):
            raise UnavailableError(f"{task.model} is not written by hand")
        if task.mode != "function":
            raise UnavailableError("by hand there is --mode function only")
        self._activations = [layer.activation for layer in layers]
        # The bias is the last row of a layer's weights.
        self.weights = [
            tf.Variable(tf.concat([layer.kernel, layer.bias[None]], 0))
            for layer in layers
        ]
        self._momenta = [tf.Variable(tf.zeros_like(w)) for w in self.weights]
        self._loss = make_loss(task.model)
        self._batch = [
            tf.constant(part) for part in make_batch(task.model, task.batch)
        ]
        shapes = [weight.shape for weight in self.weights]
        self.method: BareKFAC | BareFOSI = (
            BareKFAC(shapes, task.batch)
            if task.optimizer == "bare-kfac"
            else BareFOSI(shapes)
        )
        # What is due are values of Python's, with a graph for each.
        self.step = tf.function(self._train, autograph=False)

    def run(self, end_of_step: Callable[[], bool]) -> None:
        """Trains until `end_of_step`, called after each step, says no."""
        for step in itertools.count():
            self.step(*self.method.due(step)).numpy()
            if not end_of_step():
                return

    def _train(self, *due: Any) -> tf.Tensor:
        x, y = self._batch
        inputs, outputs = [], []
        with tf.GradientTape() as tape:
            for weight, activation in zip(
                self.weights, self._activations, strict=True
            ):
                inputs.append(tf.pad(x, [[0, 0], [0, 1]], constant_values=1))
                outputs.append(tf.matmul(inputs[-1], weight))
                x = activation(outputs[-1])
            loss = tf.reduce_mean(self._loss(y, x))
        gradients = tape.gradient(loss, outputs)
        moves = self.method.moves(inputs, gradients, *due)
        for weight, momentum, move in zip(
            self.weights, self._momenta, moves, strict=True
        ):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle,
                accum=momentum.handle,
                lr=RATE,
                grad=move,
                momentum=MOMENTUM,
            )
        self.method.finish(self.weights)
        return loss

    def set_intervals(self, factor: int, inverse: int) -> None:
        """Sets those of K-FAC, and makes each of its steps once, not timed."""
        self.method.intervals = (factor, inverse)
        steps = range(1, 1 + math.lcm(factor, inverse))
        for due in {self.method.due(step) for step in steps}:
            self.step(*due)

    def facts(self) -> dict[str, Any]:
        """Nothing: the state is that of any K-FAC or FOSI."""
        return {}


class BareKFAC:
    """K-FAC with whole factors, its layers decomposed one after the other.

    Args:
        shapes: Those of the weights, the bias included.
        batch: Rows of a batch.
    """

    def __init__(self, shapes: Sequence[tf.TensorShape], batch: int) -> None:
        self.intervals = (10, 100)
        self._batch = batch
        self._weight = tf.Variable(0.0)
        self._factors = [square_matrices(shape) for shape in shapes]
        self._inverses = [square_matrices(shape) for shape in shapes]

    def due(self, step: int) -> tuple[bool, tuple[int, ...]]:
        """Whether the factors are, and which layers' decompositions."""
        factor, inverse = self.intervals
        count = len(self._factors)
        layers = tuple(
            layer
            for layer in range(count)
            if step == 0 or step % inverse == layer * inverse // count
        )
        return step % factor == 0, layers

    def moves(
        self,
        inputs: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        factors_are_due: bool,
        layers: Sequence[int],
    ) -> list[tf.Tensor]:
        """The preconditioned gradients, clipped."""
        rows = list(zip(inputs, gradients, strict=True))
        if factors_are_due:
            self._weight.assign(DECAY * self._weight + 1 - DECAY)
            for (a, g), (left, right) in zip(rows, self._factors, strict=True):
                self._average(left, a, 1 / self._batch)
                # The gradients are those of the mean over the batch.
                self._average(right, g, self._batch)
        for layer in layers:
            self._decompose(layer)
        made = [
            self._precondition(*pair, *inverses)
            for pair, inverses in zip(rows, self._inverses, strict=True)
        ]
        length = RATE**2 * tf.add_n([product for _, product in made])
        scale = tf.minimum(1.0, tf.sqrt(KL_CLIP / length))
        return [move(scale) for move, _ in made]

    def _average(
        self, factor: tf.Variable, rows: tf.Tensor, scale: float
    ) -> None:
        rows = rows * ((1 - DECAY) * scale) ** 0.5
        factor.assign(DECAY * factor + tf.matmul(rows, rows, transpose_a=True))

    def _decompose(self, layer: int) -> None:
        factors = [factor / self._weight for factor in self._factors[layer]]
        left, right = (
            tf.linalg.trace(factor) / factor.shape[0] for factor in factors
        )
        ratio, root = tf.sqrt(left / right), DAMPING**0.5
        shifts = ratio * root, root / ratio
        for factor, shift, inverse in zip(
            factors, shifts, self._inverses[layer], strict=True
        ):
            inverse.assign(damped_inverse(factor, shift))

    def _precondition(
        self,
        a: tf.Tensor,
        g: tf.Tensor,
        left: tf.Variable,
        right: tf.Variable,
    ) -> tuple[Callable[[tf.Tensor], tf.Tensor], tf.Tensor]:
        """What makes a multiple of `P`, and `sum <P, W>`."""
        rows, columns = left.shape[0], right.shape[0]
        cost = self._batch * (rows**2 + columns**2)
        if rows * columns * (rows + columns) < cost:
            gradient = tf.matmul(a, g, transpose_a=True)
            move = left @ gradient @ right
            return lambda scale: scale * move, tf.reduce_sum(move * gradient)
        p, q = a @ left, g @ right
        product = tf.matmul(a, p, transpose_b=True)
        product *= tf.matmul(g, q, transpose_b=True)
        return (
            lambda scale: tf.matmul(p, scale * q, transpose_a=True),
            tf.reduce_sum(product),
        )

    def finish(self, weights: Sequence[tf.Variable]) -> None:
        """Nothing is left to do."""


class BareFOSI:
    """Steps of fixed lengths along fixed directions, beside SGD's.

    SGD's own are linear in the gradients, and what they hold of the directions
    is known beforehand.

    Args:
        shapes: Those of the weights, the bias included.
    """

    def __init__(self, shapes: Sequence[tf.TensorShape]) -> None:
        self.intervals = (1, 1)
        # By layer, so that nothing has to be joined or taken apart.
        self.directions = [
            tf.Variable(tf.fill([DIRECTIONS, shape.num_elements()], 1e-3))
            for shape in shapes
        ]

    def due(self, step: int) -> tuple[Any, ...]:
        """Nothing."""
        return ()

    def moves(
        self, inputs: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The gradients; notes what they hold of the directions."""
        moves = [
            tf.matmul(a, g, transpose_a=True)
            for a, g in zip(inputs, gradients, strict=True)
        ]
        self._inside = tf.add_n(
            [
                tf.linalg.matvec(own, tf.reshape(move, [-1]))
                for own, move in zip(self.directions, moves, strict=True)
            ]
        )
        return moves

    def finish(self, weights: Sequence[tf.Variable]) -> None:
        """Takes the steps along the directions."""
        steps = RATE * self._inside
        for weight, own in zip(weights, self.directions, strict=True):
            move = tf.linalg.matvec(own, steps, transpose_a=True)
            weight.assign_sub(tf.reshape(move, weight.shape))


def square_matrices(shape: tf.TensorShape) -> list[tf.Variable]:
    """A matrix of zeros for the rows of another one, one for its columns."""
    return [tf.Variable(tf.zeros([size, size])) for size in shape]
