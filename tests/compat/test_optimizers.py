"""Internals of Keras optimizers, and where they change variables."""

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.compat.contracts import contract
from tfkfac.compat.optimizers import (
    KerasOptimizer,
    exclude_from_decay,
    is_decayed,
    knows_variable,
    raw_iterations,
    sgd_momenta,
    trainable_variables,
    update_variable,
    updates_by_step,
    updates_in_replica,
    variable_key,
)


def variables(count: int = 2) -> list[Any]:
    return [keras.Variable(np.ones(i + 1, "float32")) for i in range(count)]


@contract(
    "compat.optimizers.KerasOptimizer",
    "Checkpoints save the `_trackable_children` of an optimizer.",
)
def test_python_state_is_only_in_checkpoints(tmp_path: Path) -> None:
    class State(tf.train.experimental.PythonState):
        value = b"before"

        def serialize(self) -> bytes:
            assert tf.executing_eagerly()
            return self.value

        def deserialize(self, string_value: bytes) -> None:
            self.value = string_value

    class Optimizer(KerasOptimizer):
        state: State

    optimizer = Optimizer(0.5, "optimizer")
    optimizer.state = State()
    tf.saved_model.save(optimizer, str(tmp_path / "saved_model"))
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    optimizer.state.value = b"after"
    checkpoint.read(path).assert_consumed()
    assert optimizer.state.value == b"before"


@contract(
    "compat.optimizers.variable_key",
    "`_var_key` is equal for a Keras variable, its mirrored variable and a "
    "replica's copy.",
)
def test_variable_key() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable, other = variables()
        optimizer = keras.optimizers.SGD()
    key = variable_key(optimizer, variable)
    (copy,) = strategy.experimental_local_results(variable.value)
    assert copy is not variable.value
    for same in (variable.value, copy):
        assert variable_key(optimizer, same) == key
    assert strategy.run(lambda: variable_key(optimizer, variable)) == key
    assert variable_key(optimizer, other) not in {key}


@contract(
    "compat.optimizers.knows_variable",
    "`_trainable_variables` are the variables of `build`, in order; the "
    "keys of `_trainable_variables_indices` are results of `_var_key`.",
)
def test_trainable_variables() -> None:
    first, second, other = variables(3)
    optimizer = keras.optimizers.Adam()
    assert trainable_variables(optimizer) == []
    optimizer.build([second, first])
    result = trainable_variables(optimizer)
    assert [id(v) for v in result] == [id(second), id(first)]
    assert knows_variable(optimizer, first)
    assert not knows_variable(optimizer, other)


@contract(
    "compat.optimizers.sgd_momenta",
    "`momentums` are in the order of the variables.",
)
def test_sgd_momenta() -> None:
    first, second = variables()
    plain = keras.optimizers.SGD(0.5)
    plain.build([first])
    assert sgd_momenta(plain, [first]) == []
    optimizer = keras.optimizers.SGD(0.5, 0.75)
    optimizer.build([first, second])
    optimizer.apply([tf.constant([2.0, 4.0])], [second])
    momenta = sgd_momenta(optimizer, [second, first])
    assert [m.numpy().tolist() for m in momenta] == [[-1, -2], [0]]


@contract(
    "compat.optimizers.exclude_from_decay",
    "`_use_weight_decay` is False for keys in `_exclude_from_weight_decay`.",
)
@pytest.mark.parametrize("by_user", [0, 1])
def test_exclude_from_decay(by_user: int) -> None:
    """Variables that the user has excluded stay excluded."""
    items = variables(3)
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(items[:by_user])
    exclude_from_decay(optimizer, items[1:2])
    optimizer.build(items)
    optimizer.apply([tf.zeros_like(v) for v in items])
    want = [not by_user, False, True]
    assert [is_decayed(optimizer, v) for v in items] == want
    assert [bool(v.numpy()[0] < 1) for v in items] == want


EVERYTHING: dict[str, Any] = {
    "momentum": 0.5,
    "weight_decay": 0.1,
    "global_clipnorm": 1.0,
    "use_ema": True,
    "ema_overwrite_frequency": 2,
    "gradient_accumulation_steps": 2,
}
START = (np.array([1.0, -2.0], "float32"), np.array([[3.0]], "float32"))


def make(**kwargs: Any) -> tuple[Any, list[Any]]:
    variables = [keras.Variable(value) for value in START]
    optimizer = keras.optimizers.SGD(0.1, **kwargs)
    optimizer.exclude_from_weight_decay(variables[1:])
    optimizer.build(variables)
    return optimizer, variables


def gradients(step: Any) -> list[tf.Tensor]:
    return [tf.convert_to_tensor((step + 1.0) * value) for value in START]


