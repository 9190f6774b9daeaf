"""Groups of blocks with equal factors: rows of stacks."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import randomize
from tests.support.small import loss, rows_of
from tfkfac.blocks import Statistic
from tfkfac.kfac import method
from tfkfac.solvers import Solver
from tfkfac.solvers.registry import SOLVERS

WIDTH, CLASSES = 5, 3
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
Y = np.arange(16) % CLASSES


def network() -> Any:
    """Three equal layers, and another."""
    equal = [layers.Dense(WIDTH, "tanh", name=name) for name in "abc"]
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *equal, layers.Dense(CLASSES, name="logits")]
    )
    randomize(model)
    return model


def optimizer(step: str, solver: str = "inverse") -> Any:
    inner = keras.optimizers.SGD(0.1) if step == "natural" else None
    options = {"kl_clip": None} if step == "natural" else {}
    return tfkfac.KFAC(
        inner, step=step, fisher="empirical", solver=solver, **options
    )


def state_of(kfac: Any, path: str) -> list[Any]:
    names = "factor_", "weight", "solver_", "whitened_", "extents"
    rows = rows_of(kfac.method.states, path, names)
    return [np.array(row.numpy()) for row in rows]


def step_of(model: Any, kfac: Any, weights: list[Any]) -> Any:
    """Return a training step of some weights."""

    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss()(Y, model(X, training=True))
        kfac.apply(tape.gradient(value, weights), weights)

    return step


def built(kfac: Any, model: Any) -> Any:
    """Attach and build K-FAC; return a training step."""
    kfac.attach(model).build(model.trainable_variables)
    return step_of(model, kfac, model.trainable_variables)


def positions(kfac: Any) -> list[tuple[int, ...]]:
    """Return the positions of the blocks of each group."""
    (state,) = kfac.method.states
    groups = [group.positions for group in state.averages]
    assert groups == [group.positions for group in state.preconditioners]
    return groups


@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_layers_without_gradients_keep_their_rows(step: str) -> None:
    """A step of some equal layers: the others do not change.

    Without a clip, natural-gradient steps are those of a step of all layers.
    """
    results = {}
    subsets = [["a", "c"], ["a", "b", "c", "logits"]]
    for present in subsets if step == "natural" else subsets[:1]:
        built(kfac := optimizer(step), model := network())
        before = {x: state_of(kfac, x) for x in ("b", "c", "logits")}
        weights = [
            variable
            for layer in model.layers
            if layer.name in present
            for variable in layer.trainable_variables
        ]
        step_of(model, kfac, weights)()
        results[len(present)] = model.get_weights()
        for path, old in before.items():
            new = state_of(kfac, path)
            same = all(map(np.array_equal, old, new))
            assert same == (path not in present), path
    if step == "natural":
        for i in (0, 1, 4, 5):
            some, every = results[2][i], results[4][i]
            np.testing.assert_allclose(some, every, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("step", "devices", "want"),
    [
        ("natural", [], [(0, 1), (2,), (3,)]),
        ("natural", ["a GPU"], [(0,), (1,), (2,), (3,)]),
        ("spectral", [], [(0,), (1,), (2,), (3,)]),
    ],
)
def test_groups_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, step: str, devices: Any, want: Any
) -> None:
    """Natural-gradient steps on CPUs have smaller groups with equal results.

    Another limit keeps the state.
    """
    width = WIDTH + 1  # with the bias
    size = width**2 + WIDTH**2 + width * WIDTH
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: devices)
    built(optimizer(step), whole := network())()
    with monkeypatch.context() as patch:
        patch.setattr(method, "MAX_ELEMENTS", size)
        patch.setattr(method, "CACHED_ELEMENTS", 2 * size)
        built(kfac := optimizer(step), model := network())()
    assert positions(kfac) == want
    if step == "natural":
        pairs = zip(model.get_weights(), whole.get_weights(), strict=True)
        for got, expected in pairs:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    before = {path: state_of(kfac, path) for path in ("a", "b", "c", "logits")}
    kfac.attach(model)
    assert positions(kfac) == [(0, 1, 2), (3,)]
    for path, old in before.items():
        for got, expected in zip(state_of(kfac, path), old, strict=True):
            assert np.any(expected)
            np.testing.assert_array_equal(got, expected)


# ------------------------------------------------ flags of interleaved groups
def interleaved() -> Any:
    """Blocks of equal factors, 0 and 3, around two others."""
    sizes = {"a": WIDTH, "up": WIDTH + 3, "down": WIDTH, "b": WIDTH}
    hidden = [layers.Dense(n, "tanh", name=name) for name, n in sizes.items()]
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *hidden, layers.Dense(CLASSES, name="logits")]
    )
    randomize(model)
    return model


PATHS = "a", "up", "down", "b", "logits"


@pytest.mark.parametrize("path", ["up", "b"])
def test_updates_of_averages_by_block(path: str) -> None:
    """Averages are `sum / count`; invalid statistics change no other block.

    Workers that store the averages of a block count its faults.
    """
    built(kfac := optimizer("spectral"), interleaved())
    assert positions(kfac) == [(0, 3), (1,), (2,), (4,)]
    (state,) = kfac.method.states
    rng, invalid = np.random.default_rng(0), PATHS.index(path)
    statistics, averages = {}, {}
    for i, block in enumerate(state.blocks):
        statistics[i], averages[block.path] = {}, {}
        for name, factor in block.factors.items():
            total = rng.uniform(1, 2, factor.shape).astype("float32")
            count = rng.uniform(1, 5)
            averages[block.path][name] = total / count
            total = total * (np.nan if i == invalid else 1)
            statistics[i][name] = Statistic(
                tf.constant(total), tf.constant(count, "float32")
            )
    for _ in range(2):
        state.update_averages(statistics, 0.5, tf.constant(True))
    for block_path, factors in kfac.factors().items():
        for name, got in factors.items():
            want = averages[block_path][name] * (block_path != path)
            np.testing.assert_allclose(got, want, rtol=1e-5)
    observed = np.where(np.arange(len(PATHS)) == invalid, 0, 2)
    np.testing.assert_array_equal(state.counters.observed, observed)
    assert kfac.events() == {f"statistics not finite in {path}": 2}
    state.averages = state.averages[1:]  # others store blocks 0 and 3
    state.update_averages(statistics, 0.5, tf.constant(True))
    np.testing.assert_array_equal(state.counters.observed, observed * 3 // 2)
    count = 2 if path == "b" else 3
    assert kfac.events() == {f"statistics not finite in {path}": count}


def strict(base: type[Solver]) -> type[Solver]:
    """Return a solver that accepts a single block only."""

    class Strict(base):  # type: ignore[misc, valid-type]
        def decompose(
            self, factors: Any, values: Any, means: Any, damping: Any
        ) -> Any:
            for tensor in (damping, *means.values()):
                assert tensor.shape.rank == 0
            for value in values.values():
                assert value.shape.rank == 2
            return super().decompose(factors, values, means, damping)

        def combine(self, parts: Any, damping: Any) -> Any:
            assert damping.shape.rank == 0
            return super().combine(parts, damping)

        def apply(self, factors: Any, parts: Any, gradient: Any) -> Any:
            for part in parts.values():
                assert part.shape.rank <= 2
            return super().apply(factors, parts, gradient)

    return Strict


@pytest.mark.parametrize(
    ("step", "name"), [("natural", "eigen"), ("spectral", "inverse")]
)
def test_a_registered_solver_sees_single_blocks(step: str, name: str) -> None:
    """Its steps are those of the built-in solver on stacks."""
    tfkfac.register_solver("strict", strict(SOLVERS[name]))
    results = []
    for solver in (name, "strict"):
        step_once = built(optimizer(step, solver), model := network())
        for _ in range(2):
            step_once()
        results.append(model.get_weights())
    # In float32, products of stacks and of single matrices round differently.
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


class Nothing(Solver):
    """A solver that stores no tensors."""

    def parts(self, factors: Any, name: str) -> Any:
        return {}

    def decompose(
        self, factors: Any, values: Any, means: Any, damping: Any
    ) -> Any:
        return {}

    def apply(self, factors: Any, decomposition: Any, gradient: Any) -> Any:
        return gradient


def test_a_registered_solver_without_tensors() -> None:
    """The steps are those of gradient descent."""
    tfkfac.register_solver("nothing", Nothing)
    model, plain = network(), network()
    built(optimizer("natural", "nothing"), model)()
    plain.compile(keras.optimizers.SGD(0.1), loss(), run_eagerly=True)
    plain.train_on_batch(X, Y)
    weights = model.get_weights(), plain.get_weights()
    for got, want in zip(*weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
