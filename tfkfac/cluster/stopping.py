"""Stop all workers after the same batch when any worker requests a stop.

There is no collective, and no worker waits before a request. After a request
each worker announces, in the channel's thread, the batch after which it will
wait. All workers stop after the largest announced batch.
"""

import threading

from typing_extensions import override

from tfkfac.cluster.channel import (
    PEER_EXITED,
    PEER_LOST,
    Channel,
    Listener,
    Message,
)


class Stopping(Listener):
    """Agreement on the batch after which all workers stop.

    Batches are counted from the start of the process. All workers must count
    the same batches. The channel is None if there is one worker.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = channel
        self._workers = set(range(1 if channel is None else channel.size))
        # Reentrant: `broadcast` calls `on_message` in the same thread.
        self._changed = threading.Condition()
        self._num_batches = 0
        self._local_stop: int | None = None
        self._stops: dict[int, int] = {}  # announced batch of each worker
        self._peer_has_ended = False

    def request(self) -> None:
        """Request a stop of all workers."""
        if self._local_stop is None:
            self._broadcast({"stop": True})

    def _broadcast(self, message: Message) -> None:
        if self._channel is None:
            self.on_message(0, message)
        else:
            self._channel.broadcast(message)

    def end_batch(self) -> bool:
        """Count a batch; return True if training must stop after it.

        After a request, wait for the announcements of the other workers.
        """
        with self._changed:
            self._num_batches += 1
            if self._local_stop is None or self._num_batches < self._local_stop:
                return False
            self._changed.wait_for(
                lambda: (
                    self._peer_has_ended or self._stops.keys() == self._workers
                )
            )
            # `_peer_has_ended` alone is no error: a worker that has stopped
            # after this batch may already have exited.
            if self._stops.keys() != self._workers:
                return False  # the next collective raises the error
            is_last = self._num_batches == max(self._stops.values())
            if is_last:
                self._local_stop = None
                self._stops.clear()
            return is_last

    @override
    def on_message(self, sender: int, message: Message) -> None:
        with self._changed:
            if "stop" in message and self._local_stop is None:
                self._local_stop = self._num_batches + 1
                self._broadcast({"stops after": self._local_stop})
            elif type(message.get("stops after")) is int:
                self._stops[sender] = message["stops after"]
            elif message in (PEER_LOST, PEER_EXITED):
                self._peer_has_ended = True
            self._changed.notify_all()