@contract(
    "compat.optimizers.updates_in_replica",
    "`apply` changes variables only through five methods with fixed arguments.",
)
@pytest.mark.parametrize("strategy", [False, True])
def test_updates_in_a_replica(strategy: bool) -> None:
    """Weights are as after `apply`, also inside a `tf.cond`."""
    optimizer, variables = make(**EVERYTHING)
    for step in range(4):
        optimizer.apply(gradients(step))
    want = [np.array(v) for v in variables]
    mirrored = tf.distribute.MirroredStrategy(["CPU:0"])
    if not strategy:
        mirrored = tf.distribute.get_strategy()
    with mirrored.scope():
        optimizer, variables = make(**EVERYTHING)
    updates = tf.Variable(0)

    @tf.function(autograph=False)
    def train(step: Any) -> None:
        def update() -> Any:
            with updates_in_replica(optimizer, lambda: updates.assign_add(1)):
                optimizer.apply(gradients(step))
            return 0

        mirrored.run(lambda: tf.cond(step >= 0, update, lambda: 0))

    for step in range(4):
        train(tf.constant(float(step)))
    assert int(updates) == 2
    assert raw_iterations(optimizer).numpy() == 4
    for variable, value in zip(variables, want, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5)
    assert "_backend_update_step" not in vars(optimizer)
    assert "assign_add" not in vars(raw_iterations(optimizer))


@contract(
    "compat.optimizers.updates_by_step",
    "Updates consist of `update_step` calls, except for a factor in Nadam.",
)
@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ),
)
def test_every_optimizer_in_a_replica(name: str) -> None:
    ends = []
    for context in (contextlib.nullcontext, updates_in_replica):
        variables = [keras.Variable(value) for value in START]
        optimizer = getattr(keras.optimizers, name)(0.1)
        optimizer.build(variables)
        assert updates_by_step(optimizer)
        for step in range(2):
            with context(optimizer):
                optimizer.apply(gradients(step))
        ends.append([np.array(v) for v in variables])
    for value, want, start in zip(*ends, START, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-6)
        assert not np.array_equal(value, start)


def test_overridden_updates_are_detected() -> None:
    class Counting(keras.optimizers.SGD):
        def _backend_update_step(self, *args: Any) -> None:
            super()._backend_update_step(*args)

    assert not updates_by_step(Counting())
    with pytest.raises(ValueError, match="more in an update than its"):
        tfkfac.KFAC(Counting())


NOISE = [tf.random.stateless_normal([1000], [step, 0]) for step in range(3)]


def train_sgd(fused: bool, momentum: float, nesterov: bool, dtype: str) -> Any:
    """A variable after three updates, and its momentum."""
    variable = keras.Variable(np.ones(1000), dtype=dtype)
    sgd = keras.optimizers.SGD(0.1, momentum, nesterov)
    sgd.build([keras.Variable(np.ones(3)), variable])

    @tf.function(autograph=False)
    def update(gradient: tf.Tensor) -> None:
        rate = tf.convert_to_tensor(sgd.learning_rate)
        if fused:
            update_variable(sgd, gradient, variable, rate)
        else:
            sgd.update_step(gradient, variable, rate)

    for noise in NOISE:
        update(noise)
    return [v.numpy() for v in (variable, *sgd.momentums)]


@contract(
    "compat.optimizers.update_variable",
    "`SGD.update_step` equals TensorFlow's SGD kernels bitwise.",
)
@pytest.mark.parametrize(
    ("momentum", "nesterov", "dtype"),
    [
        (0.0, False, "float64"),
        (0.9, False, "float32"),
        (0.9, True, "float64"),
        (0.9, True, "float16"),
    ],
)
def test_update_of_sgd(momentum: float, nesterov: bool, dtype: str) -> None:
    fused, plain = (
        train_sgd(is_fused, momentum, nesterov, dtype)
        for is_fused in (True, False)
    )
    for value, want in zip(fused, plain, strict=True):
        np.testing.assert_array_equal(value, want)


def test_other_updates_use_update_step() -> None:
    """For subclasses of SGD, and for sparse gradients."""

    class Signs(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
            self.assign_sub(variable, rate * tf.sign(gradient))

    variable, rate = keras.Variable([1.0, 1.0]), tf.constant(0.5)
    rows = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]), [2])
    for optimizer, gradient, want in (
        (Signs(0.5), tf.constant([3.0, -3.0]), [0.5, 1.5]),
        (keras.optimizers.SGD(0.5), rows, [0.5, 1.0]),
    ):
        optimizer.build([variable])
        update_variable(optimizer, gradient, variable, rate)
        np.testing.assert_array_equal(variable.numpy(), want)
