"""What is said of weights that K-FAC leaves alone."""

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.small import FEATURES, Scale
from tests.support.summaries import sequential
from tfkfac.kfac.report import Advice


def said(action: Callable[[], Any]) -> list[str]:
    """The warnings of K-FAC, repeated ones too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if "K-FAC" in str(w.message)]


def compiling(model: Any, **kwargs: Any) -> list[str]:
    optimizer = tfkfac.KFAC(**kwargs)
    return said(lambda: model.compile(optimizer, "mse", run_eagerly=True))


class Offset(layers.Layer):
    """A layer without a block, with as many weights as wanted."""

    def __init__(self, weights: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights_wanted = weights

    def build(self, shape: Any) -> None:
        self.offset = self.add_weight((self.weights_wanted,), name="offset")

    def call(self, x: Any) -> Any:
        return x + keras.ops.sum(self.offset)


def test_low_coverage() -> None:
    """The share, and the largest layers that are left, with the reason."""
    model = sequential(
        layers.LSTM(4, name="lstm"),
        layers.Reshape((2, 2)),
        layers.GRU(2, name="gru"),
        Scale(name="scale"),
        Offset(1, name="one"),
        layers.Dense(3, name="dense"),
        shape=(6, 5),
    )
    # Keras' numbers of weights: kernel, recurrent kernel and bias.
    lstm, gru = 4 * (5 + 4 + 1) * 4, 3 * (2 + 2 + 2) * 2
    dense = (2 + 1) * 3
    total = lstm + gru + 2 + 1 + dense
    assert total == model.count_params()
    (text,) = compiling(model)
    want = (
        f"K-FAC preconditions {100 * dense / total:.1f}% of the weights of "
        f"model '{model.name}' ({dense} of {total}). Its inner optimizer, SGD, "
        f"trains the others alone: lstm/lstm_cell ({lstm} weights: used in "
        f"the loop of a LSTM), gru/gru_cell ({gru} weights: used in the loop "
        "of a GRU), scale (2 weights: no block for Scale), .... See "
        "`optimizer.summary()`"
    )
    assert text.startswith(want)


@pytest.mark.parametrize(("weights", "warned"), [(18, False), (19, True)])
def test_from_which_share_on(weights: int, warned: bool) -> None:
    """Half of the weights is not low, if no single one is a large part."""
    small = [Offset(weights // 20 + (i < weights % 20)) for i in range(20)]
    dense = layers.Dense(3, use_bias=False)
    texts = compiling(sequential(*small, dense))
    assert 3 * FEATURES == 18
    assert len(texts) == warned


@pytest.mark.parametrize(("weights", "warned"), [(6, False), (7, True)])
def test_a_large_weight_without_a_block(weights: int, warned: bool) -> None:
    """More than 5 % of the model is named, and one that is less is not."""
    model = sequential(
        Offset(weights, name="offset"),
        layers.Dense(19, use_bias=False),
    )
    texts = compiling(model)
    assert 19 * FEATURES == 114 == 19 * 6  # 6 of 120 is 5 %
    assert len(texts) == warned
    for text in texts:
        share = 100 * 114 / (114 + weights)
        assert f"K-FAC preconditions {share:.1f}% of the weights" in text
        assert f"alone: offset ({weights} weights: no block for Off" in text


def test_all_large_weights_are_named() -> None:
    """However many there are, the largest first, and some smaller ones."""
    parts = [Offset(30 + i, name=f"large_{i}") for i in range(5)]
    model = sequential(
        *[Offset(1, name=f"small_{i}") for i in range(2)],
        *parts,
        layers.Dense(50, use_bias=False),
    )
    (text,) = compiling(model)
    named = re.findall(r"(\w+) \(\d+ weights", text)
    assert named == [f"large_{i}" for i in (4, 3, 2, 1, 0)]
    assert "), .... See" in text


class Late(keras.Model):
    """Not functional."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def functional(parts: Any) -> Any:
    """What follows the last layer has no weights."""
    x = inputs = keras.Input((FEATURES,))
    for part in parts:
        x = part(x)
    return keras.Model(inputs, layers.Reshape((-1, 1))(layers.Softmax()(x)))


def built(parts: Any) -> Any:
    model = Late(parts)
    model(np.ones((1, FEATURES)))
    return model


LAST: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda parts: sequential(*parts),
    "functional": functional,
    "nested": lambda parts: sequential(functional(parts)),
    "subclassed": built,
}


@pytest.mark.parametrize("kind", LAST)
def test_the_last_layer_is_always_named(kind: str) -> None:
    """However small it is; the same one elsewhere is not."""
    last = Offset(1, name="offset")
    dense = layers.Dense(50)
    (text,) = compiling(LAST[kind]([dense, last]))
    assert re.search(r"alone: (\w+/)?offset \(1 weights: no block", text)
    assert not compiling(LAST[kind]([Offset(1), layers.Dense(50)]))
    skipped = LAST[kind]([layers.Dense(50), Offset(1, name="offset")])
    assert not compiling(skipped, skip_layers=["offset"])


def test_layers_without_any_block() -> None:
    (text,) = compiling(sequential(Offset(2, name="offset")))
    assert re.match(r"Model 'seq.*' has no layer that K-FAC supports\.", text)
    assert "offset (2 weights: no block for Offset)" in text


def test_what_the_user_skips_does_not_count() -> None:
    def model() -> Any:
        return sequential(
            layers.Dense(50, name="large"), layers.Dense(1, name="small")
        )

    assert not compiling(model(), skip_layers=["large"])
    assert not compiling(model(), skip_layers=[".*"])


def test_it_is_said_once() -> None:
    """Not again when the model is compiled again, or trains."""
    model = sequential(Offset(50), layers.Dense(1))
    optimizer = tfkfac.KFAC()
    x = np.ones((4, FEATURES), "float32")

    def train() -> None:
        for _ in range(2):
            model.compile(optimizer, "mse", run_eagerly=True)
            model.train_on_batch(x, x[:, :1])

    assert len(said(train)) == 1


def test_it_is_said_when_the_model_is_built() -> None:
    model = keras.Sequential([Offset(50), layers.Dense(1)])
    assert not compiling(model)
    x = np.ones((4, FEATURES), "float32")
    assert len(said(lambda: model.train_on_batch(x, x[:, :1]))) == 1
    assert not said(lambda: model.train_on_batch(x, x[:, :1]))


@pytest.mark.parametrize(("depth", "times"), [(49, 0), (50, 1)])
def test_a_deep_model_says_once_that_it_is_traced(
    depth: int, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """When it is compiled, not again for another `compile`, on one worker."""
    model = sequential(*(layers.Dense(1) for _ in range(depth)), shape=(1,))
    optimizer = tfkfac.KFAC(name="curved")
    for _ in range(2):
        model.compile(optimizer, "mse")
    text = f"tfkfac: curved traces the training step of model '{model.name}'"
    said = capsys.readouterr().err
    assert said.count(text) == times
    assert (f"with {depth} preconditioned layers" in said) == bool(times)
    advice, job = Advice(), optimizer.method.job
    job.topology = dataclasses.replace(job.topology, local=(1,))
    advice.announce(job, optimizer.method.placement.registry)
    assert not capsys.readouterr().err
