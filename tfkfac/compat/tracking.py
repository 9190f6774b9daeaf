"""Objects whose variables checkpoints follow."""

from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:

    class Tracked:
        """`tf.Module` to a type checker, which takes TensorFlow for `Any`.

        A class below something that is `Any` may have any attribute, so that
        none of its own would be checked.
        """

        def __init__(self, name: str | None = None) -> None: ...

else:
    # This relies on `tf.train.Checkpoint` following the attributes of an
    # optimizer and of a `tf.Module`, and lists and tuples of them, to the
    # variables in them; dictionaries it leaves out.
    Tracked = tf.Module
