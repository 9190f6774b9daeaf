"""Messages between workers, independent of TensorFlow's collectives.

A thread of each process receives messages at any time, not only in a training
step. It uses the connections of the rendezvous. A message is a line of JSON.
Worker 0 relays the messages of all other workers.
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

_TICK_INTERVAL_S = 0.5  # between two calls of `Listener.on_tick`
# Messages about a worker: its connection was lost; its process exits normally.
PEER_LOST, PEER_EXITED = {"lost": True}, {"bye": True}
MAX_MESSAGE_BYTES = 2**21  # holds the addresses of `MAX_WORKERS` workers
_READ_BYTES = 2**16
# Maximum number of reports on malformed messages, and of characters in each.
_MAX_REPORTS, _MAX_REPORT_CHARS = 10, 200
# TCP keepalive: seconds of silence before the first probe, seconds between
# probes, unanswered probes until the connection counts as lost.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 5, 5, 4


class Connection:
    """Connection to another process that sends and receives messages.

    `timeout` is the number of seconds until sending fails. A line longer than
    `max_message_bytes` ends the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout: float,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        sock.settimeout(timeout)
        # Disable Nagle's algorithm: it delays a second short message by 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(sock)
        self._socket = sock
        self._timeout = timeout
        self._received = bytearray()
        self._keys: tuple[bytes, bytes] | None = None
        self._num_sent = self._num_received = 0  # since `enable_mac`
        self.max_message_bytes = max_message_bytes
        self.closed = False

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    def enable_mac(self, send_key: bytes, receive_key: bytes) -> None:
        """Authenticate all messages from now on.

        Each line is "MAC message". The MAC covers the sequence number of the
        message, so messages cannot be repeated, removed or reordered.
        """
        self._keys = send_key, receive_key

    def send(self, message: Message) -> None:
        """Send a message; mark the connection as closed if that fails."""
        line = json.dumps(message).encode()
        if self._keys is not None:
            line = sign(self._keys[0], self._num_sent, line) + b" " + line
            self._num_sent += 1
        try:
            self._socket.sendall(line + b"\n")
        except OSError:
            self.closed = True

    def receive(self, seconds: float) -> Message | None:
        """Return the next message; None after a timeout or if malformed."""
        deadline = time.monotonic() + seconds
        try:
            while (line := self.pop_line()) is None and not self.closed:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                self._socket.settimeout(remaining_s)
                self.read()
        finally:
            if not self.closed:
                self._socket.settimeout(self._timeout)
        with contextlib.suppress(ValueError):
            return None if line is None else parse(line)
        return None

    def receive_all(self) -> list[Message | None]:
        """Read once; return all messages, None for each malformed message."""
        self.read()
        messages: list[Message | None] = []
        while (line := self.pop_line()) is not None:
            try:
                messages.append(parse(line))
            except ValueError:
                messages.append(None)
        return messages

    def read(self) -> None:
        """Read once from the socket, for at most its timeout."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data:
            self.closed = True

    def pop_line(self) -> bytes | None:
        """Return the next line or None; an invalid line ends the connection."""
        line_size = self._received.find(b"\n")
        if (
            max(line_size, len(self._received) if line_size < 0 else 0)
            > self.max_message_bytes
        ):
            self._received.clear()
            self.closed = True
            return None
        if line_size < 0:
            return None
        line = bytes(self._received[:line_size])
        del self._received[: line_size + 1]
        if self._keys is None:
            return line
        mac, _, line = line.partition(b" ")
        expected = sign(self._keys[1], self._num_received, line)
        if not hmac.compare_digest(mac, expected):
            self._received.clear()
            self.closed = True
            return None
        self._num_received += 1
        return line


def parse(text: bytes) -> Message:
    """Parse a JSON object without NaN or infinity, or raise a ValueError."""
    try:
        message = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise ValueError("it is not an object of JSON")
    return message


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _keep_alive(sock: socket.socket) -> None:
    """Enable TCP keepalive, which detects that the other machine is down.

    The kernel answers the probes, also for a stopped or busy process.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    timeout_s = _KEEPALIVE_IDLE_S + _KEEPALIVE_PROBES * _KEEPALIVE_INTERVAL_S
    options = {
        "TCP_KEEPIDLE": _KEEPALIVE_IDLE_S,
        "TCP_KEEPINTVL": _KEEPALIVE_INTERVAL_S,
        "TCP_KEEPCNT": _KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": 1000 * timeout_s,  # milliseconds
    }
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:  # not defined on every system
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Listener:
    """Handler of messages, called by the channel's thread or `broadcast`."""

    def on_message(self, sender: int, message: Message) -> None:
        """Handle a message of worker `sender`."""

    def on_tick(self) -> None:
        """Run periodic work, every `_TICK_INTERVAL_S` seconds."""


