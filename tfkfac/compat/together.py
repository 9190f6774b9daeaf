"""Equal things that are done for many layers, some of them in each call."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tfkfac.compat.calls import (
    call_of_any_size,
    kinds_of,
    placed_call,
    shared_call,
)

T = TypeVar("T")

# What the operations of a function cost, in calls of it.
_BODY = 6


@dataclasses.dataclass(frozen=True)
class Call(Generic[T]):
    """A call that is still to be made, alone or together with others.

    Attributes:
        signature: What distinguishes the function, as for `shared_call`.
        function: The function, as there.
        args: Nests of tensors and variables.
        any_size: Whether it is a `call_of_any_size`.
        placed: Whether it is a `placed_call`.
    """

    signature: Hashable
    function: Callable[..., T]
    args: tuple[Any, ...] = ()
    any_size: bool = False
    placed: bool = False

    def now(self) -> T:
        """Makes the call."""
        return self._made(self.signature, self.function, *self.args)

    def with_others(self, others: Sequence["Call[T]"]) -> list[T]:
        """Makes this call and others of its kind as one."""
        function = self.function

        def each(*many: Sequence[Any]) -> list[T]:
            return [function(*args) for args in many]

        signature = "together", len(others), self.signature
        args = [list(call.args) for call in (self, *others)]
        return self._made(signature, each, *args)

    @property
    def kind(self) -> Hashable:
        """What calls of the same function have in common."""
        return self.signature, kinds_of(self.args, self.any_size)

    @property
    def _made(self) -> Callable[..., Any]:
        if self.placed:
            return placed_call
        return call_of_any_size if self.any_size else shared_call


def together(calls: Sequence[Call[T]]) -> list[T]:
    """Makes calls, several of a kind in one.

    A hundred equal layers are a hundred calls of one function. Each costs a
    few milliseconds in the first step and some microseconds in every other; a
    function that does the same for some layers at once is called less often.
    What is there once is done without a call, unless that is placed.

    Returns:
        What each of them returns.
    """
    if tf.executing_eagerly():
        return [call.now() for call in calls]
    kinds: dict[Hashable, list[int]] = {}
    for i, call in enumerate(calls):
        kinds.setdefault(call.kind, []).append(i)
    made: dict[int, T] = {}
    for members in kinds.values():
        size = group_size(len(members))
        for start in range(0, len(members), size):
            group = members[start : start + size]
            first, *others = (calls[i] for i in group)
            if len(members) == 1 and not first.placed:
                results = [first.function(*first.args)]
            elif others:
                results = first.with_others(others)
            else:
                results = [first.now()]
            made.update(zip(group, results, strict=True))
    return [made[i] for i in range(len(calls))]


def group_size(count: int) -> int:
    """Of how many equal calls one is made.

    The function then has the operations of so many, and what is left over is
    another one.
    """
    return min(
        range(1, math.isqrt(count) + 1),
        key=lambda size: _BODY * (size + count % size) + count // size,
    )
