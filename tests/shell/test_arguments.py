"""Arguments in Keras' form: inner optimizers, rates, configs, defaults."""

import json
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import schedules

import tfkfac
from tests.support.schedules import Formula
from tests.support.small import loss, mlp
from tfkfac.capture.walk import matches
from tfkfac.shell.arguments import Hyperparameter

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def schedule() -> schedules.ExponentialDecay:
    return schedules.ExponentialDecay(0.5, 1, 0.5)


def round_trip(optimizer: Any, **options: Any) -> Any:
    """Convert through JSON, as in a file."""
    text = json.dumps(keras.optimizers.serialize(optimizer))
    copy = keras.saving.deserialize_keras_object(json.loads(text), **options)
    assert type(copy) is type(optimizer)
    assert copy is not optimizer
    return copy


# -------------------------------------------------------- the inner optimizer
@pytest.mark.parametrize(
    ("arguments", "rate", "momentum"),
    [
        ({}, 0.1, 0.5),
        ({"learning_rate": np.float32(0.25)}, 0.25, 0.5),
        ({"momentum": 0}, 0.1, 0.0),
        ({"learning_rate": 0.25, "momentum": 0.75}, 0.25, 0.75),
        ({"inner_optimizer": 0.25, "momentum": 0.75}, 0.25, 0.75),
    ],
)
def test_arguments_of_the_inner_sgd(
    arguments: Any, rate: float, momentum: float
) -> None:
    inner = tfkfac.KFAC(step="natural", **arguments).inner_optimizer
    assert type(inner) is SGD
    assert float(inner.learning_rate) == pytest.approx(rate)
    assert inner.momentum == momentum


@pytest.mark.parametrize(
    ("optimizer", "inner"),
    [
        (tfkfac.KFAC(schedule()), SGD),
        (tfkfac.KFAC(learning_rate=schedule()), SGD),
        (tfkfac.FOSI(schedule()), Adam),
    ],
)
def test_a_schedule_is_a_learning_rate(optimizer: Any, inner: Any) -> None:
    """A schedule follows the iterations and survives a config."""
    for each in (optimizer, round_trip(optimizer)):
        assert type(each.inner_optimizer) is inner
        assert float(each.learning_rate) == pytest.approx(0.5)
        each.inner_optimizer.iterations.assign(2)
        assert float(each.learning_rate) == pytest.approx(0.125)


def test_multi_optimizer_is_refused() -> None:
    """`MultiOptimizer` creates its optimizers in the first step."""
    multi, kfac = keras.optimizers.MultiOptimizer, tfkfac.KFAC(step="natural")
    first = keras.optimizers.OptimizerMap(SGD(0.1), {".*hidden/.*": kfac})
    for optimizer in (multi(first), multi(lambda variable: kfac)):
        model = mlp()
        model.compile(optimizer, loss(), run_eagerly=True)
        with pytest.raises(ValueError, match="cannot be inside a `MultiOptim"):
            model.train_on_batch(np.ones((2, 6)), np.ones(2))


# -------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        ({}, "spectral"),
        ({"momentum": 0.5, "rest_optimizer": "adam"}, "spectral"),
        ({"inner_optimizer": 0.1}, "natural"),
        ({"inner_optimizer": "adam"}, "natural"),
        ({"learning_rate": 0.1}, "natural"),
        ({"kl_clip": 0.02}, "natural"),
        ({"kl_clip": None}, "natural"),
        ({"learning_rate": 0.1, "step": "spectral"}, "spectral"),
        ({"step": "natural"}, "natural"),
    ],
)
def test_step_follows_from_the_arguments(arguments: Any, step: str) -> None:
    optimizer = tfkfac.KFAC(**arguments)
    assert optimizer.step == round_trip(optimizer).step == step


DAMPING = 0.03  # not exact in binary
LATE = 2**31 + 1  # float32 is exact up to 2^24
CHANGE = schedules.PiecewiseConstantDecay([LATE], [3, 5])
# Value, iteration, expected value, rules.
EXACT: list[tuple[Any, int, float, dict[str, Any]]] = [
    (DAMPING, 3, DAMPING, {}),
    (Formula(lambda step: np.float64(DAMPING)), 3, DAMPING, {}),
    (Formula(lambda step: DAMPING * step / 2), 10, DAMPING * 5, {}),
    *(
        (CHANGE, step, want, {"integer": True})
        for step, want in ((LATE - 1, 3), (LATE, 3), (LATE + 1, 5))
    ),
]