class Channel:
    """Broadcast messages to all workers of a job.

    `connections` has the connections by the index of the other worker: to all
    others on worker 0, to worker 0 on each other worker.
    """

    def __init__(
        self, index: int, size: int, connections: Mapping[int, Connection]
    ) -> None:
        self.index = index
        self.size = size
        self._connections = dict(connections)
        self._listeners: list[Listener] = []
        # Reentrant: a listener may call `broadcast` in `on_message`.
        self._lock = threading.RLock()
        self._exited: set[int] = set()
        self._reported: set[str] = set()

    def start(self, *listeners: Listener) -> None:
        """Start the thread that receives messages until the process ends."""
        self._listeners += listeners
        threading.Thread(
            target=self._run, name="tfkfac channel", daemon=True
        ).start()
        atexit.register(self.broadcast, PEER_EXITED)
        # Close copies in forked children: they would hide this process's exit.
        os.register_at_fork(after_in_child=self._close_in_child)

    def broadcast(self, message: Message) -> None:
        """Send a message to all workers, including this worker.

        All workers receive all messages in the same order.
        """
        with self._lock:
            if self.index == 0:
                self._relay(0, message)
            elif 0 in self._connections:
                self._connections[0].send(message)

    def _relay(self, sender: int, message: Message) -> None:
        """Deliver a message from `sender` to all workers, as worker 0."""
        for connection in self._connections.values():
            connection.send({"from": sender, "message": message})
        self._deliver(sender, message)

    def _deliver(self, sender: int, message: Message) -> None:
        if message == PEER_EXITED:
            self._exited.add(sender)
        for listener in self._listeners:
            self._call(listener.on_message, sender, message)

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        """Call a listener; its exception must not end the channel's thread."""
        try:
            method(*args)
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}")

    def _report(self, fault: str) -> None:
        """Print why a message is malformed, each reason only once."""
        if fault not in self._reported and len(self._reported) < _MAX_REPORTS:
            self._reported.add(fault)
            print(
                f"tfkfac: worker {self.index} ignores a malformed message of "
                f"another worker ({ascii(fault)[:_MAX_REPORT_CHARS]})",
                file=sys.stderr,
                flush=True,
            )

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, worker)
            while True:
                events = selector.select(_TICK_INTERVAL_S)
                with self._lock:
                    for key, _ in events:
                        self._receive_from(key.data)
                    connections = self._connections.items()
                    for worker, x in [i for i in connections if i[1].closed]:
                        selector.unregister(x)
                        self._remove_connection(worker)
                    for listener in self._listeners:
                        self._call(listener.on_tick)

    def _receive_from(self, worker: int) -> None:
        """Receive and deliver the available messages of a connection."""
        for message in self._connections[worker].receive_all():
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
                self._deliver(sender, content)
            else:
                self._relay(sender, content)

    def _remove_connection(self, worker: int) -> None:
        """Close a connection; send `PEER_LOST` unless the worker has exited."""
        self._connections.pop(worker).close()
        if worker not in self._exited:
            self._relay(worker, PEER_LOST)

    def _close_in_child(self) -> None:
        """Close all connections in a forked child."""
        # Replace the lock: a thread of the parent may hold it at the fork.
        self._lock = threading.RLock()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
