"""Messages of workers to each other, beside TensorFlow's collectives.

They need no step of the training: a thread of each process listens, on the
connections on which the workers have met. A message is a line of JSON. The
first worker passes on the messages of the others.
"""

import atexit
import json
import os
import selectors
import socket
import threading
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

# Seconds between two ticks of the listeners.
_TICK = 0.5
# The message from a worker whose connection has ended, and the last one of a
# worker that ends as it should.
LOST, BYE = {"lost": True}, {"bye": True}
_LONGEST_LINE = 2**20
_PIECE = 2**16
# Seconds of silence until the system asks the other side's system whether it
# is there, seconds between two questions, and the number of questions without
# an answer after which it is not.
_IDLE, _INTERVAL, _QUESTIONS = 5, 5, 4


class Line:
    """A connection with another process, of messages in so many seconds."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        _keep_alive(connection)
        self._socket = connection
        self._received = bytearray()
        self.closed = False

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self._socket.close()

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, if the connection is open."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> Message | None:
        """The next message; None if none comes in time or it is no message."""
        while b"\n" not in self._received and not self.closed:
            if not self._read():
                return None
        text, _, self._received = self._received.partition(b"\n")
        return _parse(text)

    def receive_all(self) -> list[Message]:
        """The messages that have come, after one read."""
        self._read()
        *texts, self._received = self._received.split(b"\n")
        return [m for text in texts if (m := _parse(text)) is not None]

    def _read(self) -> bool:
        """Reads what comes next, if something comes in time."""
        try:
            piece = self._socket.recv(_PIECE)
        except TimeoutError:
            return False
        except OSError:
            piece = b""
        self._received += piece
        if not piece or len(self._received) > _LONGEST_LINE:
            self.closed = True
        return True


def _parse(text: bytes | bytearray) -> Message | None:
    try:
        message = json.loads(text)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _keep_alive(connection: socket.socket) -> None:
    """Lets the system notice that the other machine is gone.

    A machine answers for a process that is stopped or busy.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _IDLE,
        "TCP_KEEPINTVL": _INTERVAL,
        "TCP_KEEPCNT": _QUESTIONS,
        "TCP_USER_TIMEOUT": 1000 * (_IDLE + _QUESTIONS * _INTERVAL),
    }
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Listener:
    """A user of the channel; called in its thread, or by `say`."""

    def hear(self, sender: int, message: Message) -> None:
        """Takes a message of a worker."""

    def tick(self) -> None:
        """Is called every half a second."""


class Channel:
    """Messages to all workers of a job.

    `index` is the number of this worker, `lines` are its connections by the
    other worker's.
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
        """Listens until the process ends."""
        self._listeners += listeners
        threading.Thread(
            target=self._run, name="tfkfac channel", daemon=True
        ).start()
        atexit.register(self.say, BYE)
        # A child has no part in it, and must not keep its parent's connections.
        os.register_at_fork(after_in_child=self._hang_up)

    def say(self, message: Message) -> None:
        """Sends a message to all workers, this one among them.

        All of them hear all messages in one order.
        """
        with self._lock:
            if self.index == 0:
                self._pass_on(0, message)
            elif 0 in self._lines:
                self._lines[0].send(message)

    def _pass_on(self, sender: int, message: Message) -> None:
        """Sends a message to all who have a connection with this worker."""
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
        """Takes the messages that have come from a worker."""
        for message in self._lines[worker].receive_all():
            if self.index > 0:
                self._hear(message["from"], message["message"])
            else:
                self._pass_on(worker, message)

    def _lose(self, worker: int) -> None:
        """Closes a connection; without a `BYE` before, the worker is lost."""
        self._lines.pop(worker).close()
        if worker not in self._left:
            self._pass_on(worker, LOST)

    def _hang_up(self) -> None:
        """Closes all connections in a child, where nobody frees the lock."""
        self._lock = threading.RLock()
        for line in self._lines.values():
            line.close()
        self._lines.clear()
