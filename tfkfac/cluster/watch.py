"""Detect within seconds that another worker has failed, exited or stalled.

A failing worker broadcasts its error; the end of a connection shows that a
worker was killed. The other workers may be waiting in a collective, which
TensorFlow ends late or never. `Watch` aborts such collectives.

If no step ends for a minute, for example because a worker waits for its data,
`StallDetector` prints the current functions of each worker. The stall detector
never aborts, because the first step may take minutes to compile.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import NoneType, TracebackType

import tensorflow as tf
from typing_extensions import override

from tfkfac.cluster.channel import (
    PEER_EXITED,
    PEER_LOST,
    Channel,
    Listener,
    Message,
)
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.waiting import print_line
from tfkfac.compat.strategies import (
    abort_collectives,
    local_devices,
    silent_workers,
)

# Time for this worker to raise the same error by itself, for example for wrong
# arguments, and for the cause of a failed collective to arrive.
_GRACE_PERIOD_S = 3.0
_MAX_CAUSE_CHARS = 2000
_STALL_TIMEOUT_S = 60.0  # time without a step until worker 0 asks why
_ANSWER_TIMEOUT_S = 2.0
# Files of Python's library in which idle threads wait; not reported.
_IDLE_FILES = {"threading.py", "selectors.py", "queue.py", "thread.py"}
# Lines of TensorFlow's messages that give a code location, not the error.
_TRACE_LINE = re.compile(r"\s|<|Graph execution error|Detected at|Traceback|$")


class WorkerFailedError(RuntimeError):
    """Another worker has failed or was killed; the message gives the cause."""


@dataclasses.dataclass(frozen=True)
class _PeerEvent:
    """End of another worker's process, or failure of its `fit`.

    Attributes:
        fit: Number of the `fit` that has failed; None if the process ended.
        is_fault: True unless the process has exited normally.
        is_loss: True if the connection ended without notice.
    """

    text: str
    fit: int | None
    is_fault: bool
    is_loss: bool
    time_s: float


class Watch(Listener):
    """Abort the collectives of this worker when another worker ends.

    If a worker is killed before the first step of this process, also send
    SIGTERM to this process. Otherwise, while it loads data or traces its model,
    it would detect the loss only in its first collective.
    """

    def __init__(self, cluster: Cluster, channel: Channel) -> None:
        self._cluster = cluster
        self._channel = channel
        self._peer_events: list[_PeerEvent] = []
        self._changed = threading.Condition()
        self._cause: str | None = None
        self._terminate_at: float | None = None  # when to send SIGTERM
        self.has_started = False
        self._num_fits = 0
        self._fit_start: float | None = None  # None outside of `fit`
        self._previous_hook, sys.excepthook = sys.excepthook, self._excepthook

    # ------------------------------------------------ failures of this worker
    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """Context manager for a `fit` or `evaluate` of this worker."""
        if self._fit_start is not None:  # nested, as `evaluate` inside of `fit`
            yield
            return
        self.has_started = True
        self._num_fits += 1
        self._fit_start = time.monotonic()
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            cause = self._explain(error)
            if cause is not None:
                # Hide TensorFlow's error: its graph location is of no help.
                raise WorkerFailedError(cause) from None
            self.report_failure(error, self._num_fits)
            raise
        finally:
            self._fit_start = None

    def report_failure(
        self, error: BaseException, fit: int | None = None
    ) -> None:
        """Broadcast an error of this worker, or the workers that caused it."""
        if workers := silent_workers(error):
            self._channel.broadcast({"silent": workers})
        elif not isinstance(error, WorkerFailedError):
            self._channel.broadcast({"failed": describe(error), "fit": fit})

    def _excepthook(
        self,
        error_type: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Broadcast an uncaught exception, then call the previous hook."""
        self.report_failure(error)
        self._previous_hook(error_type, error, trace)

    def _explain(self, error: BaseException) -> str | None:
        """Return the cause of a failed collective; None for other errors."""
        if not isinstance(error, _COLLECTIVE_ERRORS):
            return None
        with self._changed:
            self._changed.wait_for(
                lambda: self._cause or self._peer_events, _GRACE_PERIOD_S
            )
            texts = (event.text for event in self._peer_events)
            if cause := self._cause or next(texts, None):
                return cause
        if not (workers := silent_workers(error)):
            return None
        self.report_failure(error)  # to workers that wait in no collective
        return self._silence_of(workers)

    def _silence_of(self, workers: Sequence[int]) -> str:
        """Return the text of an event: workers that do not answer."""
        names = " and ".join(map(self._cluster.name, workers))
        return (
            f"{names} stopped answering: the process is suspended, or its "
            "machine or the network is down."
        )

    # ---------------------------------------------- failures of other workers
    @override
    def on_message(self, sender: int, message: Message) -> None:
        fit = message.get("fit")
        if sender == self._channel.index or type(fit) not in (int, NoneType):
            return
        name, now = self._cluster.name(sender), time.monotonic()
        if "failed" in message:
            text = f"{name} has failed: {message['failed']}"
        elif "silent" in message:
            text = self._silence_of(message["silent"])
        elif message == PEER_LOST:
            text = (
                f"{name} is gone without a word: it was killed, or its machine "
                "or the network is down."
            )
        elif message == PEER_EXITED:
            text = f"{name} has ended."
        else:
            return
        is_fault, is_loss = message != PEER_EXITED, message == PEER_LOST
        with self._changed:
            event = _PeerEvent(text, fit, is_fault, is_loss, now)
            self._peer_events.append(event)
            self._changed.notify_all()

    @override
    def on_tick(self) -> None:
        """Abort the collectives of this worker if an event is due."""
        with self._changed:
            if self._cause is not None:
                self._terminate()
                return
            events = [e for e in self._peer_events if not self._is_past(e)]
            self._peer_events = events
            due_event = next((e for e in events if self._is_due(e)), None)
            if due_event is None:
                return
            # A later event may be a consequence of the first one.
            self._cause = events[0].text
            if due_event.is_loss and not self.has_started:
                self._terminate_at = time.monotonic() + _GRACE_PERIOD_S
        if due_event.is_fault:
            print_line(self._cause)
        abort_collectives(self._cause)

    def _terminate(self) -> None:
        """Send SIGTERM to this process if no step starts in the grace period.

        A process that waited in a collective has already raised an error.
        """
        if (
            self._terminate_at is not None
            and time.monotonic() > self._terminate_at
        ):
            self._terminate_at = None
            if not self.has_started:
                # `signal.raise_signal` would not wake up the main thread,
                # which runs Python's handlers.
                os.kill(os.getpid(), signal.SIGTERM)

    def _is_past(self, event: _PeerEvent) -> bool:
        """Return True if this worker's `fit` number `event.fit` has ended."""
        num_ended = self._num_fits - (self._fit_start is not None)
        return event.fit is not None and num_ended >= event.fit

    def _is_due(self, event: _PeerEvent) -> bool:
        """Return True if this worker must abort its collectives now.

        The grace period starts at the event, or at the `fit` of the event.
        """
        grace_start = event.time_s
        if event.fit is not None:
            if self._fit_start is None:  # not yet in the `fit` of the event
                return False
            grace_start = max(grace_start, self._fit_start)
        return time.monotonic() > grace_start + _GRACE_PERIOD_S


