"""Regular expressions that cannot hang a job, whoever has written them.

A file of a model has its user's expressions, and Python matches `(a+)+$` in
time that doubles with each letter. TensorFlow's own engine, RE2, is linear. It
knows no look-around and no verbose patterns: those are Python's, if they are
simple.
"""

import functools
import re
from collections.abc import Sequence

import tensorflow as tf

_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
_REPEAT = re.compile(r"[*+{]")
_MOST_REPEATS = 3


def matches_whole(expression: str, names: Sequence[str]) -> bool:
    """Whether an expression that `check_expression` allows matches a name."""
    if re.escape(expression) == expression:
        return expression in names
    if not _is_linear(expression):
        return any(re.fullmatch(expression, name) for name in names)
    with tf.init_scope():
        found = tf.strings.regex_full_match(tf.constant(names), expression)
        return bool(found.numpy().any())


def check_expression(expression: str) -> None:
    """Refuses an expression that is none, or may take for ever.

    Raises:
        ValueError: With the reason.
    """
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(str(error)) from error
    if _is_linear(expression):
        return
    plain = _ESCAPED_OR_CLASS.sub("", expression)
    repeats = len(_REPEAT.findall(plain))
    if _REPEATED_GROUP.search(plain) or repeats > _MOST_REPEATS:
        raise ValueError(
            "with look-around or flags that RE2 does not know it may have no "
            f"repeated group and at most {_MOST_REPEATS} repeats"
        )


@functools.cache
def _is_linear(expression: str) -> bool:
    """Whether RE2 knows an expression."""
    with tf.init_scope():
        try:
            tf.strings.regex_full_match("", expression)
        except tf.errors.InvalidArgumentError:
            return False
    return True
