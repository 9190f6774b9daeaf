"""A gradient split into its part in the directions V and the rest."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

# From coefficients of the gradient to those of what is added to the weights.
Moves = Callable[[tf.Tensor], tf.Tensor]
# How far squares may be from adding up, of what they add up to; and where they
# may underflow.
_ROUNDING = 1e-2
_TINY = 1e-30


class Split(NamedTuple):
    """What becomes of a gradient g.

    Attributes:
        inside: The own coefficients `c = V^T g`.
        rest: `g - V c`.
        sound: Whether V can be right, the same on all workers.
        moved: `V p`, if there are moves.
    """

    inside: tf.Tensor
    rest: tf.Tensor
    sound: tf.Tensor
    moved: tf.Tensor | None = None


def adds_up(whole: tf.Tensor, inside: tf.Tensor, rest: tf.Tensor) -> tf.Tensor:
    """Whether `|g|^2 = |c|^2 + |g - V c|^2`, as for directions that are.

    Others are not orthogonal, not of length 1 or not finite.

    Args:
        whole: `|g|^2`.
        inside: `|c|^2`.
        rest: `g - V c`.
    """
    return tf.abs(whole - inside - square(rest)) <= _ROUNDING * whole + _TINY


def square(vector: tf.Tensor) -> tf.Tensor:
    """`|x|^2`, in one pass over x."""
    return 2 * tf.nn.l2_loss(vector)


def finite_or_nothing(change: tf.Tensor) -> tf.Tensor:
    """A change of the weights; none if it is not finite."""
    finite = tf.cast(tf.math.is_finite(square(change)), change.dtype)
    return tf.math.multiply_no_nan(change, finite)


def combinations(
    directions: tf.Tensor, inside: tf.Tensor, moves: Moves | None
) -> list[tf.Tensor]:
    """`V c` of coefficients c, then `V p` for moves p.

    Args:
        directions: The own part of V^T.
        inside: The own coefficients.
        moves: See `Layout.project_out`.
    """
    weights = [inside] if moves is None else [inside, moves(inside)]
    return tf.unstack(tf.matmul(tf.stack(weights), directions))
