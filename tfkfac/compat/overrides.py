"""Override an attribute of one object, and store data on an object.

This relies on Python only: a function in the `__dict__` of an object (a layer,
a model, an optimizer, a module) takes precedence over the method of its class.
It is set by `object.__setattr__`, because Keras' `__setattr__` tracks values.
Saving, cloning and configs ignore it. Python looks up special methods such as
`__call__` on the class. To override one, pass the class that defines it; the
wrapper then receives the object as well.

An attribute can have several overrides. They share one dispatcher function in
the object's `__dict__`, which selects the active overrides at each call.
Overrides can be removed in any order; the last removal restores the object.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

Below = Callable[..., Any]  # the overridden function
# Called with the overridden function, then with the arguments of the call.
Wrapper = Callable[..., Any]

_STACK = "_tfkfac_overrides"
_MOMENTS = "_moments"
_MOMENTS_TAP = "_tfkfac_moments_tap"
_MISSING = object()
# Guards all overrides: replicas are threads that can switch during a call, and
# two threads may train models that share a layer.
_lock = threading.RLock()


class _Stack:
    """Overrides of an attribute of an object; the last is called first."""

    def __init__(self, instance: Any, name: str) -> None:
        self.instance = instance
        self.name = name
        self.before = vars(instance).get(name, _MISSING)
        self.overrides: tuple[Override, ...] = ()
        original = getattr(instance, name)
        # An activation may be a layer; do not copy its `__dict__`.
        updated = ("__dict__",) if inspect.isroutine(original) else ()

        @functools.wraps(original, updated=updated)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            function = original
            for override in self.overrides:
                if override.thread in (None, thread):
                    function = functools.partial(override.wrapper, function)
            return function(*args, **kwargs)

        setattr(dispatch, _STACK, self)
        self.function = dispatch
        _set_untracked(instance, name, dispatch)


@dataclasses.dataclass(eq=False)
class Override:
    """Override of an attribute; `thread` is None for all threads."""

    stack: _Stack
    wrapper: Wrapper
    thread: int | None

    def remove(self) -> None:
        """Remove this override only; the last removal restores the attribute.

        No-op if the override is removed already.
        """
        stack = self.stack
        with _lock:
            before = stack.overrides
            stack.overrides = tuple(x for x in before if x is not self)
            # Keep a dispatcher that user code has replaced and may still call;
            # without overrides it calls the original function.
            current = vars(stack.instance).get(stack.name)
            if stack.overrides or not before or current is not stack.function:
                return
            if stack.before is _MISSING:
                object.__delattr__(stack.instance, stack.name)
            else:
                _set_untracked(stack.instance, stack.name, stack.before)


def _set_untracked(instance: Any, name: str, value: Any) -> None:
    """Set an attribute of an object or class without its `__setattr__`."""
    owner = type if isinstance(instance, type) else object
    owner.__setattr__(instance, name, value)


def override(
    instance: Any, name: str, wrapper: Wrapper, thread: int | None = None
) -> Override:
    """Override a callable attribute of one object, in one or all threads.

    The wrapper is called as `wrapper(below, *args, **kwargs)`, where `below` is
    the overridden function.
    """
    with _lock:
        function = vars(instance).get(name)
        stack = getattr(function, _STACK, None)
        # Ignore a `_STACK` that `functools.wraps` in user code has copied.
        if not isinstance(stack, _Stack) or stack.function is not function:
            stack = _Stack(instance, name)
        added = Override(stack, wrapper, thread)
        stack.overrides = (*stack.overrides, added)
        return added


@contextlib.contextmanager
def overridden(instance: Any, name: str, wrapper: Wrapper) -> Iterator[None]:
    """Override in this thread within the context; contexts may interleave."""
    temporary = override(instance, name, wrapper, threading.get_ident())
    try:
        yield
    finally:
        temporary.remove()


# ------------------------------------------------------ data on objects
def keep_on(instance: Any, name: str, make: Callable[[], Any]) -> Any:
    """Return an untracked attribute of an object, created on first use.

    A global table would leak memory, because the values refer to the object.
    """
    with _lock:
        value = kept_on(instance, name)
        if value is None:
            value = make()
            object.__setattr__(instance, name, value)
        return value


def kept_on(instance: Any, name: str) -> Any:
    """Return the value that `keep_on` set on an object, or None."""
    return vars(instance).get(name)


def drop_from(instance: Any, name: str) -> Any:
    """Remove and return the value that `keep_on` set on an object, or None."""
    return vars(instance).pop(name, None)


# --------------------------------------------- moments of batch normalisation
def override_moments(
    layer: keras.layers.BatchNormalization, wrapper: Wrapper
) -> Override:
    """Override how a layer computes the mean and variance of a batch.

    This relies on `BatchNormalization.call` calling `self._moments(inputs,
    mask)` once in training, and on no other caller.
    """
    return override(layer, _MOMENTS, wrapper)


def given_moments(
    layer: keras.layers.Layer, moments: Sequence[tf.Tensor] | None
) -> contextlib.AbstractContextManager[None]:
    """Make a batch normalisation use the given moments, unless None."""
    if moments is None:
        return contextlib.nullcontext()
    return overridden(layer, _MOMENTS, lambda *_: moments)


def replace_moments(
    layer: keras.layers.BatchNormalization, wrapper: Wrapper
) -> None:
    """Override the moments of a layer; remove an earlier replacement."""
    release_moments(layer)
    keep_on(layer, _MOMENTS_TAP, lambda: override_moments(layer, wrapper))


def release_moments(layer: keras.layers.Layer) -> None:
    """Undo `replace_moments`."""
    installed = drop_from(layer, _MOMENTS_TAP)
    if installed is not None:
        installed.remove()
