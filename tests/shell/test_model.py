"""Descriptions of models that workers compare; errors name differences."""

import json
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers.schedules import CosineDecay

import tfkfac
from tests.support.schedules import Formula
from tfkfac.distributed.agreement import find_differences
from tfkfac.shell.model import plain

KFAC, SGD = tfkfac.KFAC, keras.optimizers.SGD


def network(
    optimizer: Any = None,
    loss: Any = "mse",
    policy: str = "float32",
    name: str | None = None,
    activation: str = "tanh",
    trainable: bool = True,
) -> Any:
    hidden = layers.Dense(4, activation, name="hidden", dtype=policy)
    hidden.trainable = trainable
    out = layers.Dense(2, name="out")
    model = keras.Sequential(
        [keras.Input((3,)), hidden, layers.Dropout(0.5), out], name=name
    )
    model.compile(optimizer or KFAC(step="natural"), loss, metrics=["mae"])
    return model


def differences(first: Any, second: Any) -> list[str]:
    descriptions = [
        json.loads(json.dumps(model.optimizer.description()))
        for model in (first, second)
    ]
    return find_differences(descriptions)


def other_rate() -> Any:
    optimizer = KFAC(step="natural")
    optimizer.learning_rate = 0.25
    return optimizer


CASES: dict[str, dict[str, Any]] = {
    "layer 1 'hidden', activation: 'tanh' on worker 0, 'relu' on worker 1": {
        "activation": "relu"
    },
    "layer 1 'hidden', dtype policy: 'float32' on worker 0, "
    "'mixed_bfloat16' on worker 1": {"policy": "mixed_bfloat16"},
    "layer 1 'hidden', trainable: True on worker 0, False on worker 1": {
        "trainable": False
    },
    "loss: 'mse' on worker 0": {"loss": keras.losses.Huber(2.0)},
    "learning rate set in training: -1.0 on worker 0, 0.25": {
        "optimizer": other_rate()
    },
    "inner optimizer's weight_decay: None on worker 0, 0.1 on worker 1": {
        "optimizer": KFAC(SGD(0.1, 0.5, weight_decay=0.1))
    },
    "argument damping: 0.01 on worker 0, {'class': 'CosineDecay'": {
        "optimizer": KFAC(step="natural", damping=CosineDecay(0.1, 9))
    },
    "argument skip_layers: [] on worker 0, ['out'] on worker 1": {
        "optimizer": KFAC(step="natural", skip_layers=["out"])
    },
    "argument only_layers: None on worker 0, ['out'] on worker 1": {
        "optimizer": KFAC(step="natural", only_layers=["out"])
    },
}


def test_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without a GPU, or by TensorFlow's ring, would wait forever."""
    hints = iter(["nccl", "ring"])
    monkeypatch.setattr(
        tfkfac.shell.optimizer,
        "find_topology",
        lambda strategy: SimpleNamespace(hint=next(hints)),
    )
    want = "collectives: 'nccl' on worker 0, 'ring' on worker 1"
    assert differences(network(), network()) == [want]


def test_differences_are_named() -> None:
    first = network()
    for want, options in CASES.items():
        texts = differences(first, network(**options))
        assert any(text.startswith(want) for text in texts), texts


def test_ignored_differences() -> None:
    """Automatic names, seeds and object addresses may differ."""

    def function(value: Any) -> Any:
        return value

    pair = [
        network(
            KFAC(step="natural", damping=Formula(function), name=name),
            name=name,
        )
        for name in ("first", "second")
    ]
    assert differences(*pair) == []
    values = [np.nan, np.float32(2), function, {"seed": 3}, object()]
    assert plain(values) == ["nan", 2.0, function.__qualname__, {}, "object"]
    assert plain(np.ones(2)) != plain(np.zeros(2))
    assert plain(np.ones(2)) == plain(np.ones(2))


@pytest.mark.parametrize("is_built", [True, False])
def test_float8(is_built: bool) -> None:
    """Keras replaces scales of float8 by their gradients, also in K-FAC."""
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")

    def train(optimizer: Any) -> Any:
        dense = layers.Dense(3, dtype="float8_from_float32")
        start = [keras.Input((8,))] if is_built else []
        model = keras.Sequential([*start, dense])
        model.compile(optimizer, "mse")
        model.fit(x, x[:, :3], 16, verbose=0)
        return dense.inputs_amax_history

    refused = [
        KFAC(gradient_accumulation_steps=2),
        tfkfac.FOSI(SGD(0.01)),
        tfkfac.GaussNewton(),
        tfkfac.LossScaleOptimizer(KFAC()),
    ]
    for optimizer in refused if is_built else refused[:1]:
        with pytest.raises(ValueError, match="in float8 "):
            train(optimizer)
    largest = np.max(train(KFAC(SGD(0.01))))
    assert largest == pytest.approx(np.abs(x).max(), rel=1e-6)
