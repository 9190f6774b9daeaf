"""Preconditioned gradients that cannot be right: the plain ones instead.

A decomposition that is not finite, or far too large, would turn the weights
into NaN in one step. It is found where it is used, by what it has made.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfkfac.blocks import LayerGradient
from tfkfac.kfac.counters import Counters
from tfkfac.linalg.tensors import stack_scalars
from tfkfac.training.guards import count_each

# How much longer than the longest possible one a gradient may be: the damping
# may have grown since the decomposition was made.
_SLACK = 1e6


def sound_ones(
    made: Sequence[LayerGradient],
    plain: Sequence[LayerGradient],
    damping: tf.Tensor,
) -> tuple[list[LayerGradient], list[tf.Tensor]]:
    """Puts plain gradients in the place of what is made of them and is wrong.

    No eigenvalue of a damped Fisher matrix is less than the damping (its
    square, where both factors get all of it), so its inverse makes no gradient
    longer than by the inverse of that.

    Args:
        made: The preconditioned gradients.
        plain: The gradients, in the same forms.
        damping: The damping.

    Returns:
        The gradients, and for each whether it is the preconditioned one.
    """
    if not made:
        return [], []
    sizes, plain_sizes = (
        stack_scalars([gradient.bound() for gradient in gradients])
        for gradients in (made, plain)
    )
    least = tf.minimum(damping, 1.0) ** 4  # of squared lengths
    sound = tf.math.is_finite(sizes) & (
        sizes * least <= _SLACK**2 * plain_sizes
    )
    flags = tf.unstack(sound)
    kept = [
        new.where(flag, old)
        for new, flag, old in zip(made, flags, plain, strict=True)
    ]
    return kept, flags


def renew_unsound(counters: Counters, sound: dict[int, tf.Tensor]) -> None:
    """Counts plain gradients, and has their blocks decomposed anew at once.

    Args:
        counters: What has happened to all blocks.
        sound: Whether what was made of a block's gradient is, by position.
    """
    unsound = tf.logical_not(counters.by_position(sound, otherwise=True))
    count_each(
        unsound,
        counters.plain,
        counters.paths,
        "the preconditioned gradient is not finite or far too long, the plain "
        "one takes its place; the next step decomposes the factors anew.",
    )
    counters.ask(unsound)
