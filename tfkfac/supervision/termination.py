"""The signal SIGTERM as a request, which training answers after a batch."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from tfkfac.cluster.stopping import Stopping

# What a shell calls the end of a process by it.
EXIT_CODE = 128 + signal.SIGTERM


class Termination:
    """A context in which SIGTERM ends this process after a batch, not at once.

    The second one does so at once; and so does, when the context ends, one that
    nobody has answered.

    Args:
        stopping: Where all workers stop.
    """

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping
        self._before: Any = None
        self._is_asked = False

    def __enter__(self) -> Self:
        # Python lets no other thread choose what a signal does.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if self._is_asked:
            signal.raise_signal(signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def batch_ends(self) -> bool:
        """Counts a batch; whether training has to end after it, everywhere."""
        if self._is_asked:
            self._stopping.request()
        if not self._stopping.batch_ends():
            return False
        self._is_asked = False
        return True
