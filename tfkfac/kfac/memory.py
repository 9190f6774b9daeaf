"""What is said when a layer is too large for the memory."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def memory_of(path: str) -> Iterator[None]:
    """Names a layer in the error when there is no memory for it.

    In a graph it is the operations that bear the name, which TensorFlow's
    error says. Eagerly it would be the variables, each of which then has a
    kernel of its own: half a millisecond.

    Args:
        path: Path of the layer.

    Raises:
        MemoryError: If memory was exhausted.
    """
    # A scope's name allows less than a layer's.
    scope = re.sub(r"[^A-Za-z0-9_./-]", "_", f"kfac/{path}")
    eager = tf.executing_eagerly()
    try:
        with contextlib.nullcontext() if eager else tf.name_scope(scope):
            yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise MemoryError(
            f"No memory for the factors of layer '{path}' and their "
            "decomposition. Have them approximated, with a smaller "
            "`max_factor_dim`, or leave the layer to the inner optimizer, with "
            f"skip_layers=['{path}']. {error}"
        ) from error
