"""What compat relies on in Keras optimizers, and where they touch variables."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tests.compat.contracts import contract
from tfkfac.compat.optimizers import (
    build_once,
    knows_variable,
    on_overflow,
    raw_iterations,
    sgd_momenta,
    trainable_variables,
    update_variable,
    updates_in_replica,
    variable_key,
)
from tfkfac.compat.overrides import override


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


UPDATES = "compat.optimizers.updates_in_replica"
HOOKS = (
    "_backend_update_step",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
    "_apply_weight_decay",
)
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
    optimizer.build(variables)
    return optimizer, variables


def gradients(step: int) -> list[tf.Tensor]:
    return [tf.constant((step + 1.0) * value) for value in START]


def listen(optimizer: Any) -> list[tuple[str, Any]]:
    """Notes the calls of the hooks and of the counter, with arguments."""
    calls: list[tuple[str, Any]] = []

    def hook(
        name: str, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        assert not kwargs
        calls.append((name, args))
        return below(*args)

    for name in HOOKS:
        override(optimizer, name, functools.partial(hook, name))
    override(
        raw_iterations(optimizer), "assign_add", functools.partial(hook, "+")
    )
    return calls


@contract(
    UPDATES, "`apply` calls `_backend_update_step(grads, vars, lr)` once."
)
def test_update() -> None:
    """With gradients that are clipped, after the weight decay."""
    optimizer, variables = make(clipvalue=0.5)
    calls = listen(optimizer)
    optimizer.apply(gradients(0))
    names = [name for name, _ in calls]
    assert names == ["_apply_weight_decay", "_backend_update_step", "+"]
    ((given,), (grads, updated, rate), (one,)) = (args for _, args in calls)
    for got in (given, updated):
        assert [id(v) for v in got] == [id(v) for v in variables]
    for gradient, value in zip(grads, START, strict=True):
        np.testing.assert_array_equal(gradient, np.clip(value, -0.5, 0.5))
    assert float(rate) == np.float32(0.1)
    assert one == 1


@contract(
    UPDATES,
    "An accumulation updates in its last step and adds up in the others.",
)
def test_accumulation() -> None:
    optimizer, _ = make(gradient_accumulation_steps=2)
    calls = listen(optimizer)
    optimizer.apply(gradients(0))
    assert [name for name, _ in calls] == [
        "_backend_increment_gradient_accumulators",
        "+",
    ]
    grads, accumulators = calls[0][1]
    for gradient, accumulator in zip(grads, accumulators, strict=True):
        np.testing.assert_array_equal(accumulator, gradient)
    calls.clear()
    optimizer.apply(gradients(1))
    assert [name for name, _ in calls] == [
        "_apply_weight_decay",
        "_backend_update_step",
        "+",
    ]
    for gradient, value in zip(calls[1][1][0], START, strict=True):
        np.testing.assert_array_equal(gradient, 1.5 * value)


@contract(
    UPDATES,
    "`_overwrite_model_variables_with_average_value` assigns "
    "`_model_variables_moving_average`, in the order of the variables.",
)
def test_averages() -> None:
    optimizer, variables = make(use_ema=True, ema_overwrite_frequency=2)
    calls = listen(optimizer)
    for step in range(2):
        assert HOOKS[2] not in [name for name, _ in calls]
        optimizer.apply(gradients(step))
    (given,) = dict(calls)[HOOKS[2]]
    assert [id(v) for v in given] == [id(v) for v in variables]
    averages = optimizer._model_variables_moving_average
    for variable, average in zip(variables, averages, strict=True):
        np.testing.assert_array_equal(variable, average)


@contract(
    UPDATES, "`BaseOptimizer._apply_weight_decay` is the decay of any backend."
)
def test_decay() -> None:
    results = []
    for decay in (
        lambda optimizer: optimizer._apply_weight_decay,
        lambda optimizer: functools.partial(
            BaseOptimizer._apply_weight_decay, optimizer
        ),
    ):
        optimizer, variables = make(weight_decay=0.1)
        optimizer.exclude_from_weight_decay(variables[1:])
        decay(optimizer)(variables)
        results.append([np.array(v) for v in variables])
    np.testing.assert_allclose(results[0][0], 0.99 * START[0], rtol=1e-6)
    np.testing.assert_array_equal(results[0][1], START[1])
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@contract(UPDATES, "Nothing else of `apply` touches variables.")
@pytest.mark.parametrize("strategy", [False, True])
def test_all_of_it_within_a_replica(strategy: bool) -> None:
    """The same weights as from `apply` alone, inside of a `tf.cond` too."""
    optimizer, variables = make(**EVERYTHING)
    for step in range(4):
        optimizer.apply(gradients(step))
    want = [np.array(v) for v in variables]

    def replicas() -> Any:
        if strategy:
            return tf.distribute.MirroredStrategy(["CPU:0"])
        return tf.distribute.get_strategy()

    mirrored = replicas()
    with mirrored.scope():
        optimizer, variables = make(**EVERYTHING)
    updates = tf.Variable(0)

    @tf.function
    def train(step: Any) -> None:
        def update() -> Any:
            with updates_in_replica(optimizer, count):
                optimizer.apply([(step + 1.0) * value for value in START])
            return 0

        def count() -> None:
            updates.assign_add(1)

        mirrored.run(lambda: tf.cond(step >= 0, update, lambda: 0))

    for step in range(4):
        train(tf.constant(float(step)))
    assert int(updates) == 2
    assert raw_iterations(optimizer).numpy() == 4
    for variable, value in zip(variables, want, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5)
    assert not set(HOOKS) & vars(optimizer).keys()
    assert "assign_add" not in vars(raw_iterations(optimizer))


OWN = (True, False)
NOISE = [tf.random.stateless_normal([1000], [step, 0]) for step in range(3)]


def one_of_twins(
    momentum: float, nesterov: bool, dtype: str, own: bool
) -> list[np.ndarray]:
    """A variable after three updates, and what SGD keeps of it."""
    variable = keras.Variable(np.ones(1000), dtype=dtype)
    sgd = keras.optimizers.SGD(0.1, momentum, nesterov)
    sgd.build([keras.Variable(np.ones(3)), variable])

    @tf.function(autograph=False)
    def update(gradient: tf.Tensor) -> None:
        rate = tf.convert_to_tensor(sgd.learning_rate)
        if own:
            update_variable(sgd, gradient, variable, rate)
        else:
            sgd.update_step(gradient, variable, rate)

    for noise in NOISE:
        update(noise)
    return [v.numpy() for v in (variable, *sgd.momentums)]


@contract(
    "compat.optimizers.update_variable",
    "`SGD.update_step` is TensorFlow's kernels of SGD, to the last bit.",
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)]
)
def test_update_of_sgd(momentum: float, nesterov: bool, dtype: str) -> None:
    twins = [one_of_twins(momentum, nesterov, dtype, own) for own in OWN]
    for got, want in zip(*twins, strict=True):
        np.testing.assert_array_equal(got, want)
    # Sutskever et al. (2013), eq. 3 and 4, as Keras writes them.
    x, velocity = np.ones(1000), np.zeros(1000)
    for noise in NOISE:
        velocity = momentum * velocity - 0.1 * noise.numpy()
        ahead = momentum * velocity - 0.1 * noise.numpy()
        x += ahead if nesterov else velocity
    rtol = {"float16": 1e-2}.get(dtype, 1e-5)
    np.testing.assert_allclose(twins[0][0], x, rtol=rtol, atol=rtol)


def test_others_update_for_themselves() -> None:
    """Subclasses do what they like; sparse gradients touch some rows."""

    class Signs(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
            self.assign_sub(variable, rate * tf.sign(gradient))

    variable = keras.Variable([1.0, 1.0])
    signs = Signs(0.5)
    signs.build([variable])
    update_variable(signs, tf.constant([3.0, -3.0]), variable, tf.constant(0.5))
    np.testing.assert_array_equal(variable.numpy(), [0.5, 1.5])
    sgd = keras.optimizers.SGD(0.5)
    sgd.build([variable])
    rows = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]), [2])
    update_variable(sgd, rows, variable, tf.constant(0.5))
    np.testing.assert_array_equal(variable.numpy(), [0.5, 1.0])
