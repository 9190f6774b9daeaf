"""What workers compare: each thing that they may differ in is named."""

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tfkfac.distributed.agreement import find_differences, first_of
from tfkfac.shell.model import describe_model, plain


def network(
    optimizer: Any = None,
    loss: Any = "mse",
    policy: str = "float32",
    name: str | None = None,
    **options: Any,
) -> Any:
    options = {"activation": "tanh", **options}
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, name="hidden", dtype=policy, **options),
            layers.Dropout(0.5),
            layers.Dense(2, name="out"),
        ],
        name=name,
    )
    model.compile(optimizer or tfkfac.KFAC(), loss, metrics=["mae"])
    return model


def differences(one: Any, other: Any) -> list[str]:
    shown = [
        json.loads(json.dumps(m.optimizer.description())) for m in (one, other)
    ]
    return find_differences(shown)


def frozen() -> Any:
    model = network()
    model.layers[0].trainable = False
    return model


def rescheduled() -> Any:
    model = network()
    model.optimizer.learning_rate = 0.25
    return model


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "activation": (
        lambda: network(activation="relu"),
        "layer 1 'hidden', activation: 'tanh' on worker 0, 'relu' on worker 1",
    ),
    "initializer": (
        lambda: network(kernel_initializer="zeros"),
        "layer 1 'hidden', kernel_initializer",
    ),
    "policy": (
        lambda: network(policy="mixed_bfloat16"),
        "layer 1 'hidden', dtype policy: 'float32' on worker 0, "
        "'mixed_bfloat16' on worker 1",
    ),
    "loss": (
        lambda: network(loss="mae"),
        "loss: 'mse' on worker 0, 'mae' on worker 1",
    ),
    "loss with arguments": (
        lambda: network(loss=keras.losses.Huber(2.0)),
        "loss: 'mse' on worker 0",
    ),
    "rate": (
        rescheduled,
        "inner optimizer's learning_rate: 0.1",
    ),
    "decay": (
        lambda: network(
            tfkfac.KFAC(keras.optimizers.SGD(0.1, 0.5, weight_decay=0.1))
        ),
        "inner optimizer's weight_decay: None on worker 0, 0.1 on worker 1",
    ),
    "schedule": (
        lambda: network(
            tfkfac.KFAC(damping=keras.optimizers.schedules.CosineDecay(0.1, 9))
        ),
        "argument damping: 0.01 on worker 0, {'class': 'CosineDecay'",
    ),
    "skipped layers": (
        lambda: network(tfkfac.KFAC(skip_layers=["out"])),
        "argument skip_layers: [] on worker 0, ['out'] on worker 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_difference_is_named(case: str) -> None:
    make, want = CASES[case]
    found = differences(network(), make())
    assert found[0].startswith(want), found


def test_a_layer_that_is_frozen() -> None:
    found = [describe_model(model) for model in (network(), frozen())]
    assert (
        "layer 1 'hidden', trainable: True on worker 0, False on worker 1"
        in (find_differences(found))
    )


def test_what_may_differ() -> None:
    """Names given by counting, seeds, and objects that are made anew."""

    def mine(iteration: Any) -> Any:
        return 0.1

    pair = [
        network(tfkfac.KFAC(damping=mine, name=name), name=name)
        for name in ("first", "second")
    ]
    assert differences(*pair) == []
    assert plain([np.nan, np.float32(2), mine, {"seed": 3}, object()]) == [
        "nan",
        2.0,
        f"{mine.__qualname__}",
        {},
        "object",
    ]
    assert plain(np.ones(2)) != plain(np.zeros(2))
    assert plain(np.ones(2)) == plain(np.ones(2))


def test_one_difference_is_often_followed_by_others() -> None:
    assert first_of(list("abc")) == "a; b; c"
    assert first_of(list("abcdef")) == "a; b; c; d; and 2 more"
