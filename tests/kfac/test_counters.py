"""Numbers of all blocks in one variable, saved as one each."""

from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.small import compiled_mlp, data
from tfkfac.kfac.bank import Counters, Number


def test_which_blocks_are_decomposed() -> None:
    """Never before there are statistics; first ones without waiting."""
    counters = Counters(["a", "b", "c", "d"])
    counters.observed.assign([0, 0, 1, 5])
    counters.decomposed.assign([0, 2, 0, 3])
    for due, wanted in ((False, [0, 0, 1, 0]), (True, [0, 0, 1, 1])):
        found = counters.to_decompose(tf.constant(due), counters.asked())
        np.testing.assert_array_equal(found, np.array(wanted, bool))
    np.testing.assert_array_equal(
        counters.without_statistics(), [True, True, False, False]
    )


def test_flags_of_some_blocks() -> None:
    counters = Counters(["a", "b", "c"])
    flags = {2: tf.constant(True), 0: tf.constant(False)}
    for otherwise in (False, True):
        found = counters.flags(flags, otherwise)
        np.testing.assert_array_equal(found, [False, otherwise, True])


def test_numbers_of_blocks_that_stay() -> None:
    before, after = Counters(["a", "b", "c"]), Counters(["new", "c", "a"])
    before.observed.assign([1, 2, 3])
    before.failures.assign([4, 5, 6])
    after.take(before, {1: 2, 2: 0})
    np.testing.assert_array_equal(after.observed, [0, 3, 1])
    np.testing.assert_array_equal(after.failures, [0, 6, 4])
    np.testing.assert_array_equal(after.decomposed, [0, 0, 0])


def test_faults_of_others() -> None:
    """Those that happen on several at once are one; who tells, tells once."""
    mine, theirs = Counters(["a", "b"]), Counters(["a", "b"])

    def exchange() -> None:
        news = [one.news() for one in (mine, theirs)]
        for one, own in zip((mine, theirs), news, strict=True):
            one.hear(own, tf.logical_or(*news))

    def shown(counters: Counters) -> dict[str, int]:
        return {text: n.numpy() for text, n in counters.events() if n.numpy()}

    mine.dropped.assign([1, 0])
    assert shown(mine) == {"factors dropped of a": 1}
    assert shown(theirs) == {}
    for _ in range(2):
        exchange()
        assert shown(mine) == shown(theirs) == {"factors dropped of a": 1}
    theirs.plain.assign([0, 1])
    mine.plain.assign([0, 1])
    theirs.dropped.assign([1, 0])
    exchange()
    both = {"factors dropped of a": 2, "plain gradients in b": 1}
    assert shown(mine) == shown(theirs) == both
    fewer = Counters(["b", "new"])
    fewer.take(mine, {0: 1})
    assert shown(fewer) == {"plain gradients in b": 1}
    assert not np.any(fewer.news())


def test_one_number_is_like_a_variable() -> None:
    numbers = tf.Variable([1, 2, 3], dtype=tf.int64)
    one = Number(numbers, 1)
    assert (int(one.numpy()), one.shape, one.dtype) == (2, [], tf.int64)
    one.assign(tf.constant(7, tf.int64))
    np.testing.assert_array_equal(numbers, [1, 7, 3])


def test_files_have_numbers_of_each_layer() -> None:
    """As they were when each layer had variables of its own."""
    counted = {"observed": (3, 4), "decomposed": (1, 2)}
    counted |= {"rejected": (5, 6), "failures": (7, 8)}
    numbers = {
        f"state:{name}:{layer}": np.int64(values[i])
        for name, values in counted.items()
        for i, layer in enumerate(("hidden", "logits"))
    }
    model = compiled_mlp()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    assert numbers.keys() <= store.keys()
    assert all(np.shape(store[key]) == () for key in numbers)
    optimizer.load_own_variables(store | numbers)
    again: dict[str, Any] = {}
    optimizer.save_own_variables(again)
    assert {key: again[key] for key in numbers} == numbers
    # A step adds to them; the next decomposition is due in four more.
    model.train_on_batch(*data())
    optimizer.save_own_variables(again)
    got = [again[f"state:observed:{name}"] for name in ("hidden", "logits")]
    assert got == [4, 5]
