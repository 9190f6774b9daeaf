"""A worker that trains a small model and records steps of it."""

import dataclasses
import json
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

from timelines.events import Event

# The step of each kind, after some others.
KINDS = {"plain": 3, "factor": 4, "inverse": 5}
MARK = "timeline: "
_NEVER = 1000
_BATCH = 128
# Calls, whose operations are recorded by themselves.
_CALL = re.compile(
    r"(Stateful)?PartitionedCall|__inference_\w+|(Stateless)?(If|While)"
)


def work(mode: str, width: int, depth: int) -> None:
    """Trains, and prints the events of a step of each kind as JSON."""
    import tensorflow as tf

    import tfkfac

    strategy = tfkfac.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build(mode, width, depth)
    x = tf.random.stateless_normal([_BATCH, 16, 16, 3], [0, 0])
    y = tf.range(_BATCH) % 10
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH).repeat()
    batch = next(iter(strategy.experimental_distribute_dataset(data)))

    @tf.function(autograph=False)
    def step() -> Any:
        return strategy.run(model.train_step, args=(batch,))

    for _ in range(min(KINDS.values())):
        step()
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        for kind in KINDS:
            with tf.profiler.experimental.Trace(MARK + kind):
                step()
        tf.profiler.experimental.stop()
        found = read(pathlib.Path(folder))
    blocks = model.optimizer.method.placement.blocks
    kinds = {
        kind: [dataclasses.astuple(event) for event in events]
        for kind, events in found.items()
    }
    result = {"layers": [block.path for block in blocks], "kinds": kinds}
    print(MARK + json.dumps(result), flush=True)


def build(mode: str, width: int, depth: int) -> Any:
    """Compiles the model, with K-FAC that renews at the steps of `KINDS`."""
    import keras
    import tensorflow as tf

    import tfkfac

    def only_at(step: int) -> Any:
        return lambda clock: tf.where(tf.equal(clock, step), 1, _NEVER)

    optimizer = tfkfac.KFAC(
        distribution=mode,
        factor_update_interval=only_at(KINDS["factor"]),
        inverse_update_interval=only_at(KINDS["inverse"]),
    )
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            *(keras.layers.Dense(width, "relu") for _ in range(depth)),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def read(folder: pathlib.Path) -> dict[str, list[Event]]:
    """The operations of the steps that a profile has, by kind of step."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = [
        _event(plane, line, event)
        for plane in space.planes
        if plane.name == "/host:CPU"
        for line in plane.lines
        for event in line.events
    ]
    operations = [event for event in events if _is_operation(event.name)]
    found = {}
    for kind in KINDS:
        (step,) = (event for event in events if event.name == MARK + kind)
        found[kind] = of_step(operations, step)
    return found


def of_step(events: Sequence[Event], step: Event) -> list[Event]:
    """The events of a step, until its end.

    A thread that has handed on its message may have to wait for a processor,
    and ends the event when the step is over.
    """
    return [
        dataclasses.replace(event, end=min(event.end, step.end))
        for event in events
        if step.start <= event.start <= step.end
    ]


def _event(plane: Any, line: Any, event: Any) -> Event:
    """An event in a thread's line of a device's plane."""
    name = plane.event_metadata[event.metadata_id].name
    start = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
    keys = [
        stat.int64_value or stat.uint64_value
        for stat in event.stats
        if plane.stat_metadata[stat.metadata_id].name == "instance_key"
    ]
    end = start + event.duration_ps / 1e12
    return Event(name, start, end, keys[0] if keys else None)


def _is_operation(name: str) -> bool:
    """Whether it is one of a graph that does something itself."""
    parts = re.fullmatch(r"(.*[^:]):(\w+)", name)
    return parts is not None and not _CALL.fullmatch(parts[2])
