"""What workers say to each other beside TensorFlow's collectives.

It needs nobody's step: a thread of each process listens, on the connections on
which the workers have met. The first worker passes on what the others say.
"""

import atexit
import os
import selectors
import threading
from collections.abc import Mapping
from typing import Protocol

from tfkfac.cluster.lines import Line, Message

# Seconds between two looks of the thread at what is not a message.
_TICK = 0.5
# What the first worker hears of a worker whose connection has ended, or is told
# by one that ends as it should.
LOST, BYE = {"lost": True}, {"bye": True}


class Listener(Protocol):
    """Somebody who uses the channel; called in its thread, or by `say`."""

    def hear(self, sender: int, message: Message) -> None:
        """Takes what a worker has said."""

    def tick(self) -> None:
        """Is called now and then."""


class Channel:
    """Messages to all workers of a job.

    Args:
        index: The number of this worker.
        size: The number of workers.
        lines: The connections of this worker, by that of the other one.
    """

    def __init__(
        self, index: int, size: int, lines: Mapping[int, Line]
    ) -> None:
        self.index = index
        self.size = size
        self._lines = dict(lines)
        self._listeners: list[Listener] = []
        # A listener may answer at once.
        self._lock = threading.RLock()
        self._left: set[int] = set()

    def start(self, *listeners: Listener) -> None:
        """Begins to listen, until the process ends."""
        self._listeners += listeners
        threading.Thread(
            target=self._run, name="tfkfac channel", daemon=True
        ).start()
        atexit.register(self.say, BYE)
        # A child has no part in it, and must not keep its parent's connections.
        os.register_at_fork(after_in_child=self._hang_up)

    def say(self, message: Message) -> None:
        """Says something to all workers, this one among them.

        All of them hear what is said in one order.
        """
        with self._lock:
            if self.index == 0:
                self._pass_on(0, message)
            elif 0 in self._lines:
                self._lines[0].send(message)

    def report(self, message: Message) -> None:
        """Says something to the first worker alone."""
        with self._lock:
            if self.index == 0:
                self._hear(0, message)
            elif 0 in self._lines:
                self._lines[0].send({"report": message})

    def _pass_on(self, sender: int, message: Message) -> None:
        """Lets all workers hear a message; the first one's part."""
        for line in self._lines.values():
            line.send({"from": sender, "message": message})
        self._hear(sender, message)

    def _hear(self, sender: int, message: Message) -> None:
        if message == BYE:
            self._left.add(sender)
        for listener in self._listeners:
            listener.hear(sender, message)

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            for worker, line in self._lines.items():
                ready.register(line, selectors.EVENT_READ, worker)
            while True:
                found = ready.select(_TICK)
                with self._lock:
                    for key, _ in found:
                        self._take(key.data)
                    closed = [w for w, x in self._lines.items() if x.closed]
                    for worker in closed:
                        ready.unregister(self._lines[worker])
                        self._lose(worker)
                    for listener in self._listeners:
                        listener.tick()

    def _take(self, worker: int) -> None:
        """Takes what has come from a worker."""
        for message in self._lines[worker].receive_all():
            if self.index > 0:
                self._hear(message["from"], message["message"])
            elif "report" in message:
                self._hear(worker, message["report"])
            else:
                self._pass_on(worker, message)

    def _lose(self, worker: int) -> None:
        """Takes leave of a worker whose connection has ended."""
        self._lines.pop(worker).close()
        if worker in self._left:
            return
        if self.index == 0:
            self._pass_on(worker, LOST)
        else:
            self._hear(worker, LOST)

    def _hang_up(self) -> None:
        """In a child, where nobody will release what a thread has held."""
        self._lock = threading.RLock()
        for line in self._lines.values():
            line.close()
        self._lines.clear()
