"""Two more baselines of `time_to_target.py`, as optimizers of Keras.

    python tools/studies/time_to_target.py --problem mlp --search-size small \
        --optimizer tools/studies/other_optimizers.py:soap

`reshaped_muon` is Keras' Muon that also orthogonalises the kernels of
convolutions, as matrices of shape `(inputs, outputs)`. `soap` is the
algorithm of Vyas et al. (2024), "SOAP: Improving and Stabilizing Shampoo using
Adam", with the constants of its authors: Adam in the eigenbases of Shampoo's
matrices, which are updated in every tenth step. Kernels are matrices, too.
"""

from typing import Any

import keras
import tensorflow as tf

# Decay of the averages of gradients, their squares and Shampoo's matrices.
_BETA = 0.95
_UPDATE_INTERVAL = 10  # steps between updates of the eigenbases
_EPSILON = 1e-8
# Sides of more elements are not rotated.
_MAX_SIDE = 10_000


def reshaped_muon(learning_rate: Any, weight_decay: float | None) -> Any:
    """Return Keras' Muon for matrices and kernels of convolutions."""
    return ReshapedMuon(learning_rate, weight_decay=weight_decay)


def soap(learning_rate: Any, weight_decay: float | None) -> Any:
    """Return SOAP."""
    return Soap(learning_rate, weight_decay=weight_decay)


class ReshapedMuon(keras.optimizers.Muon):
    """Muon that treats a kernel `(..., inputs, outputs)` as a matrix."""

    def _should_use_adamw(self, variable: Any) -> bool:
        """Use Muon for matrices and kernels of two or three dimensions."""
        if len(variable.shape) in (4, 5):
            return False
        return bool(super()._should_use_adamw(variable))

    def zeropower_via_newtonschulz5(self, x: Any, steps: int) -> Any:
        """Orthogonalise a matrix or kernel; normalise its length."""
        matrix = tf.reshape(x, [-1, x.shape[-1]])
        result = super().zeropower_via_newtonschulz5(matrix, steps)
        # `lr_adjust` multiplies by the root of one of the first two axes.
        rows, columns = matrix.shape
        ratio = max(rows, columns) / max(x.shape[0], x.shape[1])
        return tf.reshape(result, x.shape) * ratio**0.5


class Soap(keras.optimizers.Optimizer):
    """Adam in the eigenbases of Shampoo's matrices."""

    def build(self, var_list: list[Any]) -> None:
        """Create averages, and matrices of each side of a matrix."""
        if self.built:
            return
        super().build(var_list)
        self._states = [
            _State(self, keras.ops.convert_to_tensor(variable), variable.name)
            for variable in var_list
        ]

    def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
        """Update a variable; the first step only begins the averages."""
        state = self._states[self._get_variable_index(variable)]
        step = tf.cast(self.iterations, tf.float32)  # 0 in the first step
        matrix = tf.reshape(gradient, state.square.shape)
        update = state.step(matrix, step)
        rate = tf.cast(rate, tf.float32) * tf.cast(step > 0, tf.float32)
        variable.assign_sub(rate * tf.reshape(update, variable.shape))


class _State:
    """State of a variable, as a matrix."""

    def __init__(self, optimizer: Soap, value: tf.Tensor, name: str) -> None:
        columns = value.shape[-1] if len(value.shape) else 1
        shape = [value.shape.num_elements() // columns, columns]

        def slot(shape: list[int], eye: bool = False) -> Any:
            initial: Any = "identity" if eye else "zeros"
            return optimizer.add_variable(shape, initial, name=f"{name}_soap")

        self.mean, self.square = slot(shape), slot(shape)
        sides = [1, 0] if len(value.shape) > 1 else []
        # For each side: position of a transposition, average, eigenbasis.
        self._sides = [
            (axis, slot([shape[axis]] * 2), slot([shape[axis]] * 2, eye=True))
            for axis in sides
            if shape[axis] <= _MAX_SIDE
        ]

    def step(self, gradient: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Return the direction, and update the averages."""
        is_first = step < 1
        self.mean.assign(
            tf.where(is_first, self.mean, self._mix(self.mean, gradient))
        )
        rotated = self._rotate(gradient)
        self.square.assign(
            tf.where(
                is_first,
                self.square,
                self._mix(self.square, tf.square(rotated)),
            )
        )
        correction = 1 - tf.pow(_BETA, tf.maximum(step, 1))
        direction = self._rotate(self.mean) * tf.sqrt(correction) / correction
        direction /= tf.sqrt(self.square) + _EPSILON
        direction = self._rotate(direction, back=True)
        for axis, average, _ in self._sides:
            outer = tf.matmul(
                gradient, gradient, transpose_a=axis == 1, transpose_b=axis == 0
            )
            average.assign(self._mix(average, outer))
        due = tf.equal(tf.cast(step, tf.int32) % _UPDATE_INTERVAL, 0)
        tf.cond(due, lambda: self._update_bases(is_first), tf.no_op)
        return direction

    @staticmethod
    def _mix(average: Any, value: tf.Tensor) -> tf.Tensor:
        """Return the new value of an average."""
        return _BETA * average + (1 - _BETA) * value

    def _rotate(self, matrix: tf.Tensor, back: bool = False) -> tf.Tensor:
        """Change to the eigenbases, or back (`back`)."""
        for axis, _, basis in self._sides:
            if axis == 1:
                matrix = tf.matmul(matrix, basis, transpose_b=back)
            else:
                matrix = tf.matmul(basis, matrix, transpose_a=not back)
        return matrix

    def _update_bases(self, is_first: tf.Tensor) -> tf.Operation:
        """Take a step of orthogonal iteration, the first time `eigh`."""
        for axis, average, basis in self._sides:
            old = tf.convert_to_tensor(basis)
            product = tf.matmul(average, old)
            values = tf.reduce_sum(old * product, 0)
            order = tf.argsort(values, direction="DESCENDING", stable=True)
            self.square.assign(tf.gather(self.square, order, axis=axis))

            def first(average: Any = average) -> tf.Tensor:
                return tf.reverse(tf.linalg.eigh(average)[1], [1])

            def later(product: Any = product, order: Any = order) -> tf.Tensor:
                return tf.linalg.qr(tf.gather(product, order, axis=1))[0]

            basis.assign(tf.cond(is_first, first, later))
        return tf.no_op()
