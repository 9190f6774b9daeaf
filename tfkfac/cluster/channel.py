"""Messages of workers to each other, beside TensorFlow's collectives.

They need no step of the training: a thread of each process listens, on the
connections on which the workers have met. A message is a line of JSON. The
first worker passes on the messages of the others.
"""

import atexit
import contextlib
import hmac
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfkfac.cluster.authentication import sign

Message = dict[str, Any]

# Seconds between two ticks of the listeners.
_TICK = 0.5
# The message from a worker whose connection has ended, and the last one of a
# worker that ends as it should.
LOST, BYE = {"lost": True}, {"bye": True}
LONGEST_LINE = 2**21  # bytes; the addresses of `MOST_WORKERS` fit in
_PIECE = 2**16  # bytes
# Faults of messages that are printed, and characters of each.
_MOST_REPORTS, _LONGEST_REPORT = 10, 200
# Seconds of silence until the system asks the other side's system whether it
# is there, seconds between two questions, and the number of questions without
# an answer after which it is not.
_IDLE, _INTERVAL, _QUESTIONS = 5, 5, 4


class Line:
    """A connection with another process that carries messages.

    Args:
        connection: The connected socket.
        timeout: Seconds until sending fails.
        longest: Longest line in bytes; a longer one ends the connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout: float,
        longest: int = LONGEST_LINE,
    ) -> None:
        connection.settimeout(timeout)
        # Two short messages in a row must not wait 40 ms for a receipt.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        self._socket = connection
        self._timeout = timeout
        self._received = bytearray()
        self._keys: tuple[bytes, bytes] | None = None
        self._num_sent = self._num_received = 0  # since `protect`
        self.longest = longest
        self.closed = False

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self._socket.close()

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._socket.fileno()

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """Authenticate all messages from now on.

        Each line is "MAC message"; the MAC covers the number of the message,
        so that none can be repeated, removed or reordered.
        """
        self._keys = send_key, receive_key

    def send(self, message: Message) -> None:
        """Sends a message, if the connection is open."""
        text = json.dumps(message).encode()
        if self._keys is not None:
            text = sign(self._keys[0], self._num_sent, text) + b" " + text
            self._num_sent += 1
        try:
            self._socket.sendall(text + b"\n")
        except OSError:
            self.closed = True

    def receive(self, seconds: float) -> Message | None:
        """Return the next message; None if none comes in so many seconds.

        Also None if the next line is malformed.
        """
        end = time.monotonic() + seconds
        try:
            while (text := self.pop()) is None and not self.closed:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._socket.settimeout(left)
                self.read()
        finally:
            if not self.closed:
                self._socket.settimeout(self._timeout)
        with contextlib.suppress(ValueError):
            return None if text is None else parse(text)
        return None

    def receive_all(self) -> list[Message | None]:
        """Return the messages after one read; None for a malformed one."""
        self.read()
        messages: list[Message | None] = []
        while (text := self.pop()) is not None:
            try:
                messages.append(parse(text))
            except ValueError:
                messages.append(None)
        return messages

    def read(self) -> None:
        """Read once from the socket, for at most its timeout."""
        try:
            piece = self._socket.recv(_PIECE)
        except TimeoutError:
            return
        except OSError:
            piece = b""
        self._received += piece
        if not piece:
            self.closed = True

    def pop(self) -> bytes | None:
        """Return the next line that has come; None if none is complete.

        A line that is too long, or whose MAC is wrong, ends the connection.
        """
        end = self._received.find(b"\n")
        if max(end, len(self._received) if end < 0 else 0) > self.longest:
            self._received.clear()
            self.closed = True
            return None
        if end < 0:
            return None
        text = bytes(self._received[:end])
        del self._received[: end + 1]
        if self._keys is None:
            return text
        mac, _, text = text.partition(b" ")
        expected = sign(self._keys[1], self._num_received, text)
        if not hmac.compare_digest(mac, expected):
            self._received.clear()
            self.closed = True
            return None
        self._num_received += 1
        return text


def parse(text: bytes) -> Message:
    """Parse a message.

    Raises:
        ValueError: If the text is not an object of strict JSON, or is nested
            too deeply for the parser.
    """
    try:
        message = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise ValueError("it is not an object of JSON")
    return message


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


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
        self._reported: set[str] = set()

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
            self._call(listener.hear, sender, message)

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        """Call a listener; report its error.

        An error must not end the thread: no other thread notices that a
        worker is lost.
        """
        try:
            method(*args)
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}")

    def _report(self, fault: str) -> None:
        """Print the fault of a message, once for each fault."""
        if fault not in self._reported and len(self._reported) < _MOST_REPORTS:
            self._reported.add(fault)
            print(
                f"tfkfac: worker {self.index} ignores a malformed message of "
                f"another worker ({ascii(fault)[:_LONGEST_REPORT]})",
                file=sys.stderr,
                flush=True,
            )

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
                        self._call(listener.tick)

    def _take(self, worker: int) -> None:
        """Takes the messages that have come from a worker."""
        for message in self._lines[worker].receive_all():
            sender: Any = worker
            content: Any = message
            if self.index > 0 and message is not None:
                sender, content = message.get("from"), message.get("message")
            if (
                type(sender) is not int
                or not 0 <= sender < self.size
                or not isinstance(content, dict)
            ):
                self._report("neither sender nor content")
            elif self.index > 0:
                self._hear(sender, content)
            else:
                self._pass_on(sender, content)

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
