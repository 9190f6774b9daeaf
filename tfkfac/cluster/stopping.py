"""A stop of all workers after the same batch, at the request of one.

It is no collective: nobody waits until there is a request. Then the thread of
each worker announces the batch after which its training will wait at the
latest; all continue to the largest announced batch.
"""

import threading

from typing_extensions import override

from tfkfac.cluster.channel import BYE, LOST, Channel, Listener, Message


class Stopping(Listener):
    """The batch after which all workers stop.

    Batches are counted from the start of the process; all workers have to
    count the same ones. One worker alone has no channel.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = channel
        self._workers = set(range(1 if channel is None else channel.size))
        # What is said may be heard at once, by the thread that says it.
        self._changed = threading.Condition()
        self._done = 0
        self._promises: dict[int, int] = {}
        self._own: int | None = None
        self._is_alone = False

    def request(self) -> None:
        """Requests that all workers stop soon."""
        if self._own is None:
            self._say({"stop": True})

    def _say(self, message: Message) -> None:
        if self._channel is None:
            self.hear(0, message)
        else:
            self._channel.say(message)

    def batch_ends(self) -> bool:
        """Counts a batch; returns True if training has to stop after it.

        After a request it waits for the announcements of the others.
        """
        with self._changed:
            self._done += 1
            if self._own is None or self._done < self._own:
                return False
            self._changed.wait_for(
                lambda: self._is_alone or self._promises.keys() == self._workers
            )
            # A worker may be gone because it has stopped after this batch.
            if self._promises.keys() != self._workers:
                return False  # the next collective raises the cause
            is_last = self._done == max(self._promises.values())
            if is_last:
                self._own = None
                self._promises.clear()
            return is_last

    @override
    def hear(self, sender: int, message: Message) -> None:
        with self._changed:
            if "stop" in message and self._own is None:
                self._own = self._done + 1
                self._say({"stops after": self._own})
            elif type(message.get("stops after")) is int:
                self._promises[sender] = message["stops after"]
            elif message in (LOST, BYE):
                self._is_alone = True
            self._changed.notify_all()
