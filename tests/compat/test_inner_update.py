"""Where `apply` of a Keras optimizer touches variables."""

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
    raw_iterations,
    update_variable,
    updates_in_replica,
)
from tfkfac.compat.overrides import override
from tfkfac.compat.variables import own_copy

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
    graph = update.get_concrete_function(NOISE[0]).graph
    kinds = [node.op for node in graph.as_graph_def().node]
    kernels = [kind for kind in kinds if kind.startswith("ResourceApply")]
    assert len(kernels) == (own and dtype != "float16")
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


def test_the_learning_rate_is_read_once() -> None:
    """It is a variable of Keras, which every look at it would read."""
    optimizer, variables = make(momentum=0.5)

    @tf.function(autograph=False)
    def step() -> None:
        with updates_in_replica(optimizer):
            optimizer.apply(gradients(0), variables)

    graph = step.get_concrete_function().graph
    kinds = [node.op for node in graph.as_graph_def().node]
    assert kinds.count("ReadVariableOp") == 1


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


@contract(
    "compat.variables.own_copy",
    "A mirrored variable has `_get_on_device_or_primary`, others do not.",
)
def test_own_copy() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        mirrored = tf.Variable(1.0)
    (copy,) = strategy.experimental_local_results(mirrored)
    assert copy is not mirrored
    assert strategy.run(lambda: own_copy(mirrored) is copy)
    plain = tf.Variable(1.0)
    assert own_copy(plain) is plain
