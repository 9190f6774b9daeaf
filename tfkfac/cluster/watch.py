"""Faults of other workers, known within seconds: failed, gone, standing still.

A worker that fails tells the others why; of one that is killed they learn from
its connection. They may be waiting for it in a collective, which TensorFlow
ends only when the other process is gone, and not always then: so `Watch`
aborts it.

A worker that is slow is left alone. When no step ends for long, as where a
worker waits for its data for ever, `Standstill` prints the place in the code
of each worker. That may be a first step that is long compiled, so nothing is
ended.
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

from tfkfac.cluster.channel import BYE, LOST, Channel, Listener, Message
from tfkfac.cluster.config import Cluster
from tfkfac.compat.strategies import abort_collectives, local_devices

# Seconds that a worker has to come to the same end as another by itself, as
# where all of them refuse to begin; and to learn why a collective has failed.
_GRACE = 3.0
_LONGEST_CAUSE = 2000
# Seconds without a step until workers are asked for their places, and for the
# answers.
_LONG = 60.0
_ANSWER = 2.0
# Files of Python in which threads wait for work.
_IDLE = frozenset({"threading.py", "selectors.py", "queue.py", "thread.py"})
# Lines of TensorFlow's messages that say where and not what.
_TRACE = re.compile(r"\s|<|Graph execution error|Detected at|Traceback|$")


class WorkerFailedError(RuntimeError):
    """Another worker of the job has failed or is gone; the message says why."""


@dataclasses.dataclass(frozen=True)
class _News:
    """The end of another worker, or of its `fit`, as this worker heard of it.

    Attributes:
        text: The event, in words.
        fit: The number of the `fit` that it has left, if it goes on itself.
        is_fault: True if it is printed even where nobody waits for it.
        is_loss: True if the other process was killed.
        when: The time.
    """

    text: str
    fit: int | None
    is_fault: bool
    is_loss: bool
    when: float


class Watch(Listener):
    """Ends the collectives of a job that has lost a worker.

    Before the first step it ends the process as well: a worker that still
    loads data or traces its model would learn of the loss in its first
    collective only, minutes later.

    Attributes:
        has_begun: True from the first `fit`, `evaluate` or step on.
    """

    def __init__(self, cluster: Cluster, channel: Channel) -> None:
        self._cluster = cluster
        self._channel = channel
        self._news: list[_News] = []
        self._heard = threading.Condition()
        self._cause: str | None = None
        self._end: float | None = None  # time of SIGTERM to this process
        self.has_begun = False
        self._fits = 0
        self._since: float | None = None  # when the present `fit` has begun
        self._hook, sys.excepthook = sys.excepthook, self._uncaught

    # ------------------------------------------------------- this worker's fate
    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """A `fit` or `evaluate` of this worker, as a context.

        Raises:
            WorkerFailedError: If it fails because another worker has.
        """
        if self._since is not None:  # inside of another
            yield
            return
        self.has_begun = True
        self._fits += 1
        self._since = time.monotonic()
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            cause = self._explain(error)
            if cause is not None:
                # Where the collective is in the graph helps nobody.
                raise WorkerFailedError(cause) from None
            self.tell(error, self._fits)
            raise
        finally:
            self._since = None

    def tell(self, error: BaseException, fit: int | None = None) -> None:
        """Tells the others that this worker has failed.

        It leaves the `fit` of a number; None is the end of the process.
        """
        if not isinstance(error, WorkerFailedError):
            self._channel.say({"failed": describe(error), "fit": fit})

    def _uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Tells of an exception that ends this process, and shows it."""
        self.tell(error)
        self._hook(kind, error, trace)

    def _explain(self, error: BaseException) -> str | None:
        """The cause of a failed collective; None for any other error."""
        if not isinstance(error, _OF_OTHERS):
            return None
        with self._heard:
            self._heard.wait_for(lambda: self._cause or self._news, _GRACE)
            heard = [news.text for news in self._news]
            return self._cause or next(iter(heard), None)

    # ------------------------------------------------------ that of the others
    @override
    def hear(self, sender: int, message: Message) -> None:
        fit = message.get("fit")
        if sender == self._channel.index or type(fit) not in (int, NoneType):
            return
        if "failed" in message:
            what = f"has failed: {message['failed']}"
        elif message == LOST:
            what = (
                "is gone without a word: it was killed, or its machine or the "
                "network is down."
            )
        elif message == BYE:
            what = "has ended."
        else:
            return
        text, now = f"{self._cluster.name(sender)} {what}", time.monotonic()
        is_fault, is_loss = message != BYE, message == LOST
        news = _News(text, fit, is_fault, is_loss, now)
        with self._heard:
            self._news.append(news)
            self._heard.notify_all()

    @override
    def tick(self) -> None:
        """Aborts collectives in which this worker waits in vain."""
        with self._heard:
            if self._cause is not None:
                self._terminate()
                return
            self._news = [one for one in self._news if not self._is_past(one)]
            due = next((one for one in self._news if self._is_due(one)), None)
            if due is None:
                return
            self._cause = due.text
            if due.is_loss and not self.has_begun:
                self._end = time.monotonic() + _GRACE
        if due.is_fault:
            print(f"tfkfac: {self._cause}", file=sys.stderr, flush=True)
        abort_collectives(self._cause)

    def _terminate(self) -> None:
        """Ends a process that has lost a worker before the first step.

        A process that waited in a collective has ended by an error before.
        """
        if self._end is not None and time.monotonic() > self._end:
            self._end = None
            if not self.has_begun:
                # To the process, not this thread: Python's handlers run in
                # the main thread, which may sleep.
                os.kill(os.getpid(), signal.SIGTERM)

    def _is_past(self, news: _News) -> bool:
        """True if a worker has left a `fit` that this one has left, too."""
        left = self._fits if self._since is None else self._fits - 1
        return news.fit is not None and left >= news.fit

    def _is_due(self, news: _News) -> bool:
        start = news.when
        if news.fit is not None:
            if self._since is None:  # this worker comes to it later
                return False
            start = max(start, self._since)
        return time.monotonic() > start + _GRACE


