"""Wrong values of arguments are refused, with the received value.

Each argument has a row: the required type, and which of `VALUES` it accepts.
An argument without a row fails.
"""

import dataclasses
import decimal
import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
from tests.support.schedules import Formula
from tests.support.small import compiled_mlp, loss, mlp
from tfkfac.shell.arguments import Hyperparameter

NAN, INF = float("nan"), float("inf")
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
KFAC: Any = tfkfac.KFAC
FOSI: Any = tfkfac.FOSI
GN: Any = tfkfac.GaussNewton
PART: Any = tfkfac.Distribution
SCALER: Any = tfkfac.LossScaleOptimizer
DENSE = keras.layers.Dense
VALUES: list[Any] = [None, True, -1, 0, 1, 2, 0.5, 1.5, NAN, INF, 10**400]
VALUES += ["x", b"x", [1], {"class_name": "x"}, 1j, object]
VALUES += [np.array([0.1]), np.float32(INF), np.int8(-3)]
VALUES += [decimal.Decimal("NaN"), lambda i: 0.1]

Row = tuple[str, tuple[Any, ...]]  # words of the message, accepted values
NUMBER: Row = "a number of at least 0", (0, 1, 2, 0.5, 1.5, np.float32(0.25))
POSITIVE: Row = "a positive number", (1, 2, 0.5, 1.5)
BELOW_ONE: Row = r"a number in \[0, 1\)", (0, 0.5)
PART_OF_ONE: Row = r"a number in \(0, 1\]", (1, 0.5)
COUNT: Row = "an integer of at least 1", (1, 2, np.int32(7))
COUNT_OR_0: Row = "an integer of at least 0", (0, 1, 2)
RATE: Row = "a float of at least 0", (0.5, 1.5)


def or_none(row: Row) -> Row:
    return row[0], (None, *row[1])


def one_of(*names: str, none: bool = False) -> Row:
    words = r"one of \(.*" + ".*".join(map(repr, names))
    return words, (None, *names) if none else names


INNER = "a Keras optimizer"
NAME_OR_RATE = ("adam", *RATE[1])
LAYERS = "layer names, regular expressions or"
# Each argument with its row and its measured default in a config.
TAKES: dict[Any, dict[str, tuple[Row, Any]]] = {
    KFAC: {
        "inner_optimizer": (
            or_none((f"({INNER}|{RATE[0]})", NAME_OR_RATE)), "SGD"
        ),
        "learning_rate": (or_none(RATE), None),
        "momentum": (or_none(BELOW_ONE), None),
        "weight_decay": ((r"a number in \[0, inf\)", (None, *NUMBER[1])), None),
        "damping": (NUMBER, 0.01),
        "kl_clip": (or_none(POSITIVE), 0.02),
        "step": (one_of("natural", "spectral", none=True), "spectral"),
        "fisher": (
            one_of("empirical", "monte_carlo", "type2", none=True), None
        ),
        "solver": (one_of("eigen", "inverse"), "inverse"),
        "distribution": (one_of("comm_opt", "dp_kfac"), "comm_opt"),
        "factor_update_interval": (or_none(COUNT), None),
        "inverse_update_interval": (or_none(COUNT), None),
        "factor_decay": (BELOW_ONE, 0.95),
        "factor_batch_fraction": (or_none(PART_OF_ONE), None),
        "weight_sharing": (one_of("expand", "reduce", "average"), "expand"),
        "max_factor_dim": (
            (f"{COUNT[0]}.*'auto'", (None, "auto", *COUNT[1])), "auto"
        ),
        "skip_layers": ((LAYERS, ("x",)), []),
        "only_layers": ((LAYERS, (None, "x")), None),
        "gradient_accumulation_steps": (
            ("an integer of at least 2", (None, 2)), None
        ),
        "max_skipped_steps": (or_none(COUNT), 100),
        "rest_optimizer": (or_none((INNER, ("adam", "inner"))), "Adam"),
        "gradient_worker_fraction": (or_none(PART_OF_ONE), None),
    },
    PART: {
        "mode": (one_of("comm_opt", "dp_kfac"), "comm_opt"),
        "gradient_worker_fraction": (or_none(PART_OF_ONE), None),
        "assignment": (one_of("compute", "round_robin", none=True), None),
        "symmetric": (("True or False", (True,)), False),
        "factor_dtype": (one_of("bfloat16", none=True), None),
        "inverse_dtype": (one_of("bfloat16", none=True), None),
    },
    FOSI: {
        "inner_optimizer": ((f"({INNER}|{RATE[0]})", NAME_OR_RATE), "Adam"),
        "num_largest": (COUNT_OR_0, 5),
        "num_smallest": (COUNT_OR_0, 0),
        "alpha": (NUMBER, 0.1),
        "update_interval": (or_none(COUNT), None),
        "warmup_steps": (or_none(COUNT_OR_0), None),
        "lanczos_steps": (("an integer of at least 5", (None, 20)), None),
        "momentum": (BELOW_ONE, 0.9),
        "learning_rate_clip": ((r"a number in \[1, inf\)", (1, 2, 1.5)), 1.0),
        "layout": (one_of("rows", "columns"), "rows"),
        "accelerator_fraction": (BELOW_ONE, 0.0),
        "final_update": (one_of("stale", "paper"), "stale"),
        "seed": (COUNT_OR_0, 0),
        "max_skipped_steps": (or_none(COUNT), 100),
    },
    GN: {
        "damping": (POSITIVE, 1e-3),
        "momentum": (BELOW_ONE, 0.5),
        "solve": (one_of("auto", "parameters", "residuals"), "auto"),
        "max_tries": (COUNT, 6),
        "max_bytes": (or_none(COUNT), None),
        "learning_rate": (RATE, 1.0),
        "max_skipped_steps": (or_none(COUNT), 100),
    },
    SCALER: {
        "inner_optimizer": (("an optimizer of tfkfac", ()), None),
        "initial_scale": (POSITIVE, 2.0**15),
        "dynamic_growth_steps": (COUNT, 2000),
    },
}  # fmt: skip


