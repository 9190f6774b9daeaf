"""Arguments: what is refused and how, and the way through a config."""

import functools
import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers.schedules import CosineDecay, PolynomialDecay

import tfkfac
from tests.support.small import compiled_mlp, data, kfac_of, loss, mlp

NAN, INF = float("nan"), float("inf")

# ------------------------------------------------------------ what is refused


def test_skip_rule_that_matches_nothing() -> None:
    """Known only with the model: an error of `compile`, naming the rule."""
    for rule in ("nope", re.compile("no.e"), layers.Conv2D):
        with pytest.raises(ValueError, match=r"`skip_layers`.*'mlp'") as caught:
            mlp().compile(tfkfac.KFAC(skip_layers=["hidden", rule]), loss())
        assert repr(rule) in str(caught.value)


# -------------------------------------------------------------- what is meant
def test_defaults() -> None:
    """The measured recipe; a change of it must be on purpose."""
    optimizer = tfkfac.KFAC()
    config = optimizer.get_config()
    inner = config.pop("inner_optimizer")
    want = {
        "name": "kfac",
        "damping": 0.01,
        "solver": "inverse",
        "factor_decay": 0.95,
        "factor_update_interval": None,
        "inverse_update_interval": None,
        "kl_clip": 0.02,
        "weight_sharing": "expand",
        "factor_batch_fraction": None,
        "distribution": "comm_opt",
        "step": "inner",
        "max_factor_dim": 640,
        "factor_rank": 64,
        "skip_layers": [],
    }
    assert {name: config[name] for name in want} == want
    assert inner["class_name"] == "SGD"
    assert inner["config"]["learning_rate"] == pytest.approx(0.1)
    assert inner["config"]["momentum"] == 0.5
    assert inner["config"]["nesterov"] is False


@pytest.mark.parametrize(
    ("argument", "kind", "rate"),
    [
        (np.float32(0.25), keras.optimizers.SGD, 0.25),
        ("RMSprop", keras.optimizers.RMSprop, 0.001),
        (keras.optimizers.Adam(0.5), keras.optimizers.Adam, 0.5),
        (
            {"class_name": "Nadam", "config": {"learning_rate": 0.125}},
            keras.optimizers.Nadam,
            0.125,
        ),
    ],
)
def test_inner_optimizer(argument: Any, kind: type, rate: float) -> None:
    optimizer = tfkfac.KFAC(argument)
    assert type(optimizer.inner_optimizer) is kind
    assert float(optimizer.learning_rate) == pytest.approx(rate)


def test_numbers_of_numpy_are_numbers() -> None:
    optimizer = tfkfac.KFAC(
        damping=np.float32(0.5),
        kl_clip=np.int64(2),
        factor_update_interval=np.int32(3),
        factor_decay=np.float64(0.5),
    )
    text = json.dumps(optimizer.get_config())
    assert optimizer.damping == 0.5
    assert '"factor_update_interval": 3' in text


# ------------------------------------------------------------ through a config
@keras.saving.register_keras_serializable(package="tests")
def registered(iteration: Any) -> Any:
    return 3.0 + 0.0 * iteration


@keras.saving.register_keras_serializable(package="tests")
class RegisteredDense(layers.Dense):
    pass


class PlainDense(layers.Dense):
    pass


def round_trip(optimizer: Any, **kwargs: Any) -> Any:
    """Through JSON, as in a file."""
    text = json.dumps(keras.optimizers.serialize(optimizer))
    copy = keras.saving.deserialize_keras_object(json.loads(text), **kwargs)
    assert type(copy) is tfkfac.KFAC
    assert copy is not optimizer
    return copy


NUMBERS: dict[str, Any] = {
    "damping": 0.25,
    "kl_clip": 0.5,
    "factor_update_interval": 7,
    "inverse_update_interval": 11,
    "factor_decay": 0.5,
    "solver": "eigen",
    "weight_sharing": "reduce",
    "distribution": "mem_opt",
    "max_factor_dim": 100,
    "factor_rank": 8,
    "factor_batch_fraction": 0.25,
    "name": "other",
}


