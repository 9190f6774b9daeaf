"""What happens at a NaN: event counters, and who guards what.

A number that is not finite costs one thing and is counted; it never reaches
what is kept. `summary()` shows the counts, and standard error the first of
each kind.

| not finite | costs | counted in | guard |
|---|---|---|---|
| a gradient | the step, everywhere | `skipped_steps` | training/step |
| a statistic | an update of its block's factors | `rejected` | kfac/averages |
| a factor | what is known of its block | `dropped` | kfac/averages |
| a decomposition | this one, the last good stays | `failures` | solvers/base |
| a preconditioned gradient | the plain one | `plain` | kfac/precondition |
| all tries of a step | the step | `rejected_steps` | gauss_newton/method |
| an estimation | this one, the last stays | `failures` | fosi/update |
| a direction | all of them, the step is plain | `forgotten` | fosi/layouts |
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfkfac.compat.branches import when
from tfkfac.compat.calls import call_of_any_size
from tfkfac.compat.graphs import in_xla


def count_events(
    happened: Sequence[tf.Tensor],
    counters: Sequence[tf.Variable],
    names: Sequence[str],
    message: str,
) -> None:
    """Counts things that should not happen and reports the first of each.

    XLA, which Keras compiles a step with on a GPU, knows no strings and cannot
    print: what it compiles only counts.

    Args:
        happened: A scalar bool for each name.
        counters: An integer variable for each name.
        names: What it happened to.
        message: What to say of the names on standard error.
    """
    if not names:
        return
    flags, counts = tf.stack(list(happened)), tf.stack(list(counters))
    _report(tf.logical_and(flags, tf.equal(counts, 0)), names, message)
    for flag, counter in zip(happened, counters, strict=True):
        counter.assign_add(tf.cast(flag, counter.dtype))


def count_each(
    happened: tf.Tensor,
    counter: tf.Variable,
    names: Sequence[str],
    message: str,
) -> None:
    """The same with one bool and one number for each name in a tensor."""
    if not names:
        return
    _report(tf.logical_and(happened, tf.equal(counter, 0)), names, message)
    counter.assign_add(tf.cast(happened, counter.dtype))


def _report(new: tf.Tensor, names: Sequence[str], message: str) -> None:
    """Says what has happened for the first time."""
    if in_xla():
        return

    def report() -> None:
        texts = tf.constant(list(names)), tf.constant(message)
        call_of_any_size("report", _print, new, *texts)

    when(tf.reduce_any(new), report)


def _print(new: tf.Tensor, names: tf.Tensor, message: tf.Tensor) -> tf.Tensor:
    """Says of some names what has happened."""
    which = tf.boolean_mask(names, new)
    which = tf.strings.reduce_join(which, separator=", ")
    text = tf.strings.join(["tfkfac: ", which, ": ", message])
    tf.print(text, output_stream=sys.stderr)
    return tf.constant(0)


# ----------------------------------------------- refusals of a running step
# A graph can only assert. Its error has the message somewhere in the middle,
# so it bears a sign, by which `fit` finds it.
_SIGN = "tfkfac refuses: "
_TEXT = re.compile(rf"\[{_SIGN}(.*?)\]$", re.MULTILINE)


def refuse(condition: tf.Tensor, message: tf.Tensor) -> tf.Operation:
    """Ends a step with a message.

    Not where other replicas would wait in a collective.

    Args:
        condition: Whether to, a scalar.
        message: Why, a string of one line.

    Returns:
        What to wait for before anything that is refused.
    """
    text = tf.strings.join([_SIGN, message])
    return tf.debugging.Assert(tf.logical_not(condition), [text])


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """Raises what a step in it has refused.

    Raises:
        ValueError: With the message.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _TEXT.search(error.message)
        if found is None:
            raise
        raise ValueError(found[1].replace('\\"', '"')) from error
