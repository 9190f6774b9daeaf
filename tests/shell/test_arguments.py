"""Arguments in Keras' form: optimizers, rates, configs, defaults."""

import functools
import json
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
from tests.support.schedules import Formula
from tfkfac.shell.arguments import Hyperparameter

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
CLASSES = [tfkfac.KFAC, tfkfac.FOSI]


def schedule() -> ExponentialDecay:
    return ExponentialDecay(0.5, 1, 0.5)


def round_trip(optimizer: Any) -> Any:
    """Convert through JSON, as in a file."""
    text = json.dumps(keras.optimizers.serialize(optimizer))
    return keras.optimizers.deserialize(json.loads(text))


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
    """A schedule follows the iterations and survives a config."""
    for optimizer, kind in (
        (tfkfac.KFAC(schedule()), SGD),
        (tfkfac.KFAC(learning_rate=schedule()), SGD),
        (tfkfac.FOSI(schedule()), Adam),
    ):
        for each in (optimizer, round_trip(optimizer)):
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


# -------------------------------------------------------- one inside another
def test_not_inside_a_multi_optimizer() -> None:
    """`MultiOptimizer` is refused: it creates optimizers in the first step."""
    multi, kfac = keras.optimizers.MultiOptimizer, tfkfac.KFAC()
    first = keras.optimizers.OptimizerMap(SGD(0.1), {".*first/.*": kfac})
    for optimizer in (multi(first), multi(lambda variable: kfac)):
        model = small()
        model.compile(optimizer, "mse", run_eagerly=True)
        with pytest.raises(ValueError, match="cannot be inside a `MultiOptim"):
            model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))


# ------------------------------------------------------- defaults, schedules
DEFAULTS: dict[Any, dict[str, Any]] = {
    tfkfac.KFAC: {
        "name": "kfac", "damping": 0.01, "kl_clip": 0.02, "step": "natural",
        "momentum": None,
        "fisher": None, "solver": "inverse", "distribution": "comm_opt",
        "factor_update_interval": None, "inverse_update_interval": None,
        "factor_decay": 0.95, "factor_batch_fraction": None,
        "weight_sharing": "expand", "max_factor_dim": 640,
        "skip_layers": [], "gradient_accumulation_steps": None,
        "max_skipped_steps": 100,
    },
    tfkfac.FOSI: {
        "name": "fosi", "num_largest": 5, "num_smallest": 0, "alpha": 0.1,
        "update_interval": None, "warmup_steps": None, "lanczos_steps": None,
        "momentum": 0.9, "learning_rate_clip": 1.0, "layout": "rows",
        "accelerator_fraction": 0.0, "final_update": "stale", "seed": 0,
        "max_skipped_steps": 100,
    },
    tfkfac.GaussNewton: {
        "name": "gauss_newton", "damping": 1e-3, "momentum": 0.5,
        "acceleration": True, "solve": "auto", "max_tries": 6,
        "max_bytes": None,
        "learning_rate": 1.0, "max_skipped_steps": 100,
    },
}  # fmt: skip
RESTS = {tfkfac.KFAC: "Adam"}
TUNABLE = [
    (kind, name)
    for kind in DEFAULTS
    for name, value in vars(kind().method.settings).items()
    if isinstance(value, Hyperparameter)
]


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults(kind: Any) -> None:
    """Defaults are the measured values; changes must be deliberate."""
    config = kind().get_config()
    config.pop("inner_optimizer", None)
    rest = config.pop("rest_optimizer", None)
    assert (rest and rest["class_name"]) == RESTS.get(kind)
    assert config == DEFAULTS[kind]


@pytest.mark.parametrize(("kind", "name"), TUNABLE)
def test_schedules_are_saved(kind: Any, name: str) -> None:
    copy = getattr(round_trip(kind(**{name: schedule()})), name)
    assert type(copy) is ExponentialDecay
    assert copy.get_config() == schedule().get_config()


RATES = [
    (tfkfac.KFAC, "inner_optimizer"),
    (tfkfac.KFAC, "learning_rate"),
    (tfkfac.KFAC, "rest_optimizer"),
    (tfkfac.FOSI, "inner_optimizer"),
    (tfkfac.GaussNewton, "learning_rate"),
]


@pytest.mark.parametrize(("kind", "name"), [*TUNABLE, *RATES])
def test_functions_are_refused(kind: Any, name: str) -> None:
    """Functions are refused, also callable objects and later assignments."""
    optimizer = kind()
    for function in (
        lambda i: 0.1,
        lambda: 0.1,
        functools.partial(round, 0.1),
        layers.Dense(1),
    ):
        message = f"Argument `{name}`.* must be .*Received: {name}="
        with pytest.raises(TypeError, match=message) as caught:
            kind(**{name: function})
        assert repr(function) in str(caught.value)
        if (kind, name) in TUNABLE:
            before = getattr(optimizer, name)
            with pytest.raises(TypeError, match=message):
                setattr(optimizer, name, function)
            assert getattr(optimizer, name) == before


def fails(iteration: Any) -> Any:
    raise KeyError(iteration)


@pytest.mark.parametrize(("kind", "name"), TUNABLE)
def test_the_first_value_of_a_schedule(kind: Any, name: str) -> None:
    for function, received in (
        (lambda _: float("nan"), "returns nan"),
        (lambda _: float("inf"), "returns inf"),
        (lambda _: -1.0, "returns -1.0"),
        (lambda _: [1.0, 2.0], r"returns \[1. 2.\]"),
        (lambda _: "x", "raises"),
        (lambda _: None, "raises"),
        (fails, "raises KeyError"),
    ):
        message = rf"Argument `{name}` must return .*{received}.* iteration 0"
        with pytest.raises(ValueError, match=message):
            small().compile(kind(**{name: Formula(function)}), "mse")


# ------------------------------------------------------------ of a subclass
@pytest.mark.parametrize("kind", [*CLASSES, tfkfac.GaussNewton])
def test_a_subclass_has_the_same_arguments(kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        pass

    own, want = Own(), kind()
    names = ["max_skipped_steps", *vars(want.method.settings)]
    assert [own.get_config()[name] for name in names] == [
        want.get_config()[name] for name in names
    ]
    assert [getattr(own, n) for n in names] == [getattr(want, n) for n in names]


# ------------------------------------------------------------------- by name
@pytest.mark.parametrize("make", [*CLASSES, tfkfac.GaussNewton])
def test_names_find_the_optimizers(make: Any) -> None:
    """Names find tfkfac's optimizers, but never hide a user's class."""
    name = make.__name__
    for identifier in (name.lower(), make().name):
        model = small()
        model.compile(identifier, loss="mse")
        found = model.optimizer
        assert type(found) is make
        assert name.lower() == found.get_config()["name"].replace("_", "")
        assert found.bound_model() is model
    model.compile(optimizer=name.lower(), loss="mse")
    assert type(model.optimizer) is make
    other = type(name, (SGD,), {})
    config = keras.optimizers.serialize(other())
    assert type(keras.optimizers.deserialize(config, {name: other})) is other