DISTRIBUTION = tfkfac.Distribution(
    "hybrid_opt", 0.25, "memory", True, "bfloat16", "bfloat16"
)


@pytest.mark.parametrize(
    "value",
    ["hybrid_opt", DISTRIBUTION, tfkfac.Distribution("dp_kfac")],
    ids=["name", "all", "mode"],
)
def test_distribution_round_trips(value: Any) -> None:
    copy = round_trip(tfkfac.KFAC(distribution=value))
    assert copy.distribution == value


def test_half_of_the_workers_are_gradient_workers_of_a_hybrid() -> None:
    assert tfkfac.Distribution("hybrid_opt").gradient_worker_fraction == 0.5
    assert tfkfac.Distribution("mem_opt").gradient_worker_fraction is None


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gradient_worker_fraction", "Distribution"),
        ("assignment", "Distribution"),
        ("symmetric_communication", "Distribution(mode, symmetric=0.5)"),
        ("factor_dtype", "Distribution"),
        ("inverse_dtype", "Distribution"),
        ("quadratic_batch_fraction", "QuadraticStep(batch_fraction=0.5)"),
    ],
)
def test_what_has_moved_says_where(name: str, place: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` has moved") as caught:
        tfkfac.KFAC(**{name: 0.5})
    assert f"tfkfac.{place}" in str(caught.value)


def test_at_most_twenty_arguments() -> None:
    names = inspect.signature(tfkfac.KFAC.__init__).parameters
    assert len(set(names) - {"self", "unknown"}) <= 20


# -------------------------------------------------------------- quadratic steps
def test_damping_of_a_quadratic_step_is_that_of_the_optimizer() -> None:
    step = tfkfac.QuadraticStep(0.5, tfkfac.LevenbergMarquardt(0.25))
    for optimizer in (
        tfkfac.KFAC(step=step),
        round_trip(tfkfac.KFAC(step=step)),
    ):
        assert optimizer.damping.initial == 0.25
        assert optimizer.step.batch_fraction == 0.5
    assert tfkfac.KFAC(step=tfkfac.QuadraticStep(damping=0.5)).damping == 0.5


def test_two_dampings_are_refused() -> None:
    step = tfkfac.QuadraticStep(damping=0.5)
    with pytest.raises(ValueError, match=r"`damping` must be left out.*0\.25"):
        tfkfac.KFAC(damping=0.25, step=step)


def test_values_set_later_are_in_the_config() -> None:
    for optimizer in (tfkfac.KFAC(), compiled_mlp().optimizer):
        optimizer.damping = 0.75
        optimizer.kl_clip = 0.5
        copy = round_trip(optimizer)
        assert (copy.damping, copy.kl_clip) == (0.75, 0.5)


SCHEDULED = [
    "damping",
    "kl_clip",
    "factor_update_interval",
    "inverse_update_interval",
]


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_round_trip(name: str) -> None:
    schedule = PolynomialDecay(8.0, 10, 2.0, power=2.0)
    copy = getattr(round_trip(tfkfac.KFAC(**{name: schedule})), name)
    assert type(copy) is PolynomialDecay
    assert copy.get_config() == schedule.get_config()


@pytest.mark.parametrize("name", SCHEDULED)
def test_registered_functions_round_trip(name: str) -> None:
    copy = round_trip(tfkfac.KFAC(**{name: registered}))
    assert getattr(copy, name) is registered


def of_a_caller(iteration: Any) -> Any:
    return 4.0 + 0.0 * iteration


@pytest.mark.parametrize("function", [of_a_caller, lambda i: 4.0])
@pytest.mark.parametrize("name", SCHEDULED)
def test_other_functions_have_no_config(name: str, function: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`.*LearningRateSchedule"):
        tfkfac.KFAC(**{name: function}).get_config()


def test_other_functions_are_refused_when_saving(tmp_path: Path) -> None:
    """Weights alone are saved: who loads them has the function."""
    model = compiled_mlp(damping=lambda i: 4.0)
    with pytest.raises(ValueError, match="`damping`"):
        model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")


@pytest.mark.parametrize("value", [0.5, PolynomialDecay(8.0, 9), registered])
def test_what_a_file_holds_is_saved_in_silence(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfkfac.KFAC(damping=value).get_config()


@pytest.mark.parametrize(
    "inner",
    [
        keras.optimizers.SGD(0.5, momentum=0.25, nesterov=True),
        keras.optimizers.Adam(
            CosineDecay(0.5, 10), clipnorm=1.0, weight_decay=0.5, use_ema=True
        ),
        "adagrad",
        {"class_name": "SGD", "config": {"learning_rate": 0.125}},
        0.375,
        None,
    ],
    ids=["sgd", "adam", "name", "config", "float", "none"],
)
def test_inner_optimizers_round_trip(inner: Any) -> None:
    optimizer = tfkfac.KFAC(inner)
    copy = round_trip(optimizer)
    assert type(copy.inner_optimizer) is type(optimizer.inner_optimizer)
    want = optimizer.inner_optimizer.get_config()
    got = copy.inner_optimizer.get_config()
    assert json.dumps(got) == json.dumps(want)


LAYERS = [
    layers.Dense(1, name="dense"),
    layers.Dense(1, name="Dense"),
    layers.Dense(1, name="dense_12"),
    layers.Conv1D(1, 1, name="conv"),
    RegisteredDense(1, name="registered"),
    PlainDense(1, name="plain"),
]
RULES: dict[str, Any] = {
    "name": "dense",
    "expression": r"dense(_\d+)?",
    "pattern": re.compile(r"dense_\d+"),
    "pattern, any case": re.compile("DENSE", re.I),
    "pattern, flags inside": re.compile("(?i)DENSE"),
    "pattern, dot is all": re.compile(".*", re.S | re.M),
    "class": layers.Dense,
    "registered class": RegisteredDense,
    "own class": PlainDense,
    "pattern, verbose": re.compile("den  se  # a comment", re.X),
}


def skipped(optimizer: Any) -> list[str]:
    """Names of the layers that the optimizer skips, by the summary."""
    inputs = keras.Input((2, 1))
    x = inputs
    for layer in LAYERS:
        x = type(layer).from_config(layer.get_config())(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer, "mse")
    covered = set(kfac_of(model).factors())
    return [n.name for n in LAYERS if n.name not in covered]


@pytest.mark.filterwarnings("ignore:Model .* has no layer")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_skip_rules_round_trip(rule: Any) -> None:
    """The copy means the same layers, also after a second round."""
    optimizer = tfkfac.KFAC(skip_layers=[rule])
    custom = {"PlainDense": PlainDense}
    copy = round_trip(optimizer, custom_objects=custom)
    again = round_trip(copy, custom_objects=custom)
    want = skipped(optimizer)
    assert want
    assert skipped(copy) == want
    assert skipped(again) == want


def test_get_config_is_from_config() -> None:
    optimizer = tfkfac.KFAC("adam", skip_layers=[layers.Dense], **NUMBERS)
    for copy in (
        tfkfac.KFAC.from_config(optimizer.get_config()),
        round_trip(optimizer),
    ):
        assert copy.get_config() == optimizer.get_config()


def test_partial_functions_are_callables() -> None:
    """Anything callable will do, not only plain functions."""

    def decayed(iteration: Any, start: float) -> Any:
        return start / (1 + iteration)

    model = compiled_mlp(
        damping=functools.partial(decayed, start=0.5), eager=True
    )
    x, y = data()
    model.train_on_batch(x, y)
    assert int(kfac_of(model).inverse_updates) == 1
