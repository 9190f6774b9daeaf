"""What a step costs, and the space that it is solved in."""

from typing import NamedTuple

import tensorflow as tf

from tfkfac.gauss_newton.jacobian import block_examples
from tfkfac.wrapper.refusals import refuse
from tfkfac.wrapper.tables import bytes_text, unit_of

PARAMETERS, RESIDUALS, AUTO = "parameters", "residuals", "auto"
SPACES = (AUTO, PARAMETERS, RESIDUALS)
# Most bytes of a step where the user says nothing.
MOST_BYTES = 2**31
# Matrices of the smaller size: the sum, its damped copy, the factor.
_MATRICES = 3
# Copies of a row: its parts, and joined; all rows at once are scaled, too.
_COPIES = {PARAMETERS: 2, RESIDUALS: 3}
# Where a text has the bytes that only a run knows.
_NEED = "{}"


class Limits(NamedTuple):
    """Sizes of a step.

    Attributes:
        weights: Number of weights, n.
        dtype: Dtype of the matrices.
        most: Most bytes.
        outputs: Number of outputs of an example.
        activations: Numbers that the model makes of an example, once for each
            output.
    """

    weights: int
    dtype: tf.DType
    most: int
    outputs: int = 1
    activations: int = 0

    def bytes(self, space: str, residuals: int) -> int:
        """Bytes of a step at work, the model's passes for its rows included.

        Args:
            space: "parameters" or "residuals".
            residuals: Number of residuals, m.
        """
        n, m = self.weights, residuals
        size, rows = (n, min(m, self.block)) if space == PARAMETERS else (m, m)
        numbers = _MATRICES * size * size + rows * self._row(space)
        return int(numbers * self.dtype.size)

    @property
    def block(self) -> int:
        """Rows that are made at once in the space of parameters."""
        examples = block_examples(self.weights, self.outputs, self.activations)
        return examples * self.outputs

    def space(self, solve: str, residuals: int) -> str:
        """The space for a number of residuals: the smaller that is allowed."""
        if solve != AUTO:
            return solve
        few = residuals < self.weights
        first, second = (RESIDUALS, PARAMETERS)[:: 1 if few else -1]
        if self.allows(second, residuals) and not self.allows(first, residuals):
            return second
        return first

    def allows(self, space: str, residuals: int) -> bool:
        """Whether a step has the bytes that it needs."""
        return self.bytes(space, residuals) <= self.most

    def most_residuals(self) -> int:
        """The largest number that can be solved for in their own space."""
        low, high = 0, self.most
        while low < high:
            middle = (low + high + 1) // 2
            if self.allows(RESIDUALS, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def check(self, space: str, residuals: int) -> None:
        """Refuses a step that is too large.

        Raises:
            ValueError: If it is.
        """
        if not self.allows(space, residuals):
            need = bytes_text(self.bytes(space, residuals))
            raise ValueError(self._refusal(space, need))

    def check_residuals(self, residuals: tf.Tensor) -> tf.Operation:
        """Refuses a number of residuals in their own space when it is known.

        Args:
            residuals: The number, an int64 scalar.

        Returns:
            What to wait for before anything is made of them.
        """
        m = tf.cast(residuals, tf.int64)
        numbers = _MATRICES * m * m + m * self._row(RESIDUALS)
        size, unit = unit_of(self.most)
        need = tf.cast(self.dtype.size * numbers, tf.float64) / size
        before, after = self._refusal(RESIDUALS, _NEED).split(_NEED)
        text = [before, tf.strings.as_string(need, 2), f" {unit}", after]
        return refuse(m > self.most_residuals(), tf.strings.join(text))

    def _row(self, space: str) -> int:
        """Numbers of a row while it is made."""
        return _COPIES[space] * self.weights + self.activations

    def _refusal(self, space: str, need: str) -> str:
        """Why a step is too large, and what to do."""
        smaller = (
            "`batch_size` (a step on fewer residuals than weights is solved "
            "for these)"
            if space == PARAMETERS
            else "`batch_size`"
        )
        return (
            f"A step of `GaussNewton` in the space of {space} takes {need} "
            f"for {self.weights:,} weights, more than `max_bytes`, "
            f"{bytes_text(self.most)}. Use a smaller {smaller} or model, "
            'another `max_bytes`, or `tfkfac.KFAC(step="quadratic")`, which '
            "makes no matrix of all weights."
        )


def choose_spaces(
    limits: Limits, solve: str, residuals: int | None, only: str | None
) -> tuple[str, ...]:
    """The space of a step, or both if its batch decides when it runs.

    Args:
        limits: Sizes.
        solve: What the user wants.
        residuals: Number of residuals, None if it is not known before.
        only: Why only that of the parameters will do; None if both do.

    Raises:
        ValueError: If none will do.
    """
    if only is not None:
        if solve == RESIDUALS:
            raise ValueError(
                f'Argument `solve` must be "auto" or "parameters" {only}. '
                f"Received: solve={solve!r}"
            )
        solve = PARAMETERS
    if solve == AUTO and residuals is None:
        if limits.allows(PARAMETERS, limits.block):
            return RESIDUALS, PARAMETERS
        return (RESIDUALS,)  # the number is checked when it is known
    space = limits.space(solve, residuals or 0)
    if residuals is not None or space == PARAMETERS:
        limits.check(space, limits.block if residuals is None else residuals)
    return (space,)