def takes(accepted: Iterable[Any], value: Any) -> bool:
    """True if an accepted value has the same type and value."""
    return any(type(a) is type(value) and a == value for a in accepted)


# Other arguments that are required with an argument.
REQUIRED: dict[tuple[Any, str], dict[str, Any]] = {
    (FOSI, "num_largest"): {"num_smallest": 1},  # not both may be 0
    (KFAC, "gradient_worker_fraction"): {"distribution": "hybrid_opt"},
    (KFAC, "momentum"): {"step": "natural"},
    (KFAC, "rest_optimizer"): {"step": "natural"},
    (PART, "gradient_worker_fraction"): {"mode": "hybrid_opt"},
    (SCALER, "initial_scale"): {"inner_optimizer": KFAC(step="natural")},
    (SCALER, "dynamic_growth_steps"): {"inner_optimizer": KFAC(step="natural")},
}
# Arguments of KFAC whose values are in another object, see test_arguments.py.
ELSEWHERE = {"momentum", "gradient_worker_fraction"}
# Arguments of which None is replaced by another value.
CHOSEN = {"step", "learning_rate"}


def has_value(owner: Any, item: Any, name: str, value: Any) -> bool:
    """True if an object has the value of an argument."""
    is_default = value is None and name in CHOSEN
    if is_default or (owner is KFAC and name in ELSEWHERE):
        return True
    current = getattr(item, name)
    if name.endswith("_optimizer"):
        if isinstance(value, str):
            name_of_class = type(current).__name__.lower()
            return value == (name_of_class if current else "inner")
        return value is None or float(current.learning_rate) == value
    if name.endswith("_layers") and value is not None:
        value = (value,)
    return bool(current == value)


@pytest.mark.parametrize("owner", TAKES)
def test_values(owner: Any) -> None:
    """Each argument of the signature has a row.

    Accepted values become attributes and survive a config. The constructor
    refuses others in Keras' form.
    """
    parameters = inspect.signature(owner.__init__).parameters
    assert set(parameters) - {"self", "name"} == set(TAKES[owner])
    # No argument is hidden in `**kwargs`.
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    for name, ((words, accepted), _) in TAKES[owner].items():
        others = [value for value in accepted if not takes(VALUES, value)]
        for value in [*VALUES, *others]:
            arguments = {name: value, **REQUIRED.get((owner, name), {})}
            if takes(accepted, value):
                item = owner(**arguments)
                config = item.get_config()
                copy = owner.from_config(json.loads(json.dumps(config)))
                assert copy.get_config() == config
                assert has_value(owner, item, name, value), (name, value)
                assert has_value(owner, copy, name, value), (name, value)
                continue
            with pytest.raises((TypeError, ValueError)) as caught:
                owner(**arguments)
            message = str(caught.value)
            assert f"`{name}`" in message
            assert re.search(rf"must .*{words}", message), message
            is_rule = name.endswith("_layers") and value == [1]
            assert repr(1 if is_rule else value) in received(message)


