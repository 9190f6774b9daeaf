"""The inner optimizer and its arguments, in the manners of Keras."""

import json
import re
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers.schedules import ExponentialDecay

import tfkfac

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
CLASSES = [tfkfac.KFAC, tfkfac.FOSI]


def schedule() -> ExponentialDecay:
    return ExponentialDecay(0.5, 1, 0.5)


def small() -> Any:
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(3, name="first"),
            layers.Dense(1, name="second"),
        ]
    )


# ---------------------------------------------- arguments for the default one
@pytest.mark.parametrize(
    ("arguments", "rate", "momentum"),
    [
        ({}, 0.1, 0.5),
        ({"learning_rate": 0.25}, 0.25, 0.5),
        ({"momentum": 0.75}, 0.1, 0.75),
        ({"momentum": 0}, 0.1, 0.0),
        ({"learning_rate": 0.25, "momentum": 0.75}, 0.25, 0.75),
        ({"learning_rate": np.float32(0.25)}, 0.25, 0.5),
        ({"inner_optimizer": 0.25, "momentum": 0.75}, 0.25, 0.75),
        ({"learning_rate": lambda: 0.25}, 0.25, 0.5),
    ],
)
def test_arguments_of_the_inner_sgd(
    arguments: Any, rate: float, momentum: float
) -> None:
    inner = tfkfac.KFAC(**arguments).inner_optimizer
    assert type(inner) is SGD
    assert float(inner.learning_rate) == pytest.approx(rate)
    assert inner.momentum == momentum


def test_a_schedule_is_a_learning_rate() -> None:
    """It follows the iterations, and goes through a config."""
    for optimizer, kind in (
        (tfkfac.KFAC(schedule()), SGD),
        (tfkfac.KFAC(learning_rate=schedule()), SGD),
        (tfkfac.FOSI(schedule()), Adam),
    ):
        text = json.dumps(keras.optimizers.serialize(optimizer))
        copy = keras.optimizers.deserialize(json.loads(text))
        for each in (optimizer, copy):
            assert type(each.inner_optimizer) is kind
            assert float(each.learning_rate) == pytest.approx(0.5)
            each.inner_optimizer.iterations.assign(2)
            assert float(each.learning_rate) == pytest.approx(0.125)


def test_a_float_is_the_learning_rate_of_adam() -> None:
    inner = tfkfac.FOSI(0.25).inner_optimizer
    assert type(inner) is Adam
    assert float(inner.learning_rate) == 0.25


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("learning_rate", x) for x in ("adam", SGD(0.1), 0.1, schedule())),
        *(("momentum", x) for x in ("adam", SGD(0.1))),
    ],
)
def test_not_beside_what_has_its_own(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{name}`.*left out.*{name}=0.25"):
        tfkfac.KFAC(given, **{name: 0.25})


# --------------------------------------------- arguments of inner optimizers
OF_THE_INNER = {
    "clipnorm": 1.0,
    "clipvalue": 0.5,
    "global_clipnorm": 1.0,
    "weight_decay": 0.01,
    "use_ema": True,
    "ema_momentum": 0.9,
    "ema_overwrite_frequency": 3,
}


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("name", OF_THE_INNER)
def test_arguments_of_the_inner_optimizer(make: Any, name: str) -> None:
    """What the message says to write works."""
    value = OF_THE_INNER[name]
    with pytest.raises(ValueError, match="on the inner optimizer") as caught:
        make(**{name: value})
    message = str(caught.value)
    assert f"Received: {name}={value}" in message
    written = re.search(r"optimizer: (.*)\. Received", message)
    assert written is not None
    code = written[1].replace("(...,", "(").replace(")).", "))")
    names = {"KFAC": tfkfac.KFAC, "FOSI": tfkfac.FOSI, "keras": keras}
    assert getattr(eval(code, names).inner_optimizer, name) == value


# -------------------------------------------------------- one inside another
def test_not_inside_a_multi_optimizer() -> None:
    """Which makes or asks for its optimizers in the first step."""
    multi, kfac = keras.optimizers.MultiOptimizer, tfkfac.KFAC()
    first = keras.optimizers.OptimizerMap(SGD(0.1), {".*first/.*": kfac})
    for optimizer in (multi(first), multi(lambda variable: kfac)):
        model = small()
        model.compile(optimizer, "mse", run_eagerly=True)
        with pytest.raises(ValueError, match="cannot be inside a `MultiOptim"):
            model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))


# ------------------------------------------------------------ of a subclass
@pytest.mark.parametrize("kind", [*CLASSES, tfkfac.GaussNewton])
def test_a_subclass_has_the_same_arguments(kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        pass

    own, want = Own(), kind()
    names = ["max_skipped_steps", *kind.method_type.fields()]
    assert [own.get_config()[name] for name in names] == [
        want.get_config()[name] for name in names
    ]
    assert [getattr(own, n) for n in names] == [getattr(want, n) for n in names]


# ------------------------------------------------------------------- by name
@pytest.mark.parametrize("make", [*CLASSES, tfkfac.GaussNewton])
def test_found_by_name(make: Any) -> None:
    """And not in the place of somebody else's class of the same name."""
    name = make.__name__
    for identifier in (name.lower(), f"tfkfac>{name}"):
        found = keras.optimizers.get(identifier)
        assert type(found) is make
        assert name.lower() == found.get_config()["name"].replace("_", "")
    model = small()
    model.compile(name.lower(), "mse")
    assert type(model.optimizer) is make
    assert model.optimizer.bound_model() is model
    other = type(name, (SGD,), {})
    config = keras.optimizers.serialize(other())
    assert type(keras.optimizers.deserialize(config, {name: other})) is other
