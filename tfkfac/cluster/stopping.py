"""Stop all workers after the same batch when any worker requests a stop.

There is no collective, and no worker waits before a request. After a request
each worker announces, in the thread that receives events, the batch after which
it will wait. All workers stop after the largest announced batch.
"""

import threading

from typing_extensions import override

from tfkfac.cluster.events import EXITED, LOST, Event, EventLog, Listener


class Stopping(Listener):
    """Agreement on the batch after which all workers stop.

    All workers must count the same batches from the start of the process.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._workers = set(range(log.size))
        self._changed = threading.Condition()
        self._num_batches = 0
        self._local_stop: int | None = None
        self._stops: dict[int, int] = {}  # announced batch of each worker
        self._peer_has_ended = False

    def end_batch(self, is_requested: bool = False) -> bool:
        """Count a batch; return True if training must stop after it.

        `is_requested` requests a stop of all workers.
        """
        if is_requested and self._local_stop is None:
            self._log.post({"stop": True})
        with self._changed:
            self._num_batches += 1
            if self._local_stop is None or self._num_batches < self._local_stop:
                return False
            # Wait for the announcements of the other workers.
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
    def on_event(self, sender: int, event: Event) -> None:
        with self._changed:
            if "stop" in event and self._local_stop is None:
                self._local_stop = self._num_batches + 1
                self._log.post({"stops after": self._local_stop})
            elif "stops after" in event:
                self._stops[sender] = event["stops after"]
            elif event == EXITED or LOST in event:
                self._peer_has_ended = True
            self._changed.notify_all()