# TensorFlow raises one of these errors if a collective fails or is aborted.
_COLLECTIVE_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


def describe(error: BaseException) -> str:
    """Return the type and text of an error without code locations."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        lines = dict.fromkeys(error.message.splitlines())
        text = " ".join(x for x in lines if not _TRACE_LINE.match(x))
    return f"{type(error).__name__}: {text}"[:_MAX_CAUSE_CHARS]


# ------------------------------------------------------------------- stall
class StallDetector(Listener):
    """Print the current functions of all workers if no step ends for 60 s."""

    def __init__(self, names: Sequence[str], channel: Channel) -> None:
        self._names = names
        self._channel = channel
        self._last_step: float | None = None  # None outside of training
        self._timeout_s = _STALL_TIMEOUT_S
        self._query_time: float | None = None
        self._locations: dict[int, str] = {}

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context manager for training; the detector is off outside of it."""
        self.record_step()
        try:
            yield
        finally:
            self._last_step = None

    def record_step(self) -> None:
        """Record the end of a step."""
        self._last_step = time.monotonic()
        self._timeout_s = _STALL_TIMEOUT_S

    @override
    def on_tick(self) -> None:
        """On worker 0, query all workers after a timeout; print the answers."""
        now, last_step = time.monotonic(), self._last_step
        if self._query_time is not None:
            if now > self._query_time + _ANSWER_TIMEOUT_S:
                self._query_time = None
                self._print_locations()
            return
        is_late = last_step is not None and now > last_step + self._timeout_s
        if is_late and self._channel.index == 0:
            self._query_time = now
            self._locations = {}
            self._channel.broadcast({"where": True})

    @override
    def on_message(self, sender: int, message: Message) -> None:
        if "where" in message:
            self._channel.broadcast({"place": describe_threads()})
        elif "place" in message:
            self._locations[sender] = message["place"]

    def _print_locations(self) -> None:
        print_line(f"no step has ended for {self._timeout_s:.0f} s.")
        for index, name in enumerate(self._names):
            answer = self._locations.get(index, "does not answer")
            print_line(f"{name} {answer}")
        self._timeout_s *= 2


def find_detector(strategy: tf.distribute.Strategy) -> StallDetector | None:
    """Return the stall detector of a strategy; None for one replica."""
    detector = getattr(strategy, "stall_detector", None)
    if detector is not None or strategy.num_replicas_in_sync == 1:
        return detector
    return _local_detector() if len(local_devices(strategy)) > 1 else None


@functools.cache
def _local_detector() -> StallDetector:
    """Return the stall detector of this process for several replicas."""
    channel = Channel(0, 1, {})
    detector = StallDetector(["this process"], channel)
    channel.start(detector)
    return detector


def describe_threads() -> str:
    """Return the current function of each busy thread of this process."""
    threads = []
    for identifier, frame in sys._current_frames().items():
        name = pathlib.Path(frame.f_code.co_filename).name
        if identifier != threading.get_ident() and name not in _IDLE_FILES:
            threads.append(f"{frame.f_code.co_name} ({name}:{frame.f_lineno})")
    return f"is in {', '.join(threads)}"
