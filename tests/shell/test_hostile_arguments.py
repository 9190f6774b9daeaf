"""Unusual arguments and configs work or raise a clear error."""

import decimal
import fractions
import inspect
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfkfac

CLASSES = (tfkfac.KFAC, tfkfac.FOSI, tfkfac.GaussNewton)
NAMES = [
    (cls, name)
    for cls in CLASSES
    for name in inspect.signature(cls.__init__).parameters
    if name not in ("self",)
]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**3), 10**3),
    st.sampled_from([10**400, -(10**400), 2**63, 2**64, -(2**63)]),
    st.floats(),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(
        [
            fractions.Fraction(10**400),
            decimal.Decimal("NaN"),
            np.float16(0.5),
            np.float32(np.inf),
            np.int8(3),
            np.array(0.5),
            np.array([0.5, 1.0]),
            object(),
            int,
            keras.layers.Dense,
            keras.optimizers.SGD,
        ]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["class_name", "config", "module", "name", "a"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=4,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.sampled_from(NAMES), VALUES)
def test_an_error_that_names_the_argument(
    which: tuple[type, str], value: Any
) -> None:
    cls, name = which
    try:
        cls(**{name: value})
    except (TypeError, ValueError) as error:
        assert f"`{name}`" in str(error) or "`inner_optimizer`" in str(error)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), SCALARS)
def test_what_is_accepted_trains(which: tuple[type, str], value: Any) -> None:
    cls, name = which
    try:
        optimizer = cls(**{name: value})
    except (TypeError, ValueError):
        return
    try:
        x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(optimizer=optimizer, loss="mse")
        model.train_on_batch(x, x[:, :2])
    except ValueError as error:
        # How much a step takes is known when there is a model.
        assert name == "max_bytes"
        assert "`max_bytes`" in str(error)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(CLASSES),
    st.one_of(
        SCALARS,
        st.dictionaries(
            st.one_of(st.sampled_from([name for _, name in NAMES]), st.text()),
            VALUES,
            max_size=3,
        ),
    ),
)
def test_configs(cls: Any, config: Any) -> None:
    """Bad configs raise the constructor's or Keras' errors."""
    try:
        cls.from_config(config)
    except (TypeError, ValueError) as error:
        assert str(error)


@pytest.mark.parametrize("config", [5, None, "x", [], [("name", "x")]])
def test_a_config_is_a_dict(config: Any) -> None:
    with pytest.raises(TypeError, match="Argument `config` must be a dict"):
        tfkfac.KFAC.from_config(config)
