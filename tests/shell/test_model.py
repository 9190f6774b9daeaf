"""Descriptions of models that workers compare; errors name differences."""

import json
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers.schedules import CosineDecay

import tfkfac
from tests.support.schedules import Formula
from tfkfac.distributed.agreement import find_differences
from tfkfac.shell.model import describe_model, plain

KFAC, SGD = tfkfac.KFAC, keras.optimizers.SGD


def network(
    optimizer: Any = None,
    loss: Any = "mse",
    policy: str = "float32",
    name: str | None = None,
    activation: str = "tanh",
) -> Any:
    hidden = layers.Dense(4, activation, name="hidden", dtype=policy)
    out = layers.Dense(2, name="out")
    model = keras.Sequential(
        [keras.Input((3,)), hidden, layers.Dropout(0.5), out], name=name
    )
    model.compile(optimizer or KFAC(), loss, metrics=["mae"])
    return model


def differences(one: Any, other: Any) -> list[str]:
    shown = [
        json.loads(json.dumps(m.optimizer.description())) for m in (one, other)
    ]
    return find_differences(shown)


def rescheduled() -> Any:
    optimizer = KFAC()
    optimizer.learning_rate = 0.25
    return optimizer


CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"activation": "relu"},
        "layer 1 'hidden', activation: 'tanh' on worker 0, 'relu' on worker 1",
    ),
    (
        {"policy": "mixed_bfloat16"},
        "layer 1 'hidden', dtype policy: 'float32' on worker 0, "
        "'mixed_bfloat16' on worker 1",
    ),
    ({"loss": "mae"}, "loss: 'mse' on worker 0, 'mae' on worker 1"),
    ({"loss": keras.losses.Huber(2.0)}, "loss: 'mse' on worker 0"),
    ({"optimizer": rescheduled()}, "inner optimizer's learning_rate: 0.1"),
    (
        {"optimizer": KFAC(SGD(0.1, 0.5, weight_decay=0.1))},
        "inner optimizer's weight_decay: None on worker 0, 0.1 on worker 1",
    ),
    (
        {"optimizer": KFAC(damping=CosineDecay(0.1, 9))},
        "argument damping: 0.01 on worker 0, {'class': 'CosineDecay'",
    ),
    (
        {"optimizer": KFAC(skip_layers=["out"])},
        "argument skip_layers: [] on worker 0, ['out'] on worker 1",
    ),
]


@pytest.mark.parametrize(("options", "want"), CASES)
def test_the_difference_is_named(options: dict[str, Any], want: str) -> None:
    found = differences(network(), network(**options))
    assert found[0].startswith(want), found


def test_a_layer_that_is_frozen() -> None:
    model = network()
    found = [describe_model(model)]
    model.layers[0].trainable = False
    found.append(describe_model(model))
    want = "layer 1 'hidden', trainable: True on worker 0, False on worker 1"
    assert want in find_differences(found)


def test_ignored_differences() -> None:
    """Counted names, seeds and object addresses may differ."""

    def mine(value: Any) -> Any:
        return value

    pair = [
        network(KFAC(damping=Formula(mine), name=name), name=name)
        for name in ("first", "second")
    ]
    assert differences(*pair) == []
    values = [np.nan, np.float32(2), mine, {"seed": 3}, object()]
    assert plain(values) == ["nan", 2.0, mine.__qualname__, {}, "object"]
    assert plain(np.ones(2)) != plain(np.zeros(2))
    assert plain(np.ones(2)) == plain(np.ones(2))
