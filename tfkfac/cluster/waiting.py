"""The wait of workers for each other: limits, messages, and the result."""

import ipaddress
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tfkfac.cluster.channel import Line
from tfkfac.cluster.config import Cluster

POLL_INTERVAL_S = 0.1
# For a message to be sent, another worker 0 to answer, a name to be resolved.
SHORT_TIMEOUT_S = 1.0
# For a greeting, an answer, or an earlier job to free the port; and until the
# first reminder.
TIMEOUT_S = 5.0
# Workers, dropped processes and characters of a peer's text in one message.
MOST_NAMED, _MOST_DROPPED, _LONGEST_QUOTE = 10, 5, 80
_LONGEST_REASON = 10_000  # characters of a reason that worker 0 gives
LOOPBACK = ("127.0.0.1", "::1")


class RefusedError(ValueError):
    """The workers cannot train together."""


class Rendezvous(NamedTuple):
    """The result of the rendezvous of all workers.

    Attributes:
        cluster: The cluster with the addresses of all workers.
        lines: Open connections by worker index. Worker 0 has one to each
            other worker; each other worker has one to worker 0.
        seed: Random integer in [0, 2^31), equal on all workers; None if
            there is one worker.
    """

    cluster: Cluster
    lines: dict[int, Line]
    seed: int | None


class Wait:
    """The wait for other workers: reminders, and an end.

    Attributes:
        cause: Why worker 0 has not been reached; "" if there is no cause.
        dropped: The last workers that worker 0 has dropped, with reasons.
    """

    def __init__(self, cluster: Cluster, timeout: float | None) -> None:
        self._cluster = cluster
        self._timeout = timeout
        self._start = time.monotonic()
        self._next_reminder = self._pause = TIMEOUT_S
        self._printed_cause = ""
        self.cause = ""
        self.dropped: list[str] = []

    def left(self, limit: float) -> float:
        """Return the seconds until the end, from a millisecond to `limit`."""
        if self._timeout is None:
            return limit
        passed = time.monotonic() - self._start
        return max(min(limit, self._timeout - passed), 0.001)

    def check(self, missing: Sequence[int]) -> None:
        """Print a reminder if one is due.

        Raises:
            TimeoutError: If the time is over.
        """
        passed = time.monotonic() - self._start
        names = ", ".join(self._cluster.name(i) for i in missing[:MOST_NAMED])
        if len(missing) > MOST_NAMED:
            names += " and others"
        if self._timeout is not None and passed > self._timeout:
            raise TimeoutError(
                f"Worker {self._cluster.index} has waited {self._timeout:g} "
                f"seconds for {names}.{self._last_cause()} Start every worker "
                "with the same cluster and an index of its own; argument "
                "`start_timeout` of the strategy is how long they wait."
            )
        is_new = self.cause not in ("", self._printed_cause)
        if passed > self._next_reminder or (is_new and passed > self._pause):
            # First after 5 s, then after twice the time; a cause at once.
            self._next_reminder = passed + max(passed, 6 * TIMEOUT_S)
            self._pause = passed + TIMEOUT_S
            self._printed_cause = self.cause
            cause = f": {self.cause}" if self.cause else ""
            print_line(
                f"worker {self._cluster.index} is waiting for {names}{cause} "
                f"({passed:.0f} s)"
            )

    def record(self, dropped: str) -> None:
        """Record a worker that was dropped, for the last message."""
        self.dropped = [*self.dropped, dropped][-_MOST_DROPPED:]

    def _last_cause(self) -> str:
        cause = f" Last cause: {self.cause}." if self.cause else ""
        dropped = "; ".join(self.dropped)
        return f"{cause} Dropped: {dropped}." if dropped else cause


def print_line(text: str) -> None:
    """Print one line of tfkfac on stderr."""
    print(f"tfkfac: {text}", file=sys.stderr, flush=True)


def quote(text: bytes | str) -> str:
    """Return the beginning of a peer's text in escaped form."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    cut = ascii(text[:_LONGEST_QUOTE])
    return f"{cut}..." if len(text) > _LONGEST_QUOTE else cut


def escape(text: str) -> str:
    """Return a peer's text with escapes for what cannot be printed."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in text[:_LONGEST_REASON]
    )


def plain(host: str) -> str:
    """Return an IP address without a scope, and IPv4 as such."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def is_loopback(host: str) -> bool:
    """Return True for a host that can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
