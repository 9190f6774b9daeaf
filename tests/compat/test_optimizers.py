"""What a Keras optimizer keeps to itself."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.optimizers import (
    build_once,
    knows_variable,
    on_overflow,
    raw_iterations,
    sgd_momenta,
    trainable_variables,
    variable_key,
)


def variables(count: int = 2) -> list[Any]:
    return [keras.Variable(np.ones(i + 1, "float32")) for i in range(count)]


@contract(
    "compat.optimizers.variable_key",
    "`_var_key` is the same for a Keras variable and what is inside.",
)
def test_variable_key() -> None:
    one, other = variables()
    optimizer = keras.optimizers.SGD()
    assert variable_key(optimizer, one) == variable_key(optimizer, one.value)
    assert variable_key(optimizer, one) != variable_key(optimizer, other)
    hash(variable_key(optimizer, one))


@contract(
    "compat.optimizers.variable_key",
    "`_var_key` is the same for a mirrored variable and a replica's copy.",
)
def test_variable_key_of_a_mirrored_variable() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        (variable,) = variables(1)
        optimizer = keras.optimizers.SGD()
    key = variable_key(optimizer, variable)
    assert variable_key(optimizer, variable.value) == key
    (copy,) = strategy.experimental_local_results(variable.value)
    assert copy is not variable.value
    assert variable_key(optimizer, copy) == key
    keys = strategy.run(lambda: variable_key(optimizer, variable))
    assert keys == key


@contract(
    "compat.optimizers.knows_variable",
    "The keys of `_trainable_variables_indices` are those of `_var_key`.",
)
def test_knows_variable() -> None:
    one, other = variables()
    optimizer = keras.optimizers.SGD()
    assert not knows_variable(optimizer, one)
    optimizer.build([one])
    assert knows_variable(optimizer, one)
    assert not knows_variable(optimizer, other)


@contract(
    "compat.optimizers.trainable_variables",
    "`_trainable_variables` are those of `build`, in their order.",
)
def test_trainable_variables() -> None:
    every = variables(3)
    optimizer = keras.optimizers.Adam()
    assert trainable_variables(optimizer) == []
    optimizer.build(every[::-1])
    got = trainable_variables(optimizer)
    assert [id(v) for v in got] == [id(v) for v in every[::-1]]


@contract(
    "compat.optimizers.raw_iterations",
    "`_iterations` is a variable that counts the calls of `apply`.",
)
def test_raw_iterations() -> None:
    every = variables()
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build(every)
    for _ in range(3):
        optimizer.apply([tf.ones_like(v.value) for v in every])
    assert isinstance(raw_iterations(optimizer), keras.Variable)
    assert int(raw_iterations(optimizer)) == 3
    assert int(optimizer.iterations) == 1


@contract(
    "wrapper.delegation.DelegatingOptimizer",
    "A `LossScaleOptimizer` sets `loss_scale_factor` of what it wraps to None.",
)
def test_loss_scale_optimizer_announces_itself() -> None:
    seen: list[Any] = []

    class Listening(keras.optimizers.SGD):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "loss_scale_factor":
                seen.append(value)
            super().__setattr__(name, value)

    optimizer = Listening(loss_scale_factor=2.0)
    seen.clear()
    keras.optimizers.LossScaleOptimizer(optimizer)
    assert seen == [None]


@contract(
    "compat.optimizers.sgd_momenta",
    "`momentums` are in the order of the variables, and SGD adds to the "
    "weights what it makes of them.",
)
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_momenta(nesterov: bool) -> None:
    one, other = variables()
    optimizer = keras.optimizers.SGD(0.5, 0.75, nesterov)
    optimizer.build([one, other])
    momenta = sgd_momenta(optimizer, [other, one])
    assert [tuple(b.shape) for b in momenta] == [(2,), (1,)]
    momenta[0].assign([1.0, -1.0])
    optimizer.apply([tf.constant([2.0, 4.0])], [other])
    new = np.array([0.75 - 1.0, -0.75 - 2.0])
    np.testing.assert_allclose(np.array(momenta[0]), new)
    change = 0.75 * new - [1.0, 2.0] if nesterov else new
    np.testing.assert_allclose(np.array(other), 1 + change)


def test_sgd_without_momenta() -> None:
    one, other = variables()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([one, other])
    assert sgd_momenta(optimizer, [one, other]) == []


@contract(
    "compat.optimizers.on_overflow",
    "`LossScaleOptimizer._common_apply` calls "
    "`_stateful_handle_non_finite_grads` where it skips a step.",
)
def test_where_a_scaler_skips() -> None:
    """Once, however often it is asked for, and not where it does not."""
    variable = keras.Variable([1.0])
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=4.0
    )
    calls: list[str] = []

    def prepare() -> Any:
        calls.append("prepared")
        return lambda: calls.append("skipped")

    for _ in range(2):
        on_overflow(scaler, prepare)
    scaler.apply([tf.constant([4.0])], [variable])
    assert calls == ["prepared"]
    scaler.apply([tf.constant([np.inf])], [variable])
    assert calls == ["prepared", "prepared", "skipped"]
    assert float(scaler.dynamic_scale) == 2.0
    np.testing.assert_allclose(np.array(variable), [0.99])


@contract(
    "compat.optimizers.build_once",
    "`LossScaleOptimizer.build` makes its variables whenever it is called.",
)
def test_a_scaler_is_built_once() -> None:
    weights = variables()
    twice = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    count = len(twice.variables)
    for _ in range(2):
        twice.build(weights)
    assert len(twice.variables) > count + 2
    once = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    for _ in range(2):
        build_once(once, weights)
    once.build(weights)
    assert len(once.variables) == count + 2
