"""Each worker learns in seconds what has become of the others.

A worker that fails tells the others why; of one that is killed they learn from
its connection. They may be waiting for it in a collective, which TensorFlow
ends only when the other process is gone, and not always then: so the watch
aborts it. A worker that is merely slow is left alone. It says so when no step
ends for long, as where a worker waits for its data for ever.
"""

import contextlib
import dataclasses
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfkfac.cluster.channel import BYE, LOST, Channel
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.lines import Message
from tfkfac.compat.strategies import abort_collectives

# Seconds that a worker has to come to the same end as another by itself, as
# where all of them refuse to begin; and to learn why a collective has failed.
_GRACE = 3.0
_LONGEST_CAUSE = 2000
# Lines of TensorFlow's messages that say where and not what.
_TRACE = re.compile(r"\s|<|Graph execution error|Detected at|Traceback|$")


class WorkerFailedError(RuntimeError):
    """Another worker of the job has failed or is gone; the message says why."""


@dataclasses.dataclass(frozen=True)
class _News:
    """What has become of a worker.

    Attributes:
        text: It, in words.
        fit: The number of the `fit` that it has left, if it goes on itself.
        when: When this worker heard of it.
        is_fault: Whether it is worth a line even where nobody waits for it.
    """

    text: str
    fit: int | None
    when: float
    is_fault: bool


class Watch:
    """Looks after the workers of a job.

    Args:
        cluster: The workers.
        channel: What they say to each other.
    """

    def __init__(self, cluster: Cluster, channel: Channel) -> None:
        self._cluster = cluster
        self._channel = channel
        self._news: list[_News] = []
        self._heard = threading.Condition()
        self._cause: str | None = None
        self._fits = 0
        self._since: float | None = None  # when the present `fit` has begun
        sys.excepthook = _telling(self, sys.excepthook)

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

        Args:
            error: What has happened.
            fit: The number of the `fit` that it leaves; None is the end of
                the process.
        """
        if not isinstance(error, WorkerFailedError):
            self._channel.say({"failed": describe(error), "fit": fit})

    def _explain(self, error: BaseException) -> str | None:
        """Why a collective has failed; None for any other error."""
        if not isinstance(error, _OF_OTHERS):
            return None
        with self._heard:
            self._heard.wait_for(lambda: self._cause or self._news, _GRACE)
            if self._cause is None and self._news:
                return self._news[0].text
            return self._cause

    # ------------------------------------------------------ that of the others
    def hear(self, sender: int, message: Message) -> None:
        """Takes what a worker has said."""
        if sender == self._channel.index:
            return
        name = self._cluster.name(sender)
        if "failed" in message:
            self._add(f"{name} has failed: {message['failed']}", message["fit"])
        elif message == LOST:
            self._add(
                f"{name} is gone without a word: it was killed, or its machine "
                "or the network is down."
            )
        elif message == BYE:
            self._add(f"{name} has ended.", is_fault=False)

    def _add(
        self, text: str, fit: int | None = None, is_fault: bool = True
    ) -> None:
        with self._heard:
            self._news.append(_News(text, fit, time.monotonic(), is_fault))
            self._heard.notify_all()

    def tick(self) -> None:
        """Ends what this worker waits for in vain."""
        with self._heard:
            if self._cause is not None:
                return
            self._news = [one for one in self._news if not self._is_past(one)]
            due = [one for one in self._news if self._is_due(one)]
            if not due:
                return
            self._cause = due[0].text
        if due[0].is_fault:
            print(f"tfkfac: {self._cause}", file=sys.stderr, flush=True)
        abort_collectives(self._cause)

    def _is_past(self, news: _News) -> bool:
        """Whether a worker has left a `fit` that this one has left, too."""
        if news.fit is None:
            return False
        return self._fits > news.fit or (
            self._fits == news.fit and self._since is None
        )

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


def _telling(watch: Watch, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for uncaught exceptions that tells of them first."""

    def tell(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        watch.tell(error)
        hook(kind, error, trace)

    return tell
