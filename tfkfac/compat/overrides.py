"""Overrides of attributes of one object, and what we keep on an object.

This relies on Python alone: a function in the dictionary of an object (a
layer, a model, an optimizer, a module) goes before the method of its class.
`object.__setattr__` puts it there, since Keras' own `__setattr__` tracks what
it is given. Saving, cloning and configs do not see it. A method that Python
looks up on the class, as it does with `__call__`, is overridden there, if the
class itself defines it; what overrides it then gets the object as well.

Several may override the same attribute. What is in the object's dictionary is
one function for all of them, which looks up at each call who has a say. They
can go in any order, and the last one leaves the object as it was.
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

# Called with what it overrides, then with the arguments of the call.
Wrapper = Callable[..., Any]

_STACK = "_tfkfac_overrides"
_MOMENTS = "_moments"
_MOMENTS_TAP = "_tfkfac_moments_tap"
_NOTHING = object()
# Replicas are threads that take turns in the middle of a call, and a user may
# train two models that share a layer in two threads.
_lock = threading.RLock()


@dataclasses.dataclass(eq=False)
class Override:
    """One function in the place of an attribute, for a thread or for all."""

    stack: "_Stack"
    wrapper: Wrapper
    thread: int | None

    def remove(self) -> None:
        """Takes it away, and leaves all others; a second time does nothing."""
        self.stack.remove(self)


class _Stack:
    """The overrides of one attribute of one object, the last one on top."""

    def __init__(self, instance: Any, name: str) -> None:
        self._instance = instance
        self._name = name
        self._before = vars(instance).get(name, _NOTHING)
        self._original = getattr(instance, name)
        self._overrides: tuple[Override, ...] = ()
        self._function = self._dispatcher()
        _set(instance, name, self._function)

    @classmethod
    def add(
        cls, instance: Any, name: str, wrapper: Wrapper, thread: int | None
    ) -> Override:
        """Puts a function on top of those of an attribute."""
        with _lock:
            function = vars(instance).get(name)
            stack = getattr(function, _STACK, None)
            # Somebody else's function may have a copy of the mark.
            if not isinstance(stack, cls) or stack._function is not function:
                stack = cls(instance, name)
            override = Override(stack, wrapper, thread)
            stack._overrides = (*stack._overrides, override)
            return override

    def remove(self, override: Override) -> None:
        """Takes a function away, wherever it is."""
        with _lock:
            had = self._overrides
            self._overrides = tuple(one for one in had if one is not override)
            # Somebody who has put a function over this one may still call it,
            # which then is nothing but the original.
            is_on_top = vars(self._instance).get(self._name) is self._function
            if self._overrides or not had or not is_on_top:
                return
            if self._before is _NOTHING:
                object.__delattr__(self._instance, self._name)
            else:
                _set(self._instance, self._name, self._before)

    def _dispatcher(self) -> Callable[..., Any]:
        original = self._original
        # An activation may be a layer, whose attributes are none of ours.
        updated = ("__dict__",) if inspect.isroutine(original) else ()

        @functools.wraps(original, updated=updated)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            function = original
            for override in self._overrides:
                if override.thread in (None, thread):
                    function = functools.partial(override.wrapper, function)
            return function(*args, **kwargs)

        setattr(dispatch, _STACK, self)
        return dispatch


def _set(instance: Any, name: str, value: Any) -> None:
    """Sets an attribute of an object, or of a class, behind its back."""
    owner = type if isinstance(instance, type) else object
    owner.__setattr__(instance, name, value)


def override(instance: Any, name: str, wrapper: Wrapper) -> Override:
    """Overrides an attribute of one object until it is removed.

    The attribute can be called. The wrapper is called as `wrapper(below,
    *args, **kwargs)`, where `below` is what it overrides.
    """
    return _Stack.add(instance, name, wrapper, None)


@contextlib.contextmanager
def overridden(instance: Any, name: str, wrapper: Wrapper) -> Iterator[None]:
    """Does as `override` inside of a `with` block, for this thread only.

    Threads may enter and leave in any order.
    """
    temporary = _Stack.add(instance, name, wrapper, threading.get_ident())
    try:
        yield
    finally:
        temporary.remove()


# ---------------------------------------------------- what is kept on objects
def keep_on(instance: Any, name: str, make: Callable[[], Any]) -> Any:
    """Keeps something of ours on an object, as long as that lives.

    It is made if there is none yet. Not in a table beside it: what is kept
    refers to the object, which would then never be freed.
    """
    with _lock:
        value = kept_on(instance, name)
        if value is None:
            value = make()
            object.__setattr__(instance, name, value)
        return value


def kept_on(instance: Any, name: str) -> Any:
    """Returns what `keep_on` has put on an object, or None."""
    return vars(instance).get(name)


def drop_from(instance: Any, name: str) -> Any:
    """Takes away and returns what `keep_on` has put on an object, or None."""
    return vars(instance).pop(name, None)


# ------------------------------------------- moments of a batch normalisation
def override_moments(
    layer: keras.layers.BatchNormalization, wrapper: Wrapper
) -> Override:
    """Overrides how a layer computes the mean and variance of its batch.

    This relies on `BatchNormalization.call` calling `self._moments(inputs,
    mask)` in training, once, and on nothing else doing so.
    """
    return override(layer, _MOMENTS, wrapper)


@contextlib.contextmanager
def given_moments(
    layer: keras.layers.Layer, moments: Sequence[tf.Tensor] | None
) -> Iterator[None]:
    """Makes a batch normalisation use moments instead of computing them.

    It relies on what `override_moments` does.
    """
    if moments is None:
        yield
        return
    with overridden(layer, _MOMENTS, lambda *_: moments):
        yield


def replace_moments(
    layer: keras.layers.BatchNormalization, wrapper: Wrapper
) -> None:
    """Does as `override_moments`, in the place of the one before."""
    release_moments(layer)
    keep_on(layer, _MOMENTS_TAP, lambda: override_moments(layer, wrapper))


def release_moments(layer: keras.layers.Layer) -> None:
    """Undoes `replace_moments`."""
    replaced = drop_from(layer, _MOMENTS_TAP)
    if replaced is not None:
        replaced.remove()
