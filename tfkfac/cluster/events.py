"""Events of a job, which all workers receive in the same order.

The events are in the key-value store of TensorFlow's coordination service,
under the keys 0, 1, 2, ... Two threads of each process send and receive them at
any time, not only in a training step.
"""

import atexit
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
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
_TICK_S = 0.5  # maximum interval between two calls of `Listener.on_tick`
_EXIT_TIMEOUT_S = 2.0  # limit of each wait at the exit of the process


class Listener:
    """Handler of events, called by the receiving thread."""

    def on_event(self, sender: int, event: Event) -> None:
        """Handle an event of worker `sender`."""

    def on_tick(self) -> None:
        """Run periodic work."""


class EventLog:
    """Send events to all workers, this worker included, and receive them.

    With `size` 1 there is no store: the events stay in the process.
    """

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._num_received = 0
        self._next_tick = 0.0  # monotonic time
        self._absent: set[int] = set()  # workers that have exited or are lost
        self._listeners: tuple[Listener, ...] = ()
        self._is_exiting = threading.Event()
        self._process = os.getpid()
        self._receiver = threading.Thread(
            target=self._receive, name="tfkfac receiver", daemon=True
        )

    def start(self, *listeners: Listener) -> None:
        """Start the threads, which run until the process ends."""
        self._listeners = listeners
        self._receiver.start()
        if self.size > 1:
            threading.Thread(
                target=self._send, name="tfkfac sender", daemon=True
            ).start()
            atexit.register(self._exit)

    def post(self, event: Event) -> None:
        """Send an event to all workers, without waiting for it."""
        self._outbox.put(event)

    def tick_after(self, seconds: float) -> None:
        """Call `Listener.on_tick` after some seconds, from `on_event`."""
        self._next_tick = min(self._next_tick, time.monotonic() + seconds)

    def _send(self) -> None:
        """Store the posted events, each under the next free key.

        This thread waits in `set_text` while worker 0 is suspended.
        """
        number = 0
        while True:
            event = self._outbox.get()
            text = json.dumps([self.index, event])
            number = max(number, self._num_received)
            with contextlib.suppress(tf.errors.OpError):  # worker 0 is gone
                while not set_text(f"{_KEYS}/{number}", text):
                    number += 1
                if event == EXITED:
                    return

    def _receive(self) -> None:
        """Deliver the events until this worker exits."""
        events = self._stored() if self.size > 1 else self._local()
        for item in events:
            if item is not None:
                sender, event = item
                if event == EXITED:
                    self._absent.add(sender)
                self._absent.update(event.get(LOST, ()))
                for listener in self._listeners:
                    listener.on_event(sender, event)
                if event == EXITED and sender == self.index:
                    return
            for listener in self._listeners:
                listener.on_tick()

    def _local(self) -> Iterator[tuple[int, Event] | None]:
        """Yield the events of a job with one process; None after a tick."""
        while True:
            try:
                yield self.index, self._outbox.get(timeout=_TICK_S)
            except queue.Empty:
                yield None

    def _stored(self) -> Iterator[tuple[int, Event] | None]:
        """Yield the events of the store in order; None after a tick.

        Worker 0 posts the loss of other workers. Each other worker detects the
        loss of worker 0, after which there are no more events.
        """
        with contextlib.suppress(tf.errors.OpError):
            if self.index == 0:
                set_text(f"{_KEYS}/alive", "")
            while True:
                seconds = self._next_tick - time.monotonic()
                text = get_text(f"{_KEYS}/{self._num_received}", seconds)
                if text is not None:
                    self._num_received += 1
                    sender, event = json.loads(text)
                    if event == EXITED and sender == 0 != self.index:
                        threading.Thread(
                            target=self._acknowledge, daemon=True
                        ).start()
                    yield sender, event
                    continue
                if self.index > 0:
                    if get_text(f"{_KEYS}/alive", HEARTBEAT_TIMEOUT_S) is None:
                        break  # worker 0 is suspended, or the network is down
                elif lost := set(silent_workers()) - self._absent:
                    self._absent |= lost
                    self.post({LOST: sorted(lost)})
                self._next_tick = time.monotonic() + _TICK_S
                yield None
        if 0 not in self._absent:
            yield self.index, {LOST: [0]}
        while not self._is_exiting.wait(_TICK_S):
            yield None

    def _acknowledge(self) -> None:
        """Let worker 0 exit, as this worker has received its exit."""
        with contextlib.suppress(tf.errors.OpError):
            set_text(f"{_KEYS}/acknowledged/{self.index}", "")

    def _exit(self) -> None:
        """Announce the exit of this process, for a limited time.

        The store ends with worker 0, so worker 0 waits until the others have
        received its exit.
        """
        if os.getpid() != self._process:  # a forked child has no threads
            return
        self.post(EXITED)
        self._is_exiting.set()
        self._receiver.join(_EXIT_TIMEOUT_S)
        if self.index > 0:
            return
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        for worker in {*range(1, self.size)} - self._absent:
            with contextlib.suppress(tf.errors.OpError):
                get_text(
                    f"{_KEYS}/acknowledged/{worker}",
                    deadline - time.monotonic(),
                )
