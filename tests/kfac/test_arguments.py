"""Arguments: refused values, errors, configs."""

import json
import re
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers.schedules import CosineDecay

import tfkfac
from tests.support.small import compiled_mlp, loss, mlp
from tfkfac.capture.walk import matches


def test_skip_rule_that_matches_nothing() -> None:
    """A rule that matches no layer is an error of `compile` that names it."""
    for rule in ("nope", re.compile("no.e"), layers.Conv2D):
        with pytest.raises(ValueError, match=r"`skip_layers`.*'mlp'") as caught:
            mlp().compile(tfkfac.KFAC(skip_layers=["hidden", rule]), loss())
        assert repr(rule) in str(caught.value)


# ------------------------------------------------------------ through a config
@keras.saving.register_keras_serializable(package="tests")
class RegisteredDense(layers.Dense):
    pass


class PlainDense(layers.Dense):
    pass


def round_trip(optimizer: Any, **kwargs: Any) -> Any:
    """Convert through JSON, as in a file."""
    text = json.dumps(keras.optimizers.serialize(optimizer))
    copy = keras.saving.deserialize_keras_object(json.loads(text), **kwargs)
    assert type(copy) is tfkfac.KFAC
    assert copy is not optimizer
    return copy


DISTRIBUTION = tfkfac.Distribution(
    "hybrid_opt", 0.25, "memory", True, "bfloat16", "bfloat16"
)


def test_distribution_round_trips() -> None:
    for value in ("hybrid_opt", "mem_opt", DISTRIBUTION):
        copy = round_trip(tfkfac.KFAC(distribution=value))
        assert copy.distribution == value
    assert tfkfac.Distribution("hybrid_opt").gradient_worker_fraction == 0.5
    assert tfkfac.Distribution("mem_opt").gradient_worker_fraction is None


def test_the_fraction_may_stand_beside_its_mode() -> None:
    flat = {"distribution": "hybrid_opt", "gradient_worker_fraction": 0.25}
    nested = tfkfac.Distribution("hybrid_opt", gradient_worker_fraction=0.25)
    assert tfkfac.KFAC(**flat).distribution == nested
    assert round_trip(tfkfac.KFAC(**flat)).distribution == nested
    for other in ("comm_opt", nested):
        with pytest.raises(ValueError, match="`gradient_worker_fraction`"):
            tfkfac.KFAC(**{**flat, "distribution": other})


def test_values_set_later_are_in_the_config() -> None:
    for optimizer in (tfkfac.KFAC(), compiled_mlp().optimizer):
        optimizer.damping = 0.75
        optimizer.kl_clip = 0.5
        copy = round_trip(optimizer)
        assert (copy.damping, copy.kl_clip) == (0.75, 0.5)


LAYERS = [
    layers.Dense(1, name="dense"),
    layers.Dense(1, name="Dense"),
    layers.Dense(1, name="dense_12"),
    layers.Conv1D(1, 1, name="conv"),
    RegisteredDense(1, name="registered"),
    PlainDense(1, name="plain"),
]
RULES: list[Any] = [
    "dense",
    r"dense(_\d+)?",
    re.compile("DEN  SE  # a comment", re.I | re.X),
    re.compile("(?i)DENSE"),
    layers.Dense,
    RegisteredDense,
    PlainDense,
]


def test_skip_rules_round_trip() -> None:
    """The copy skips the same layers, also after a second round trip."""
    first = tfkfac.KFAC(skip_layers=[*RULES])
    custom = {"PlainDense": PlainDense}
    again = round_trip(
        round_trip(first, custom_objects=custom), custom_objects=custom
    )
    meant = [
        [matches(rule, layer, layer.name) for layer in LAYERS]
        for optimizer in (first, again)
        for rule in optimizer.skip_layers
    ]
    assert all(map(any, meant))
    assert meant[: len(RULES)] == meant[len(RULES) :]


def test_get_config_is_from_config() -> None:
    optimizer = tfkfac.KFAC(
        keras.optimizers.Adam(
            CosineDecay(0.5, 10), clipnorm=1.0, weight_decay=0.5, use_ema=True
        ),
        # Those of NumPy are numbers.
        damping=np.float32(0.25),
        kl_clip=np.int64(2),
        factor_update_interval=np.int32(7),
        factor_decay=np.float64(0.5),
        skip_layers=[layers.Dense],
        name="other",
    )
    for copy in (
        tfkfac.KFAC.from_config(optimizer.get_config()),
        round_trip(optimizer),
    ):
        assert copy.get_config() == optimizer.get_config()
        assert type(copy.inner_optimizer) is keras.optimizers.Adam
