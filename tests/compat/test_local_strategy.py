"""What compat relies on in strategies of one process.

`test_strategy` has those of several.
"""

import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.strategies import local_devices, summing_replicas


@contract(
    "compat.strategies.local_devices",
    "`strategy.extended.worker_devices` has a device for each local replica.",
)
def test_local_devices() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    (device,) = local_devices(strategy)
    assert "CPU:0" in device.upper()


@contract(
    "compat.strategies.summing_replicas",
    "the gradient of `all_reduce` of a replica context is `all_reduce`.",
)
def test_gradients_of_sums_over_replicas() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def gradient(kind: str) -> tf.Tensor:
        x = tf.constant([1.0, 2.0])
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = context.all_reduce(kind, x)
        with summing_replicas(lambda t: 5 * t):
            return tape.gradient(total, x)

    for kind in ("SUM", "MEAN"):  # of one replica
        found = strategy.run(tf.function(gradient), args=(kind,))
        assert found.numpy().tolist() == [5, 5]