@pytest.mark.parametrize("cls", [KFAC, FOSI, GN])
def test_defaults(cls: Any) -> None:
    """Defaults are the measured values, also for subclasses and by name."""

    def config_of(owner: Any) -> tuple[str, dict[str, Any]]:
        config = owner().get_config()
        for wrapped in {"inner_optimizer", "rest_optimizer"} & {*config}:
            config[wrapped] = config[wrapped]["class_name"]
        return config.pop("name"), config

    name, config = config_of(cls)
    assert name in ("kfac", "fosi", "gauss_newton")
    defaults = {name: default for name, (_, default) in TAKES[cls].items()}
    assert config == {key: defaults[key] for key in config}
    assert config_of(type("Subclass", (cls,), {}))[1] == config
    for identifier in (cls.__name__.lower(), name):
        model = mlp()
        model.compile(identifier, loss())
        assert type(model.optimizer) is cls
        assert model.optimizer.bound_model() is model
    # A class of the user with the same name has priority.
    other = type(cls.__name__, (SGD,), {})
    config = keras.optimizers.serialize(other())
    custom = {cls.__name__: other}
    assert type(keras.optimizers.deserialize(config, custom)) is other


def received(message: str) -> str:
    return message.split("Received: ", 1)[1]


# ------------------------------------------------- values of single arguments
# Owner, argument, refused values, words of the message.
WRONG: list[tuple[Any, str, list[Any], str]] = [
    (KFAC, "factor_update_interval", [2.0, np.float32(3)], COUNT[0]),
    (FOSI, "inner_optimizer", [{"class_name": "sgd", "config": 5}], INNER),
    (KFAC, "inner_optimizer", [DENSE(1), {"class_name": "Foo"}], INNER),
    (KFAC, "inner_optimizer", [-0.1, NAN, INF], RATE[0]),
    (KFAC, "learning_rate", [-0.1, 1e39], RATE[0]),
    (KFAC, "skip_layers", [[None], [DENSE(1)], [int]], "layer names, regular"),
    (KFAC, "skip_layers", [["fine", "("], ["*"], ["(?P<x"]], "valid regular"),
    (KFAC, "only_layers", [[None], ["*"]], "(layer names|valid regular)"),
    (KFAC, "only_layers", [[re.compile(b"x")]], "layer names, regular"),
    (PART, "gradient_worker_fraction", [0.5, 0, "0.5"], r"in \(0, 1\]"),
    (PART, "factor_dtype", ["float64", "int8", 16], "one of"),
    (PART, "inverse_dtype", ["float16"], "'bfloat16' or None.*overflow"),
    (FOSI, "lanczos_steps", [4, 20.0], "an integer of at least 5"),
]


@pytest.mark.parametrize(("owner", "name", "values", "words"), WRONG)
def test_wrong_values(
    owner: Any, name: str, values: list[Any], words: str
) -> None:
    for value in values:
        with pytest.raises((ValueError, TypeError)) as caught:
            owner(**{name: value})
        message = str(caught.value)
        assert re.search(rf"Argument `{name}`.*{words}", message), message
        shown = value[-1] if name.endswith("_layers") else value
        assert repr(shown) in received(message)


TUNABLE = [
    (cls, name)
    for cls in (KFAC, FOSI, GN)
    for name, value in vars(cls().method.settings).items()
    if isinstance(value, Hyperparameter)
]


FIRST = {[cls for cls, _ in TUNABLE].index(cls) for cls, _ in TUNABLE}


def fails(iteration: Any) -> Any:
    raise KeyError(iteration)


# Schedules, and what the message says about their results.
RESULTS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda _: NAN, "returns nan"),
    (lambda _: -1.0, "returns -1.0"),
    (lambda _: [1.0, 2.0], r"returns \[1. 2.\]"),
    (lambda _: None, "raises"),
    (fails, "raises KeyError"),
]


@pytest.mark.parametrize(("owner", "name"), TUNABLE)
def test_schedules(owner: Any, name: str) -> None:
    """Schedules are saved, their first value is checked, no functions."""
    schedule = ExponentialDecay(0.5, 1, 0.5)
    config = json.loads(json.dumps(owner(**{name: schedule}).get_config()))
    copy = getattr(owner.from_config(config), name)
    assert type(copy) is ExponentialDecay
    assert copy.get_config() == schedule.get_config()

    with pytest.raises(TypeError, match=f"`{name}`"):
        owner(**{name: lambda iteration: 0.1})
    # NaN and -1 with each argument, all results with one argument of a class.
    count = None if TUNABLE.index((owner, name)) in FIRST else 2
    for function, result in RESULTS[:count]:
        message = rf"Argument `{name}` must return .*{result}.* iteration 0"
        with pytest.raises(ValueError, match=message):
            mlp().compile(owner(**{name: Formula(function)}), loss())


