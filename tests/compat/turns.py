"""Threads that take turns."""

import threading
from collections.abc import Callable


def in_turns(*scripts: Callable[[Callable[[], None]], None]) -> None:
    """Runs threads one at a time, each until it calls its argument.

    That is how MirroredStrategy runs replicas that meet in a collective.
    """
    turns = [threading.Semaphore(0) for _ in scripts]
    running, errors = list(range(len(scripts))), []

    def hand_on(own: int) -> None:
        after = [i for i in running if i > own] or running
        if after:
            turns[after[0]].release()

    def work(own: int) -> None:
        def switch() -> None:
            hand_on(own)
            assert turns[own].acquire(timeout=30)

        assert turns[own].acquire(timeout=30)
        try:
            scripts[own](switch)
        except BaseException as error:
            errors.append(error)
        running.remove(own)
        hand_on(own)

    threads = [
        threading.Thread(target=work, args=[i]) for i in range(len(scripts))
    ]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