def test_hyperparameters_are_exact() -> None:
    """Values are in float64, of any iteration."""
    for value, iteration, want, rules in EXACT:
        parameter = Hyperparameter("x", value, **rules)
        parameter.build()
        assert parameter.at(tf.constant(iteration, tf.int64)).numpy() == want
    parameter = Hyperparameter("x", 1)
    parameter.build()
    parameter.set(DAMPING)
    assert parameter.at(tf.constant(0)).numpy() == DAMPING


def test_gradient_worker_fraction() -> None:
    """The fraction is an argument of KFAC or of its `Distribution`."""
    nested = tfkfac.Distribution("hybrid_opt", gradient_worker_fraction=0.25)
    copy = round_trip(tfkfac.KFAC(distribution=nested))
    assert copy.distribution == nested
    flat = {"distribution": "hybrid_opt", "gradient_worker_fraction": 0.25}
    assert round_trip(tfkfac.KFAC(**flat)).distribution == nested
    # A default stays a default in a file: it depends on the number of workers.
    default = round_trip(tfkfac.KFAC(distribution="hybrid_opt"))
    assert default.get_config()["distribution"] == "hybrid_opt"
    default = tfkfac.Distribution("hybrid_opt")
    assert default.get_config()["gradient_worker_fraction"] is None
    for other in ("comm_opt", nested):
        with pytest.raises(ValueError, match="`gradient_worker_fraction`"):
            tfkfac.KFAC(**{**flat, "distribution": other})


@pytest.mark.parametrize(
    "config",
    [
        *(5, None, "x", [], [("name", "x")], {"x": 1}, {"damping": {"a": 1}}),
        {"inner_optimizer": {"class_name": "Foo", "config": None}},
    ],
)
def test_invalid_configs(config: Any) -> None:
    words = "`config` must be a dict|unexpected|`damping`|locate class 'Foo'"
    with pytest.raises((TypeError, ValueError), match=words):
        tfkfac.KFAC.from_config(config)


# ------------------------------------------------ skip_layers and only_layers
@keras.saving.register_keras_serializable(package="tests")
class RegisteredDense(layers.Dense):
    pass


class PlainDense(layers.Dense):
    pass


@pytest.mark.parametrize("name", ["skip_layers", "only_layers"])
def test_layer_rules_round_trip(name: str) -> None:
    """The copy matches the same layers, also after a second round trip."""
    rules: list[Any] = [
        "dense",
        r"dense(_\d+)?",
        re.compile("DEN  SE  # a comment", re.I | re.X),
        re.compile("(?i)DENSE"),
        layers.Dense,
        RegisteredDense,
        PlainDense,
    ]
    some = [
        layers.Dense(1, name=name) for name in ("dense", "Dense", "dense_2")
    ]
    some += [layers.Conv1D(1, 1), RegisteredDense(1), PlainDense(1)]
    custom = {"custom_objects": {"PlainDense": PlainDense}}
    first = tfkfac.KFAC(step="natural", **{name: rules})
    copy = round_trip(round_trip(first, **custom), **custom)
    matched, copied = (
        [[matches(rule, layer, layer.name) for layer in some] for rule in of]
        for of in (getattr(first, name), getattr(copy, name))
    )
    assert all(map(any, matched))
    assert matched == copied


@pytest.mark.parametrize("name", ["skip_layers", "only_layers"])
@pytest.mark.parametrize("rule", ["idden", re.compile("no.e"), layers.Conv2D])
def test_rule_without_a_layer(rule: Any, name: str) -> None:
    """A rule that matches no layer, or only part of a name, is an error."""
    with pytest.raises(ValueError, match=rf"`{name}`.*'mlp'") as caught:
        mlp().compile(
            tfkfac.KFAC(step="natural", **{name: ["hidden", rule]}), loss()
        )
    assert repr(rule) in str(caught.value)
