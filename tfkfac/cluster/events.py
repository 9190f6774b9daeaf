"""Events of a job, which all workers receive in the same order.

The events are in the key-value store of TensorFlow's coordination service,
under the keys 0, 1, 2, ... Threads of each process send and receive them at any
time, not only in a training step.
"""

import atexit
import contextlib
import json
import os
import queue
import threading
import time
from typing import Any

import tensorflow as tf

from tfkfac.compat.coordination import (
    HEARTBEAT_TIMEOUT_S,
    get_text,
    set_text,
    silent_workers,
)

Event = dict[str, Any]

EXITED: Event = {"exited": True}  # the process of the sender exits normally
LOST = "lost"  # key of an event: the indices of workers that do not answer
_KEYS = "tfkfac events"
_ALIVE = f"{_KEYS}/alive"  # key that worker 0 sets
_START_LIMIT_S = 2 * HEARTBEAT_TIMEOUT_S  # until worker 0 has set `_ALIVE`
_TICK_S = 0.5  # maximum interval between two calls of `Listener.on_tick`
_RECEIVE_S = 3600.0  # limit of a wait for an event
_EXIT_TIMEOUT_S = 2.0  # limit of each wait at the exit of the process


class Listener:
    """Handler of events, called by the receiving thread."""

    def on_event(self, sender: int, event: Event) -> None:
        """Handle an event of worker `sender`."""

    def on_tick(self) -> None:
        """Run periodic work."""


class EventLog:
    """Send events to all workers, this worker included, and receive them."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self._outbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._num_received = 0
        self._absent: set[int] = set()  # workers that have exited or are lost
        self._listeners: tuple[Listener, ...] = ()
        self._next_tick = time.monotonic()
        self._limit_s = _START_LIMIT_S  # time limit for worker 0 to answer
        self._has_exited = threading.Event()
        self._process = os.getpid()

    def start(self, *listeners: Listener) -> None:
        """Start the threads, which run until the process ends."""
        self._listeners = listeners
        if self.index == 0:
            set_text(_ALIVE, "")
        atexit.register(self._exit)
        for method in (self._dispatch, self._send, self._receive):
            name = f"tfkfac {method.__name__}"
            threading.Thread(target=method, name=name, daemon=True).start()

    def post(self, event: Event) -> None:
        """Send an event to all workers, without waiting for it."""
        self._outbox.put(event)

    def tick_after(self, seconds: float) -> None:
        """Call `Listener.on_tick` after some seconds, from `on_event`."""
        self._next_tick = min(self._next_tick, time.monotonic() + seconds)

    def _send(self) -> None:
        """Store the posted events, each under the next free key."""
        number = 0
        with contextlib.suppress(tf.errors.OpError):  # worker 0 is gone
            while True:
                text = json.dumps([self.index, self._outbox.get()])
                number = max(number, self._num_received)
                while not set_text(f"{_KEYS}/{number}", text):
                    number += 1

    def _receive(self) -> None:
        """Wait for the events of the store in their order."""
        with contextlib.suppress(tf.errors.OpError):  # worker 0 is gone
            while not self._has_exited.is_set():
                # Use a long timeout: TensorFlow 2.21 leaks 20 KB per timeout.
                text = get_text(f"{_KEYS}/{self._num_received}", _RECEIVE_S)
                if text is not None:
                    self._num_received += 1
                    sender, event = json.loads(text)
                    self._inbox.put((sender, event))
                    if event == EXITED and sender == self.index:
                        self._has_exited.set()
                    elif event == EXITED and sender == 0:
                        # Worker 0, which has the store, can exit now.
                        set_text(f"{_KEYS}/confirmed/{self.index}", "")

    def _dispatch(self) -> None:
        """Call the listeners, and look for lost workers."""
        while True:
            try:
                seconds = max(self._next_tick - time.monotonic(), 0.001)
                sender, event = self._inbox.get(timeout=seconds)
            except queue.Empty:
                now = time.monotonic()
                stood_still = now > self._next_tick + HEARTBEAT_TIMEOUT_S
                if lost := self._find_lost():
                    self._absent |= lost
                    if stood_still:  # the others have lost this worker
                        lost = {self.index}
                    if self.index == 0 and not stood_still:
                        self.post({LOST: sorted(lost)})
                    else:
                        self._inbox.put((self.index, {LOST: sorted(lost)}))
                self._next_tick = time.monotonic() + _TICK_S
                # Do not tick while the interpreter ends: a listener could
                # abort collectives, which would crash the interpreter.
                if not self._has_exited.is_set():
                    for listener in self._listeners:
                        listener.on_tick()
                continue
            if event == EXITED:
                self._absent.add(sender)
            for listener in self._listeners:
                listener.on_event(sender, event)

    def _find_lost(self) -> set[int]:
        """Return lost workers; only worker 0 looks for workers above 0."""
        if self._has_exited.is_set():
            return set()
        if self.index == 0:
            return set(silent_workers()) - self._absent
        if 0 in self._absent:
            return set()
        with contextlib.suppress(tf.errors.OpError):
            if get_text(_ALIVE, self._limit_s) is not None:
                self._limit_s = HEARTBEAT_TIMEOUT_S
                return set()
        return {0}

    def _exit(self) -> None:
        """Announce the exit of this process, for a limited time."""
        if os.getpid() != self._process:  # a forked child has no threads
            return
        self.post(EXITED)
        if self.index > 0 and 0 in self._absent:
            return
        self._has_exited.wait(_EXIT_TIMEOUT_S)
        if self.index > 0:
            return
        # The store ends with worker 0: wait until the others confirm.
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        for worker in {*range(1, self.size)} - self._absent:
            with contextlib.suppress(tf.errors.OpError):
                key = f"{_KEYS}/confirmed/{worker}"
                get_text(key, deadline - time.monotonic())
