"""Detect within seconds that another worker has failed, exited or stalled.

A failing worker posts its error; TensorFlow's heartbeats show that a worker was
killed or is suspended. The other workers may be waiting in a collective, which
TensorFlow ends late or never. `Watch` aborts such collectives.

If no step ends for a minute, for example because a worker waits for its data,
the `StallDetector` of each worker prints its current functions. It never
aborts, because the first step may take minutes to compile.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import tensorflow as tf
from typing_extensions import override

from tfkfac.cluster.config import Cluster, split_address
from tfkfac.cluster.events import EXITED, LOST, Event, EventLog, Listener
from tfkfac.cluster.waiting import print_line
from tfkfac.compat.coordination import HEARTBEAT_TIMEOUT_S, abort_collectives

# Time until this worker aborts its collectives after another one has failed.
_GRACE_PERIOD_S = 0.2
# Grace period before the first step of a `fit`, and after a normal exit: this
# worker may raise the same error by itself, for wrong arguments, or exit too.
_LONG_GRACE_PERIOD_S = 3.0
# Time for the cause of a failed collective to arrive.
_CAUSE_TIMEOUT_S = 2 * HEARTBEAT_TIMEOUT_S + 2.0
_PROBE_TIMEOUT_S, _PROBE_INTERVAL_S = 1.0, 0.5
_MAX_PROBES = 2  # maximum number of lost workers that are probed at once
_MAX_CAUSE_CHARS = 2000
_STALL_TIMEOUT_S = 60.0  # time without a step until it is reported
# Files of Python's library in which idle threads wait; not reported.
_IDLE_FILES = {"threading.py", "selectors.py", "queue.py", "thread.py"}
# Text of the error of a collective, or of TensorFlow's coordination service.
_COLLECTIVE_TEXT = re.compile(
    "[Cc]ollective|Additional GRPC error|CoordinationService"
)
# Lines of TensorFlow's messages that give a code location, not the error.
_TRACE_LINE = re.compile(r"\s|<|Graph execution error|Detected at|Traceback|$")


class WorkerFailedError(RuntimeError):
    """Another worker has failed or was killed; the message gives the cause."""


@dataclasses.dataclass(frozen=True)
class _PeerEvent:
    """End of another worker's process, or failure of its `fit`."""

    text: str
    fit: int | None  # number of the `fit` that has failed; None: process ended
    is_fault: bool  # True unless the process has exited normally
    is_loss: bool  # True if the process ended or stalled without notice
    time_s: float


