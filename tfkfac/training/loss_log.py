"""Likelihoods that the losses of a job were taken for, step by step."""

from typing import NamedTuple

import tensorflow as tf

from tfkfac.compat.graphs import state_variable
from tfkfac.loss.recognition import Verdict
from tfkfac.loss.terms import LossTerms
from tfkfac.training.guards import count_events


class _Log(NamedTuple):
    """Counts of one loss on one replica.

    Attributes:
        loss: Name of the loss.
        names: The likelihoods that it could be of.
        counts: Number of steps in which it was each of them.
        unknown: Number of steps in which it was none.
        unit: Its unit in the last step.
    """

    loss: str
    names: tuple[str, ...]
    counts: tf.Variable
    unknown: tf.Variable
    unit: tf.Variable


class LossLog:
    """Log of the likelihoods that losses of the user's own have been."""

    def __init__(self) -> None:
        self._logs: dict[tuple[int, int, tuple[str, ...]], _Log] = {}

    def note(
        self,
        losses: tuple[LossTerms, ...],
        rank: int,
        device: str | None,
        optimizer: str,
        instead: str,
    ) -> None:
        """Notes a step.

        Args:
            losses: The terms of its losses, with verdicts.
            rank: The replica.
            device: Its device.
            optimizer: Name of the optimizer.
            instead: What is done with a loss that is no likelihood.
        """
        for place, loss in enumerate(losses):
            if loss.verdict is None or loss.call is None:
                continue
            key = rank, place, loss.verdict.names
            if key not in self._logs:
                with tf.init_scope(), tf.device(device):
                    self._logs[key] = _new_log(loss.call.loss.name, key[2])
            _note(self._logs[key], loss.verdict, optimizer, instead)

    def lines(self) -> list[str]:
        """Lines for `summary`."""
        return [_text(log) for log in self._of_first()]

    def events(self) -> list[tuple[str, tf.Variable]]:
        """Steps in which a loss was of no likelihood."""
        return [
            (
                f"steps whose loss '{log.loss}' was a multiple of no "
                "likelihood",
                log.unknown,
            )
            for log in self._of_first()
        ]

    def _of_first(self) -> list[_Log]:
        """Logs of the first replica of this process."""
        first = min((rank for rank, *_ in self._logs), default=0)
        return [log for (rank, *_), log in self._logs.items() if rank == first]


def _new_log(loss: str, names: tuple[str, ...]) -> _Log:
    return _Log(
        loss,
        names,
        state_variable([0] * len(names), "int64", "likelihoods"),
        state_variable(0, "int64", "no_likelihood"),
        state_variable(1.0, "float64", "unit"),
    )


def _note(log: _Log, verdict: Verdict, optimizer: str, instead: str) -> None:
    counted = tf.cast(verdict.is_counted, tf.int64)
    which = tf.one_hot(verdict.index, len(log.names), dtype=tf.int64)
    log.counts.assign_add(which * counted)
    log.unit.assign(verdict.unit)
    count_events(
        [verdict.is_counted & ~verdict.is_known],
        [log.unknown],
        [optimizer],
        f"loss '{log.loss}' is a multiple of no likelihood in this step: "
        f"{instead}. `tfkfac.register_distribution` declares the distribution "
        "of a loss.",
    )


def _text(log: _Log) -> str:
    """One line on a loss."""
    counts = zip(log.names, log.counts.numpy(), strict=True)
    parts = [f"{name} in {n:,} steps" for name, n in counts if n]
    if unknown := int(log.unknown.numpy()):
        parts.append(f"no likelihood in {unknown:,} steps")
    known = ", ".join(parts) or "no step yet"
    return (
        f"Loss '{log.loss}' is taken for: {known}; unit "
        f"{float(log.unit.numpy()):.4g} in the last."
    )