# What TensorFlow raises where a collective fails.
_OF_OTHERS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


def describe(error: BaseException) -> str:
    """An error in short, without TensorFlow's traces of code and graph."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        lines = dict.fromkeys(error.message.splitlines())
        text = " ".join(one for one in lines if not _TRACE.match(one))
    return f"{type(error).__name__}: {text}"[:_LONGEST_CAUSE]


# -------------------------------------------------------------- standstill
class Standstill(Listener):
    """Prints where all workers are when no step ends: the first one asks."""

    def __init__(self, names: Sequence[str], channel: Channel) -> None:
        self._names = names
        self._channel = channel
        self._moved: float | None = None
        self._patience = _LONG
        self._asked: float | None = None
        self._places: dict[int, str] = {}

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context in which steps are expected."""
        self.moves()
        try:
            yield
        finally:
            self._moved = None

    def moves(self) -> None:
        """Notes the end of a step."""
        self._moved = time.monotonic()
        self._patience = _LONG

    @override
    def tick(self) -> None:
        """Asks when no step has ended for long; prints the answers."""
        now, moved = time.monotonic(), self._moved
        if self._asked is not None:
            if now > self._asked + _ANSWER:
                self._asked = None
                self._tell()
            return
        is_late = moved is not None and now > moved + self._patience
        if is_late and self._channel.index == 0:
            self._asked = now
            self._places = {}
            self._channel.say({"where": True})

    @override
    def hear(self, sender: int, message: Message) -> None:
        if "where" in message:
            self._channel.say({"place": place()})
        elif "place" in message:
            self._places[sender] = message["place"]

    def _tell(self) -> None:
        lines = [f"tfkfac: no step has ended for {self._patience:.0f} s."]
        for index, name in enumerate(self._names):
            answer = self._places.get(index, "does not answer")
            lines.append(f"tfkfac: {name} {answer}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        self._patience *= 2


def find_standstill(strategy: tf.distribute.Strategy) -> Standstill | None:
    """The standstill of a strategy; None if no replica waits for another."""
    found = getattr(strategy, "standstill", None)
    if found is not None or strategy.num_replicas_in_sync == 1:
        return found
    return _of_this_process() if len(local_devices(strategy)) > 1 else None


@functools.cache
def _of_this_process() -> Standstill:
    """The standstill of the replicas of one process alone."""
    channel = Channel(0, 1, {})
    standstill = Standstill(["this process"], channel)
    channel.start(standstill)
    return standstill


def place() -> str:
    """The functions in which the threads of this process are."""
    found = []
    for identifier, frame in sys._current_frames().items():
        name = pathlib.Path(frame.f_code.co_filename).name
        if identifier != threading.get_ident() and name not in _IDLE:
            found.append(f"{frame.f_code.co_name} ({name}:{frame.f_lineno})")
    return f"is in {', '.join(found)}"
