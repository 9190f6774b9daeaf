"""Internals of replicas that share a process."""

import itertools
from typing import Any

import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tests.support.strategies import strategy
from tfkfac.compat.strategies import order_by_replica


def orders(apart: bool) -> dict[str, list[str]]:
    """Return the control inputs of each print and lookup of two replicas.

    Those of the first replica come first. Each replica prints in the forward
    and backward pass, on a device of the user and in another scope, and looks
    up a value in a table.
    """
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], [2, 3]), -1
    )

    @tf.custom_gradient
    def loud(x: Any) -> Any:
        def backwards(upstream: Any) -> Any:
            tf.print("backwards")
            return upstream

        return x, backwards

    def step(x: Any) -> Any:
        if apart:
            order_by_replica(strategy().extended.worker_devices)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loud(x)
        tf.print("first")
        with tf.device("CPU:0"):
            tf.print("placed")
        with tf.name_scope("out/of/it/"):
            tf.print("named")
        return tape.gradient(y, x), table.lookup(tf.constant(0))

    @tf.function
    def run() -> Any:
        return strategy().run(step, args=(tf.constant(1.0),))

    operations = run.get_concrete_function().graph.get_operations()
    found = {
        operation.name: operation
        for operation in operations
        if operation.type in ("PrintV2", "LookupTableFindV2")
    }
    return {
        name: [o.name for o in operation.control_inputs if o.name in found]
        for name, operation in found.items()
    }


@contract(
    "compat.strategies.order_by_replica",
    "Resolvers change the order of operations; the name scope or the device"
    " tells the replica.",
)
@pytest.mark.parametrize(
    "apart", [False, True], ids="mirrored: apart={}".format
)
def test_stateful_operations_are_ordered_per_replica(
    on_workers: Any, apart: bool
) -> None:
    """Program order per replica; else one common order."""
    (result,) = on_workers("mirrored", orders, apart)
    names = list(result)
    assert len(names) == 10, names
    before = {after: [first] for first, after in itertools.pairwise(names)}
    # Lookups of a table are ordered per table, except in replica 1.
    del before[names[4]], before[names[5]]
    if not apart:
        before |= {names[5]: [names[3]], names[9]: [names[4]]}
    assert result == {name: before.get(name, []) for name in names}
