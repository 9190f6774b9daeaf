"""Calls of a model in the current step."""

import dataclasses
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from tfkfac.capture.model_tap import ModelTap
from tfkfac.capture.trace import capturing, current_store, visible_stores

# Calls of a step that are looked at; others, that no step takes, would pile up.
_MOST_CALLS = 32


@dataclasses.dataclass(frozen=True)
class ForwardCall:
    """How a model was called, and what came out of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


class ForwardTap(ModelTap):
    """Notes the calls of a model under a tape.

    A `train_step` may call its model on something else than the `x` that it
    passes to `compute_loss`, or pass no `x` at all.
    """

    method = "call"

    @override
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        outputs = below(*args, **kwargs)
        if capturing():
            calls = current_store(self._eager).setdefault(self._key(), [])
            calls.append(ForwardCall(args, kwargs, outputs))
            del calls[:-_MOST_CALLS]
        return outputs

    def take(self) -> list[ForwardCall]:
        """Returns this replica's calls of the current trace."""
        key = self._key()
        calls: list[ForwardCall] = []
        for store in visible_stores(self._eager):
            calls += store.pop(key, [])
        return calls