class Watch(Listener):
    """Abort the collectives of this worker when another worker ends.

    If a worker is lost before the first step of this process, also send
    SIGTERM to this process. Otherwise, while it loads data or traces its model,
    it would detect the loss only in its first collective.
    """

    def __init__(self, cluster: Cluster, log: EventLog) -> None:
        self._cluster = cluster
        self._log = log
        self._peer_events: list[_PeerEvent] = []
        self._changed = threading.Condition()
        self._cause: str | None = None
        self._terminate_at: float | None = None  # when to send SIGTERM
        self.has_started = False
        self.has_stepped = False  # a step of the current `fit` has ended
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
        self.has_stepped = False
        # Set the start before the count: otherwise another thread could
        # regard this `fit` as ended.
        self._fit_start = time.monotonic()
        self._num_fits += 1
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            if (cause := self._explain(error)) is not None:
                # Hide TensorFlow's error: its graph location is of no help.
                raise WorkerFailedError(cause) from None
            self._report_failure(error, self._num_fits)
            raise
        finally:
            self._fit_start = None

    def _explain(self, error: BaseException) -> str | None:
        """Wait for the cause of a failed collective; None for other errors."""
        if not isinstance(error, tf.errors.OpError):
            return None
        if not _COLLECTIVE_TEXT.search(error.message):
            return None
        with self._changed:
            return self._changed.wait_for(self._find_cause, _CAUSE_TIMEOUT_S)

    def _report_failure(self, error: BaseException, fit: int | None) -> None:
        if not isinstance(error, WorkerFailedError):
            self._log.post({"failed": describe(error), "fit": fit})

    def _excepthook(
        self,
        error_type: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Post or explain an uncaught exception, then call the last hook."""
        if (cause := self._explain(error)) is not None:
            print_line(cause)
        else:
            self._report_failure(error, None)
        self._previous_hook(error_type, error, trace)

    # ---------------------------------------------- failures of other workers
    @override
    def on_event(self, sender: int, event: Event) -> None:
        name, fit = self._cluster.name(sender), event.get("fit")
        if LOST in event and self._log.index in event[LOST]:
            text = (
                "This process stood still for more than "
                f"{HEARTBEAT_TIMEOUT_S:g} s, so the other workers have ended."
            )
        elif LOST in event:  # workers that send no heartbeats
            workers, addresses = event[LOST], self._cluster.addresses
            texts = [
                f"{self._cluster.name(i)} {_diagnose(addresses[i])}."
                for i in workers[:_MAX_PROBES]
            ]
            if others := workers[_MAX_PROBES:]:
                texts.append(f"{len(others)} others stopped answering, too.")
            text = " ".join(texts)
        elif sender == self._log.index:
            return
        elif "failed" in event:
            text = f"{name} has failed: {event['failed']}"
        elif event == EXITED:
            text = f"{name} has ended."
        else:
            return
        is_loss, now = LOST in event, time.monotonic()
        with self._changed:
            self._peer_events.append(
                _PeerEvent(text, fit, event != EXITED, is_loss, now)
            )
            self._changed.notify_all()
        if event != EXITED:
            self._log.tick_after(_GRACE_PERIOD_S)

    @override
    def on_tick(self) -> None:
        """Abort the collectives of this worker if an event is due."""
        if self._cause is not None:
            # A process that waited in a collective has already raised an error.
            # End a process that starts no step in the grace period.
            limit = self._terminate_at
            if limit is not None and time.monotonic() > limit:
                self._terminate_at = None
                if not self.has_started:
                    # `signal.raise_signal` would not wake up the main thread,
                    # which runs Python's handlers.
                    os.kill(os.getpid(), signal.SIGTERM)
            return
        with self._changed:
            cause = self._find_cause()
            due_event = next(filter(self._is_due, self._peer_events), None)
            if cause is None or due_event is None:
                return
            # The due event may be a consequence of the first one.
            self._cause = cause
            if due_event.is_loss and not self.has_started:
                self._terminate_at = time.monotonic() + _LONG_GRACE_PERIOD_S
        abort_collectives(cause)
        if due_event.is_fault:
            print_line(cause)

    def _find_cause(self) -> str | None:
        """Return the text of the first event of this or a later `fit`."""
        num_ended = self._num_fits - (self._fit_start is not None)
        self._peer_events = [
            event
            for event in self._peer_events
            if event.fit is None or event.fit > num_ended
        ]
        first = self._peer_events[0].text if self._peer_events else None
        return self._cause or first

    def _is_due(self, event: _PeerEvent) -> bool:
        """Return True if this worker must abort its collectives now."""
        start, is_long = event.time_s, not event.is_fault
        if event.fit is not None:
            if self._fit_start is None:  # not yet in the `fit` of the event
                return False
            start = max(start, self._fit_start)
            is_long |= not self.has_stepped
        period = _LONG_GRACE_PERIOD_S if is_long else _GRACE_PERIOD_S
        return time.monotonic() >= start + period


def _diagnose(address: str) -> str:
    """Return why a worker sends no heartbeats, by connecting to its port."""
    # For a suspended process, the operating system accepts connections. For an
    # ended process it refuses connections, but not at once.
    try:
        endpoint = split_address(address)
        for _ in range(2):
            socket.create_connection(endpoint, _PROBE_TIMEOUT_S).close()
            time.sleep(_PROBE_INTERVAL_S)
    except ConnectionRefusedError:
        return "is gone without a word: it was killed"
    except (OSError, UnicodeError):
        return "is gone without a word: its machine or the network is down"
    return "stopped answering: the process is suspended, or the network is down"


def describe(error: BaseException) -> str:
    """Return the type and text of an error without code locations."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        lines = dict.fromkeys(error.message.splitlines())
        text = " ".join(x for x in lines if not _TRACE_LINE.match(x))
    return f"{type(error).__name__}: {text}"[:_MAX_CAUSE_CHARS]


# ------------------------------------------------------------------- stall
class StallDetector(Listener):
    """Print the current functions of this worker if no step ends for 60 s."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last_step: float | None = None  # None outside of training
        self._timeout_s = _STALL_TIMEOUT_S

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context manager for training; the detector is off outside of it."""
        self.record_step()
        try:
            yield
        finally:
            self._last_step = None

    def record_step(self) -> None:
        """Record the start of training or the end of a step."""
        self._last_step = time.monotonic()
        self._timeout_s = _STALL_TIMEOUT_S

    @override
    def on_tick(self) -> None:
        """After a timeout, print the current function of each busy thread."""
        last_step = self._last_step
        if last_step is None or time.monotonic() < last_step + self._timeout_s:
            return
        functions = []
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for identifier, frame in sys._current_frames().items():
            code, line = frame.f_code, frame.f_lineno
            file = pathlib.Path(code.co_filename).name
            # Threads of `EventLog` are always waiting for events.
            is_ours = names.get(identifier, "").startswith("tfkfac ")
            if not is_ours and file not in _IDLE_FILES:
                functions.append(f"{code.co_name} ({file}:{line})")
        print_line(
            f"{self._name}: no step has ended for {self._timeout_s:.0f} s. It "
            f"is in {', '.join(functions)}."
        )
        self._timeout_s *= 2
