"""What compat relies on in strategies of one process.

`test_strategy` has those of several.
"""

import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.strategy import local_devices


@contract(
    "compat.strategy.local_devices",
    "`strategy.extended.worker_devices` has a device for each local replica.",
)
def test_local_devices() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    (device,) = local_devices(strategy)
    assert "CPU:0" in device.upper()
