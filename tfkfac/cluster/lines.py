"""Connections between workers, on which messages are lines of JSON."""

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]

_LONGEST_LINE = 2**20
_PIECE = 2**16
# Seconds of silence until the system asks the other side's system whether it
# is there, between two questions, and questions without an answer until it is
# not.
_IDLE, _INTERVAL, _QUESTIONS = 5, 5, 4


class Line:
    """A connection with another process.

    Args:
        connection: The connection.
        timeout: Seconds that the other side has to say something.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        _keep_alive(connection)
        self._socket = connection
        self._received = bytearray()
        self.closed = False

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up."""
        self.closed = True
        self._socket.close()

    def fileno(self) -> int:
        """What a selector waits for."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, if there is still somebody."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> Message | None:
        """The next message; None if none comes or it is not one of ours."""
        while b"\n" not in self._received and not self.closed:
            with contextlib.suppress(TimeoutError):
                self._read()
                continue
            return None
        text, _, self._received = self._received.partition(b"\n")
        return _parse(text)

    def receive_all(self) -> list[Message]:
        """Reads once; the messages that have come."""
        with contextlib.suppress(TimeoutError):
            self._read()
        *texts, self._received = self._received.split(b"\n")
        return [m for text in texts if (m := _parse(text)) is not None]

    def _read(self) -> None:
        try:
            piece = self._socket.recv(_PIECE)
        except TimeoutError:
            raise
        except OSError:
            piece = b""
        self._received += piece
        if not piece or len(self._received) > _LONGEST_LINE:
            self.closed = True


def _parse(text: bytes | bytearray) -> Message | None:
    try:
        message = json.loads(text)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _keep_alive(connection: socket.socket) -> None:
    """Lets the system notice that the other machine is gone.

    It answers for a process that is stopped or busy.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE),
        ("TCP_KEEPINTVL", _INTERVAL),
        ("TCP_KEEPCNT", _QUESTIONS),
        ("TCP_USER_TIMEOUT", 1000 * (_IDLE + _QUESTIONS * _INTERVAL)),
    ):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(
                socket.IPPROTO_TCP, getattr(socket, name), value
            )
