"""Guards against values that are not finite, and counters of events.

Values that are not finite never reach the weights or the saved state. Each
event is counted, `summary()` shows the counts, and the first event of each
type is logged to standard error.

| not finite | effect | counter | guard |
|---|---|---|---|
| a gradient | skip the step on all replicas | `skipped_steps` | training/step |
| a statistic | no update of these factors | `rejected` | kfac/state |
| a factor | its average restarts | `dropped` | kfac/averages |
| a decomposition | keep the last valid one | `failures` | kfac/averages |
| a preconditioned gradient | plain gradient | `plain` | kfac/natural |
| all trials of a step | skip it | `rejected_steps` | gauss_newton/method |
| an estimation | keep the last directions | `failures` | fosi/update |
| a direction | drop all; plain step | `forgotten` | fosi/layouts |
"""

import collections
import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from tfkfac.compat.functions import shared_call, when
from tfkfac.compat.graphs import in_xla, state_variable
from tfkfac.loss.terms import LossTerms


def count_each(
    happened: tf.Tensor,
    counter: tf.Variable,
    names: Sequence[str],
    message: str | tf.Tensor,
) -> None:
    """Count abnormal events and log the first of each to standard error.

    `happened` has one bool per name, or is a scalar for a single name. The
    counter of the same shape is updated in place. XLA has no strings and cannot
    print: events are only counted.
    """
    if not names:
        return
    is_first = happened & tf.equal(counter, 0)
    counter.assign_add(tf.cast(happened, counter.dtype))
    if in_xla():
        return

    def report() -> None:
        texts = tf.constant(list(names)), tf.convert_to_tensor(message)
        flags = tf.reshape(is_first, [-1])
        shared_call("report", _print, flags, *texts, any_size=True)

    when(tf.reduce_any(is_first), report)


def _print(flags: tf.Tensor, names: tf.Tensor, message: tf.Tensor) -> tf.Tensor:
    """Print a message with the flagged names."""
    flagged = tf.boolean_mask(names, flags)
    flagged = tf.strings.reduce_join(flagged, separator=", ")
    text = tf.strings.join(["tfkfac: ", flagged, ": ", message])
    tf.print(text, output_stream=sys.stderr)
    return tf.constant(0)


# ------------------------------------- steps skipped, batches without examples
class Streak:
    """Consecutive skipped steps of one replica up to now."""

    def __init__(self) -> None:
        self.length = state_variable(0, "int64", "skipped_in_a_row")
        # 1 if the metrics exclude the last batch, because its step was skipped
        # and its loss is not finite; else 0.
        self.excluded = state_variable(0, "int64", "left_out")
        self._bad = state_variable(0, "int64", "gradients_not_finite")
        self._first = state_variable(0, "int64", "first_not_finite")
        self.variables = self.length, self.excluded, self._bad, self._first
        # Paths of the checked gradients, from the last trace.
        self.names: tuple[str, ...] = ()

    def end(self) -> None:
        """Record a step that is not skipped."""
        self.length.assign(tf.zeros_like(self.length))
        self.excluded.assign(tf.zeros_like(self.excluded))

    def extend(self, finite: tf.Tensor, is_lost: tf.Tensor) -> None:
        """Record a skipped step; `finite` has one bool per gradient."""
        # Use float32: GPUs have no kernels for sum and argmax of integers.
        bad = tf.cast(~finite, tf.float32)
        self.length.assign_add(1)
        self.excluded.assign(tf.cast(is_lost, self.excluded.dtype))
        self._bad.assign(tf.cast(tf.reduce_sum(bad), tf.int64))
        self._first.assign(tf.argmax(bad))

    def assign(self, values: Sequence[tf.Tensor], names: Sequence[str]) -> None:
        """Assign the state of another replica: values of `variables`."""
        self.names = tuple(names)
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def check(self, limit: int, name: str) -> int:
        """Return the length; raise an error at the limit. Call eagerly only."""
        if (length := int(self.length.numpy())) < limit:
            return length
        bad = int(self._bad.numpy())
        reason = (
            "gradients are not finite at any loss scale. Is the loss finite "
            "without loss scaling?"
        )
        if bad:
            first = self.names[int(self._first.numpy())]
            reason = (
                f"{bad} of {len(self.names)} gradients are not finite, the "
                f"first is that of '{first}'."
            )
        raise FloatingPointError(
            f"Optimizer '{name}' has skipped {length} steps in a row "
            f"(max_skipped_steps={limit}): {reason} The weights are "
            "those of the last valid step. Check the batches and the loss; a "
            "smaller learning rate or a larger damping may help."
        )


# Number of consecutive batches without an example that causes a warning.
_MAX_EMPTY = 20


def count_empty_batches(
    terms: Sequence[LossTerms], empty: tf.Variable, replica: int
) -> None:
    """Count consecutive empty batches in `empty`; warn at 20.

    Keras and TensorFlow continue with empty batches on workers whose data ends
    before the data of others.
    """
    count = tf.add_n([loss.count for loss in terms])
    length = tf.where(count > 0, tf.zeros_like(empty), empty + 1)
    empty.assign(length)
    if in_xla():  # XLA cannot print
        return

    text = (
        f"tfkfac: the last {_MAX_EMPTY} batches of replica {replica} had no "
        "examples. Has its data ended before the data of others?"
    )
    when(
        tf.equal(length, _MAX_EMPTY),
        lambda: tf.print(text, output_stream=sys.stderr),
    )


# ----------------------------------------------- refusals of a running step
# Marks the message in the error of an assertion, where TensorFlow's text
# surrounds the message.
_PREFIX = "tfkfac refuses: "
_REFUSAL = re.compile(rf"\[{_PREFIX}(.*?)\]$", re.MULTILINE)
# Error of TensorFlow's sparse cross-entropy on CPUs, after a long traceback.
_LABEL = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of "
    r"(\[0, \d+\))"
)


def refuse(condition: tf.Tensor, message: tf.Tensor) -> tf.Operation:
    """Operation that fails with a one-line message if `condition` is True.

    Make later operations depend on it. Do not use it where other replicas would
    wait in a collective.
    """
    text = tf.strings.join([_PREFIX, message])
    return tf.debugging.Assert(tf.logical_not(condition), [text])


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """Convert failures of `refuse` and invalid labels to a ValueError."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if match := _REFUSAL.search(error.message):
            raise ValueError(match[1].replace('\\"', '"')) from error
        if match := _LABEL.search(error.message):
            raise ValueError(
                "Labels of a sparse cross-entropy must be classes in "
                f"{match[2]}, one for each output of the model. "
                f"Received: a label {match[1]}"
            ) from None
        raise


def largest_counts(
    counts: Mapping[tuple[str, int], int],
) -> collections.Counter[str]:
    """Return the maximum count over replicas by event text, if above 0."""
    largest: collections.Counter[str] = collections.Counter()
    for (text, _), count in counts.items():
        largest |= collections.Counter({text: count})
    return largest
