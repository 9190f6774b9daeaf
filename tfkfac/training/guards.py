"""Guards against numbers that are not finite, and counters of events.

A number that is not finite costs one thing and is counted; it never reaches
what is kept. `summary()` shows the counts, and standard error the first of
each kind.

| not finite | costs | counted in | guard |
|---|---|---|---|
| a gradient | the step, everywhere | `skipped_steps` | training/step |
| a statistic | an update of its block's factors | `rejected` | kfac/averages |
| a factor | what is known of its block | `dropped` | kfac/averages |
| a decomposition | this one, the last good stays | `failures` | kfac/averages |
| a preconditioned gradient | the plain one | `plain` | kfac/natural |
| all tries of a step | the step | `rejected_steps` | gauss_newton/method |
| an estimation | this one, the last stays | `failures` | fosi/update |
| a direction | all of them, the step is plain | `forgotten` | fosi/layouts |
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence

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
    """Counts things that should not happen and reports the first of each.

    XLA, which Keras compiles a step with on a GPU, knows no strings and cannot
    print: what it compiles only counts. There is a bool and a number for each
    name, or scalars for the only one. The message goes to standard error.
    """
    if not names:
        return
    new = happened & tf.equal(counter, 0)
    counter.assign_add(tf.cast(happened, counter.dtype))
    if in_xla():
        return

    def report() -> None:
        texts = tf.constant(list(names)), tf.convert_to_tensor(message)
        which = tf.reshape(new, [-1])
        shared_call("report", _print, which, *texts, any_size=True)

    when(tf.reduce_any(new), report)


def _print(new: tf.Tensor, names: tf.Tensor, message: tf.Tensor) -> tf.Tensor:
    """Prints a message on some names."""
    which = tf.boolean_mask(names, new)
    which = tf.strings.reduce_join(which, separator=", ")
    text = tf.strings.join(["tfkfac: ", which, ": ", message])
    tf.print(text, output_stream=sys.stderr)
    return tf.constant(0)


# ------------------------------------- steps skipped, batches without examples
class Streak:
    """Steps that one replica has skipped up to now, without one between.

    Attributes:
        length: Number of them.
        left_out: 1 if the last batch is left out of the metrics, else 0. That
            is where its step is skipped and its loss is not finite.
        names: The gradients that are looked at, in the last trace.
    """

    def __init__(self) -> None:
        self.length = state_variable(0, "int64", "skipped_in_a_row")
        self.left_out = state_variable(0, "int64", "left_out")
        self._bad = state_variable(0, "int64", "gradients_not_finite")
        self._first = state_variable(0, "int64", "first_not_finite")
        self._numbers = self.length, self.left_out, self._bad, self._first
        self.names: tuple[str, ...] = ()

    def end(self) -> None:
        """Notes a step that is not skipped."""
        self.length.assign(tf.zeros_like(self.length))
        self.left_out.assign(tf.zeros_like(self.left_out))

    def extend(self, finite: tf.Tensor, is_lost: tf.Tensor) -> None:
        """Records a skipped step, by a flag for each gradient.

        `is_lost` is true if the loss is not finite either.
        """
        # Of integers a GPU knows neither the sum nor the largest.
        bad = tf.cast(~finite, tf.float32)
        self._lengthen(tf.cast(tf.reduce_sum(bad), tf.int64), is_lost)
        self._first.assign(tf.argmax(bad))

    def overflow(self, is_lost: tf.Tensor) -> None:
        """Records a step that a `LossScaleOptimizer` skips."""
        self._lengthen(tf.zeros_like(self._bad), is_lost)

    def _lengthen(self, bad: tf.Tensor, is_lost: tf.Tensor) -> None:
        self.length.assign_add(1)
        self.left_out.assign(tf.cast(is_lost, self.left_out.dtype))
        self._bad.assign(bad)

    def told(self) -> tf.Tensor:
        """The streak as float64 numbers, for other replicas."""
        return tf.stack([tf.cast(n, tf.float64) for n in self._numbers])

    def take(self, told: tf.Tensor, names: Sequence[str]) -> None:
        """Makes it that of another replica, which has told of it."""
        self.names = tuple(names)
        for number, value in zip(self._numbers, tf.unstack(told), strict=True):
            number.assign(tf.cast(value, number.dtype))

    def check(self, most: int, name: str) -> int:
        """Returns the length, below the limit of an optimizer. Not in graphs.

        Raises:
            FloatingPointError: If it has reached the limit.
        """
        if (length := int(self.length.numpy())) < most:
            return length
        raise FloatingPointError(
            f"Optimizer '{name}' has skipped {length} steps in a row "
            f"(max_skipped_steps={most}): {self._reason()} The weights are "
            "those of the last good step. Look at the batches and the loss; a "
            "smaller learning rate or a larger damping may help."
        )

    def _reason(self) -> str:
        """The gradients that were not finite in the last of them."""
        bad = int(self._bad.numpy())
        if bad == 0:
            return (
                "gradients are not finite at any loss scale. Is the loss "
                "finite without one?"
            )
        first = self.names[int(self._first.numpy())]
        return (
            f"{bad} of {len(self.names)} gradients are not finite, the first "
            f"of them that of '{first}'."
        )


# So many batches without an example are no coincidence.
_MANY = 20


def note_batch(
    terms: Sequence[LossTerms], empty: tf.Variable, replica: int
) -> None:
    """Warns when a replica has had no examples for 20 batches.

    Keras and TensorFlow go on with empty batches, where the data of one worker
    ends before that of the others. The variable counts such batches in a row.
    """
    count = tf.add_n([loss.count for loss in terms])
    now = tf.where(count > 0, tf.zeros_like(empty), empty + 1)
    empty.assign(now)
    if in_xla():  # which cannot print
        return

    def report() -> tf.Tensor:
        tf.print(
            f"tfkfac: the last {_MANY} batches of replica {replica} had no "
            "examples. Has its data ended before that of others?",
            output_stream=sys.stderr,
        )
        return tf.constant(0)

    tf.cond(tf.equal(now, _MANY), report, lambda: tf.constant(0))


# ----------------------------------------------- refusals of a running step
# A graph can only assert. Its error has the message somewhere in the middle,
# so it bears a sign, by which `fit` finds it.
_SIGN = "tfkfac refuses: "
_TEXT = re.compile(rf"\[{_SIGN}(.*?)\]$", re.MULTILINE)
# What TensorFlow's sparse cross-entropy says, on a CPU, below a page of files.
_LABEL = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of "
    r"(\[0, \d+\))"
)


def refuse(condition: tf.Tensor, message: tf.Tensor) -> tf.Operation:
    """Ends a step with a message of one line, if a scalar is true.

    Not where other replicas would wait in a collective. What is returned has
    to be waited for before anything that is refused.
    """
    text = tf.strings.join([_SIGN, message])
    return tf.debugging.Assert(tf.logical_not(condition), [text])


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """Raises what a step in it has refused, and labels that are no classes.

    Raises:
        ValueError: With the message.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if found := _TEXT.search(error.message):
            raise ValueError(found[1].replace('\\"', '"')) from error
        if found := _LABEL.search(error.message):
            raise ValueError(
                "Labels of a sparse cross-entropy must be classes in "
                f"{found[2]}, one for each output of the model. "
                f"Received: a label {found[1]}"
            ) from None
        raise
