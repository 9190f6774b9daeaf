"""A second way back through a call of the model: from outputs to layers.

The training step's own tape has forgotten what it recorded when the optimizer
runs. So each call of the model is recorded on a tape of ours too, which only
watches the pre-activations of the tapped layers. What flows back along it has
the same masks of dropout and moments of batch normalisations as the step, no
gradient of a weight is computed, and no state changes. In a graph it costs
nothing until somebody asks for it, which may be inside of a `tf.cond`.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ModelTap
from tfkfac.capture.trace import (
    capturing,
    current_store,
    paused,
    visible_stores,
)
from tfkfac.compat.gradients import Sum
from tfkfac.compat.strategies import summing_replicas

# Calls of a step that are kept; others, that no step takes, would pile up.
_MOST_CALLS = 4
_recording = threading.local()


class Pullback:
    """One recorded call of a model.

    Args:
        outputs: What the model returned.
        tape: The persistent tape that was on.
    """

    def __init__(self, outputs: Any, tape: tf.GradientTape) -> None:
        self._outputs = {id(t): t for t in keras.tree.flatten(outputs)}
        self._tape = tape

    def returned(self, tensor: tf.Tensor) -> bool:
        """Whether the model returned this tensor."""
        return id(tensor) in self._outputs

    def pull(
        self,
        outputs: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        sources: Sequence[tf.Tensor | None],
        total: Sum = tf.identity,
    ) -> list[tf.Tensor | None]:
        """Takes gradients at outputs back to pre-activations.

        Args:
            outputs: Tensors that the model returned.
            gradients: The gradient at each of them.
            sources: `Record.output`s of its layers, or None.
            total: Sum over the replicas, for synchronised layers.

        Returns:
            The gradient at each source, None where no output depends on it.
        """
        known = [source for source in sources if source is not None]
        with paused(), summing_replicas(total):
            found = iter(
                self._tape.gradient(
                    list(outputs), known, output_gradients=list(gradients)
                )
            )
        pulled = [None if s is None else next(found) for s in sources]
        return [None if g is None else tf.convert_to_tensor(g) for g in pulled]


class PullbackTap(ModelTap):
    """Records the calls of a model under a tape."""

    method = "call"

    @override
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not capturing():
            return below(*args, **kwargs)
        before = getattr(_recording, "tapes", ())
        with tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        ) as tape:
            _recording.tapes = (*before, tape)
            try:
                outputs = below(*args, **kwargs)
            finally:
                _recording.tapes = before
        calls = current_store(self._eager).setdefault(self._key(), [])
        calls.append(Pullback(outputs, tape))
        del calls[:-_MOST_CALLS]
        return outputs

    def take(self) -> list[Pullback]:
        """Returns this replica's calls of the current trace, the last first."""
        calls: list[Pullback] = []
        for store in visible_stores(self._eager):
            calls += store.pop(self._key(), [])[::-1]
        return calls


def watch_for_pullbacks(tensor: tf.Tensor) -> None:
    """Lets the calls that are going on be pulled back to this tensor."""
    for tape in getattr(_recording, "tapes", ()):
        tape.watch(tensor)
