"""Where each worker is, when training stands still for long.

It may be healthy, as a first step that is long compiled, so this is told and
nothing is ended.
"""

import contextlib
import functools
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfkfac.cluster.channel import Channel
from tfkfac.cluster.lines import Message
from tfkfac.compat.strategies import local_devices

# Seconds without a step until workers are asked, and for them to answer.
_LONG = 60.0
_ANSWER = 2.0
# Threads wait there for something to do.
_IDLE = frozenset({"threading.py", "selectors.py", "queue.py", "thread.py"})


class Standstill:
    """The first worker asks the others where they are; all answer.

    Args:
        names: What the workers are called.
        channel: What they say to each other.
    """

    def __init__(self, names: Sequence[str], channel: Channel) -> None:
        self._names = names
        self._channel = channel
        self._moved: float | None = None
        self._patience = _LONG
        self._asked: float | None = None
        self._places: dict[int, str] = {}

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The time in which steps are to be expected, as a context."""
        self.moves()
        try:
            yield
        finally:
            self._moved = None

    def moves(self) -> None:
        """A step has ended."""
        self._moved = time.monotonic()
        self._patience = _LONG

    def tick(self) -> None:
        """Asks, when it is time; tells what has been answered."""
        now, moved = time.monotonic(), self._moved
        if self._asked is not None:
            if now > self._asked + _ANSWER:
                self._asked = None
                self._tell()
        elif (
            self._channel.index == 0
            and moved is not None
            and now > moved + self._patience
        ):
            self._asked = now
            self._places = {}
            self._channel.say({"where": True})

    def hear(self, sender: int, message: Message) -> None:
        """Takes what a worker has said."""
        if "where" in message:
            self._channel.report({"place": place()})
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
    """Who looks after the training under a strategy, if anybody does.

    Replicas wait for each other, on several workers or in this process alone.
    """
    found = getattr(strategy, "standstill", None)
    if found is not None or strategy.num_replicas_in_sync == 1:
        return found
    return _of_this_process() if len(local_devices(strategy)) > 1 else None


@functools.cache
def _of_this_process() -> Standstill:
    """The one of a process whose replicas nobody else looks after."""
    channel = Channel(0, 1, {})
    standstill = Standstill(["this process"], channel)
    channel.start(standstill)
    return standstill


def place() -> str:
    """The functions that the threads of this process are in."""
    found = []
    for identifier, frame in sys._current_frames().items():
        name = pathlib.Path(frame.f_code.co_filename).name
        if identifier != threading.get_ident() and name not in _IDLE:
            found.append(f"{frame.f_code.co_name} ({name}:{frame.f_lineno})")
    return f"is in {', '.join(found)}"