# ------------------------------------------------------- values that conflict
TWO: Any = {"gradient_accumulation_steps": 2}
OUTSIDE = "`inner_optimizer`.*`LossScaleOptimizer` around"
NESTED = "^(?!.*LossScale).*outermost is bound"
SPECTRAL = {"step": "spectral"}
SHARED = SGD(0.1)
# Owner, positional and named arguments, words of the message.
CONFLICTS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    *(
        (owner, (inner,), {}, words)
        for owner in (KFAC, FOSI)
        for inner, words in (
            (SGD(0.1, loss_scale_factor=2.0), OUTSIDE),
            (keras.optimizers.LossScaleOptimizer(SGD()), OUTSIDE),
            (KFAC(step="natural"), NESTED),
            (FOSI(), NESTED),
            (keras.optimizers.MultiOptimizer(Adam), "has no learning rate"),
            (Adam(INF), "learning rate"),
            (Adam(NAN), "learning rate"),
        )
    ),
    *(
        (KFAC, (given,), {name: 0.25}, rf"`{name}`.*left out.*{name}=0.25")
        for name, given in (
            ("learning_rate", "adam"),
            ("learning_rate", SGD(0.1)),
            ("learning_rate", 0.1),
            ("learning_rate", ExponentialDecay(0.5, 1, 0.5)),
            ("momentum", "adam"),
            ("momentum", SGD(0.1)),
        )
    ),
    (KFAC, (SGD(1.0, momentum=0.9),), SPECTRAL, r"without.*SGD\(momentum\)"),
    (KFAC, (SGD(1.0, clipnorm=0.1),), SPECTRAL, r"SGD\(clipnorm\)"),
    (KFAC, (SGD(global_clipnorm=1.0),), SPECTRAL, r"SGD\(global_clipnorm\)"),
    (KFAC, ("adam",), SPECTRAL, r"inner_optimizer=Adam\(\)"),
    (KFAC, (), {**SPECTRAL, "rest_optimizer": "inner"}, "must be an opt"),
    (KFAC, (SGD(0.1, **TWO),), TWO, "of one"),
    (KFAC, ("adamw",), {"weight_decay": 0.1}, "`weight_decay`.*left out.*0.1"),
    (FOSI, (), {"num_largest": 0}, "`num_largest` and `num_smallest`"),
    (KFAC, (0.1, 0.01), {}, "positional"),
    *(
        (KFAC, (), {"rest_optimizer": rest}, "`rest_optimizer` .*" + words)
        for rest, words in (
            ("kfac", "must be a (plain|Keras) optimizer"),
            (Adam(NAN), "must have a finite learning rate"),
            (SGD(**TWO), "without `gradient_accumulation_steps`"),
        )
    ),
    (KFAC, (SHARED,), {"rest_optimizer": SHARED}, "different from"),
    *(
        (owner, (), {name: value}, f"Did you mean '{choice}'")
        for owner, name, value, choice in (
            (KFAC, "step", "spectra", "spectral"),
            (KFAC, "distribution", "comm-opt", "comm_opt"),
            (PART, "mode", "hybrid", "hybrid_opt"),
            (FOSI, "layout", "row", "rows"),
            (GN, "solve", "residual", "residuals"),
        )
    ),
]


def test_conflicts() -> None:
    for owner, positional, named, words in CONFLICTS:
        with pytest.raises((TypeError, ValueError), match=words):
            owner(*positional, **named)


@pytest.mark.parametrize("inner", [None, 0.1, SGD(1.0, weight_decay=0.1)])
def test_momentum_of_spectral_steps(inner: Any) -> None:
    """The momentum is that of the steps, not of the inner optimizer."""
    optimizer = KFAC(inner, momentum=0.5, step="spectral")
    copy = KFAC.from_config(optimizer.get_config())
    for each in (optimizer, copy):
        assert each.momentum == 0.5
        assert each.inner_optimizer.momentum == 0
        assert each.inner_optimizer.weight_decay == getattr(
            inner, "weight_decay", None
        )


# ---------------------------------------------------------------- assignments
@pytest.mark.parametrize(
    "make", [KFAC, lambda: compiled_mlp().optimizer, FOSI, GN]
)
def test_assignments(make: Callable[[], Any]) -> None:
    """Assignments are checked like arguments; refused ones change nothing."""
    optimizer = make()
    for field in dataclasses.fields(optimizer.settings_type):
        name, setting = (
            field.name,
            getattr(optimizer.method.settings, field.name),
        )
        before = getattr(optimizer, name)
        (_, accepted), _ = TAKES[type(optimizer)][name]
        for value in VALUES:
            if value is before:
                continue
            if isinstance(setting, Hyperparameter) and takes(accepted, value):
                if value is not None and before is not None:
                    setattr(optimizer, name, value)
                    assert optimizer.get_config()[name] == value
                    setattr(optimizer, name, before)
                continue
            with pytest.raises(
                (AttributeError, TypeError, ValueError),
                match=rf"(?s)Argument `{name}`.*Received: {name}=",
            ):
                setattr(optimizer, name, value)
            assert getattr(optimizer, name) == before
