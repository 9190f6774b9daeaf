"""Timeouts, reminders and printed messages of the rendezvous."""

import contextlib
import ipaddress
import sys
import time
from collections.abc import Sequence

from tfkfac.cluster.config import Cluster

POLL_INTERVAL_S = 0.1
# Timeout of a request, time in which an earlier job must free the port, and
# delay of the first reminder.
TIMEOUT_S = 5.0
# Maximum number of workers and of dropped processes named in a message, and of
# characters quoted from a peer.
MAX_NAMED, _MAX_DROPPED, _MAX_QUOTE_CHARS = 10, 5, 80
_MAX_REASON_CHARS = 10_000  # length of the reason for refusing a worker


class RefusedError(ValueError):
    """The workers cannot train together."""


def request_interval_s(size: int) -> float:
    """Return the time between two requests of a worker, by the job's size."""
    # Up to 500 workers, worker 0 answers at most 256 requests a second.
    return min(POLL_INTERVAL_S + size / 256, 2.0)


def lease_s(size: int) -> float:
    """Return the time without a request after which a worker is dropped."""
    return 2.0 + 3 * request_interval_s(size)


class Wait:
    """Deadline and printed reminders of the wait for other workers.

    The first reminder comes after 5 s, the next when the time has doubled.
    """

    def __init__(self, cluster: Cluster, timeout: float | None) -> None:
        self._cluster = cluster
        self._timeout = timeout
        self._start = time.monotonic()
        self._next_reminder = TIMEOUT_S
        self.cause = ""  # why worker 0 cannot be reached
        self.dropped: list[str] = []  # workers dropped by worker 0, and why

    def remaining(self, limit: float) -> float:
        """Return the seconds until the deadline, clipped to [0.001, limit]."""
        if self._timeout is None:
            return limit
        passed = time.monotonic() - self._start
        return max(min(limit, self._timeout - passed), 0.001)

    def check(self, missing: Sequence[int]) -> None:
        """Print a reminder if due; raise a TimeoutError after the deadline."""
        passed = time.monotonic() - self._start
        names = ", ".join(self._cluster.name(i) for i in missing[:MAX_NAMED])
        if len(missing) > MAX_NAMED:
            names += " and others"
        if self._timeout is not None and passed > self._timeout:
            causes = f" Last cause: {self.cause}." if self.cause else ""
            if self.dropped:
                causes += f" Dropped: {'; '.join(self.dropped)}."
            raise TimeoutError(
                f"Worker {self._cluster.index} has waited {self._timeout:g} "
                f"seconds for {names}.{causes} Start every worker "
                "with the same cluster and an index of its own; argument "
                "`start_timeout` of the strategy is the limit in seconds."
            )
        if passed > self._next_reminder:
            self._next_reminder = 2 * passed
            cause = f": {self.cause}" if self.cause else ""
            print_line(
                f"worker {self._cluster.index} is waiting for {names}{cause} "
                f"({passed:.0f} s)"
            )

    def record(self, dropped: str) -> None:
        """Record a dropped worker, to name it in the timeout error."""
        self.dropped = [*self.dropped, dropped][-_MAX_DROPPED:]


def print_line(text: str) -> None:
    """Print one line on stderr, with the prefix "tfkfac: ", if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(f"tfkfac: {text}", file=sys.stderr, flush=True)


def quote(text: bytes | str) -> str:
    """Quote a peer's text: escape it as `ascii` and truncate it."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    quoted = ascii(text[:_MAX_QUOTE_CHARS])
    return f"{quoted}..." if len(text) > _MAX_QUOTE_CHARS else quoted


def escape(text: str) -> str:
    """Escape the unprintable characters of a peer's text."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in text[:_MAX_REASON_CHARS]
    )


def normalize_host(host: str) -> str:
    """Remove the scope of an IP address and unmap IPv4-mapped IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and the loopback addresses."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
