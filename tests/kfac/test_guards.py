"""Bad numbers: batches, gradients, factors, decompositions, precisions."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close, find
from tests.support.reference import Array
from tests.support.small import (
    CLASSES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    slots,
    summary_text,
)

X, Y = data()
SOLVERS = ["inverse", "eigen"]
NAN, INF = float("nan"), float("inf")


def poisoned(value: float) -> Array:
    x = X.copy()
    x[3, 2] = value
    return x


def assert_finite(model: Any) -> None:
    for name, value in everything(model).items():
        assert np.isfinite(value).all(), name


# ----------------------------------------------------------------- bad batches
@pytest.mark.parametrize(
    ("value", "solver", "eager"),
    [
        (NAN, "eigen", True),
        (INF, "inverse", True),
        (NAN, "inverse", False),
    ],
)
def test_bad_batch_changes_nothing(
    value: float, solver: str, eager: bool, capfd: Any
) -> None:
    """Not the weights, the factors, the slots or the clock; it is counted.

    All steps renew everything, so a batch that got through would show.
    """
    model = compiled_mlp(
        "adam",
        solver=solver,
        factor_update_interval=1,
        inverse_update_interval=1,
        eager=eager,
    )
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    weights = model.get_weights()
    state, inner = curvature(optimizer), slots(optimizer)
    capfd.readouterr()
    for bad in (1, 2):
        model.train_on_batch(poisoned(value), Y)
        assert int(optimizer.skipped_steps) == bad
    err = capfd.readouterr().err
    assert err.count("not finite") == 1
    assert "'kfac'" in err or "kfac:" in err
    for got, want in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(got, want)
    assert_same(slots(optimizer), inner)
    assert int(optimizer.iterations) == 1
    now = curvature(optimizer)
    (counter,) = (k for k in now if "skipped_steps" in k)
    assert now.pop(counter) == 2
    assert state.pop(counter) == 0
    assert_same(now, state)
    assert "gradients not finite: 2" in summary_text(optimizer)
    # Training goes on as if nothing had happened.
    twin = compiled_mlp(
        "adam",
        solver=solver,
        factor_update_interval=1,
        inverse_update_interval=1,
        eager=eager,
    )
    twin.train_on_batch(X, Y)
    for one in (model, twin):
        one.train_on_batch(X, Y)
    for got, want in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    assert "not finite" not in capfd.readouterr().err


def test_bad_first_batch() -> None:
    """Nothing is decomposed of it; the second batch is the first."""
    model, twin = (compiled_mlp(eager=True) for _ in range(2))
    model.train_on_batch(poisoned(NAN), Y)
    assert int(kfac_of(model).factor_updates) == 0
    for one in (model, twin):
        one.train_on_batch(X, Y)
    for got, want in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_bad_numbers_that_cancel() -> None:
    """Infinities of both signs in one gradient, NaN in another's slice."""
    model = mlp()
    optimizer = tfkfac.KFAC().attach(model)
    good = gradients_of(model, X, Y)
    before = model.get_weights()
    for bad in ([INF, -INF], [NAN, 0.0], [-INF, -INF], [INF, 1.0]):
        gradients_of(model, X, Y)
        gradients = [tf.identity(g) for g in good]
        kernel = np.array(gradients[0])
        kernel[0, :2] = bad
        gradients[0] = tf.constant(kernel)
        optimizer.apply(gradients, model.trainable_variables)
    assert int(optimizer.skipped_steps) == 4
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_nan_in_sparse_gradients() -> None:
    """An embedding's gradient is sparse; its values are looked at."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(5, 2, name="tokens"),
            layers.Flatten(),
            layers.Dense(CLASSES, name="logits"),
        ]
    )
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    x = np.array([[0, 1, 2], [2, 3, 4]])
    y = np.array([0, 1])
    model.train_on_batch(x, y)
    before = everything(model)
    weight = np.array([1.0, NAN], "float32")
    model.train_on_batch(x, y, sample_weight=weight)
    optimizer = kfac_of(model)
    assert int(optimizer.skipped_steps) == 1
    optimizer.skipped_steps.assign(0)
    assert_same(everything(model), before)


def test_large_finite_numbers_are_no_reason_to_skip() -> None:
    """1e18 squared is a float32."""
    model = mlp()
    optimizer = tfkfac.KFAC(1e-30).attach(model)
    gradients = [1e18 * g for g in gradients_of(model, X, Y)]
    optimizer.apply(gradients, model.trainable_variables)
    assert int(optimizer.skipped_steps) == 0
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("eager", [True, False])
def test_empty_batch(eager: bool) -> None:
    """No factors of nothing, nothing counted, and training goes on."""
    model = compiled_mlp(keras.optimizers.SGD(0.1), eager=eager)
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    weights, factors = model.get_weights(), optimizer.factors()
    model.train_on_batch(X[:0], Y[:0])
    for got, want in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(got, want)
    for path, block in optimizer.factors().items():
        assert_same(block, factors[path])
    model.train_on_batch(X, Y)
    assert_finite(model)
    assert not np.array_equal(model.get_weights()[0], weights[0])


def test_empty_first_batch() -> None:
    """It teaches nothing: the next step must not use factors of zero."""
    steps = []
    for empty in (True, False):
        model = compiled_mlp(
            keras.optimizers.SGD(1e-3), kl_clip=None, eager=True
        )
        if empty:
            model.train_on_batch(X[:0], Y[:0])
        before = model.get_weights()
        model.train_on_batch(X, Y)
        after = model.get_weights()
        steps.append(
            [b - a for b, a in zip(before, after, strict=True)],
        )
    for got, want in zip(*steps, strict=True):
        assert_close(got, want, 1e-3)


# -------------------------------------------------------- bad decompositions
def poison(optimizer: Any, kind: str, path: str) -> None:
    """Writes NaN into one average."""
    (state,) = optimizer.method.states
    (one,) = (p for p in state.preconditioners if p.block.path == path)
    average = one.factors.averages[one.factors.names.index(kind)]
    average.assign(np.full(average.shape, NAN))
    # An average of no batch yet would count as zero.
    one.factors.weight.assign(1.0)


@pytest.mark.parametrize(
    ("solver", "kind", "eager"),
    [
        ("inverse", "A", True),
        ("inverse", "G", True),
        ("inverse", "G", False),
        ("eigen", "A", True),
        ("eigen", "G", True),
        ("eigen", "G", False),
    ],
)
def test_failed_decomposition_keeps_the_last_good_one(
    solver: str, kind: str, eager: bool, capfd: Any
) -> None:
    """Counted, named once, and the other layers go on."""
    model = compiled_mlp(
        solver=solver,
        factor_update_interval=100,
        inverse_update_interval=1,
        eager=eager,
    )
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    poison(optimizer, kind, "hidden")
    before = curvature(optimizer)
    weights = model.get_weights()
    capfd.readouterr()
    optimizer.damping = 0.5
    for _ in range(3):
        model.train_on_batch(X, Y)
    err = capfd.readouterr().err
    assert err.count("decomposition") == 1
    assert "hidden" in err
    assert "logits" not in err
    after = curvature(optimizer)
    for name, value in after.items():
        if ":solver_" in name:
            unchanged = np.array_equal(value, before[name])
            # The eigenvectors of unchanged factors are the same ones.
            if solver == "inverse" or ":solver_D:" in name:
                assert unchanged == ("hidden" in name), name
            assert np.isfinite(value).all()
    counts = {k: int(v) for k, v in after.items() if ":failures:" in k}
    assert [v for k, v in counts.items() if "hidden" in k] == [3]
    assert [v for k, v in counts.items() if "logits" in k] == [0]
    assert "failed decompositions of hidden: 3" in summary_text(optimizer)
    for got, old in zip(model.get_weights(), weights, strict=True):
        assert np.isfinite(got).all()
        assert not np.array_equal(got, old)


def test_failure_before_any_success_is_the_gradient() -> None:
    """Then the decomposition in use is the identity."""
    model = compiled_mlp(
        keras.optimizers.SGD(1.0),
        kl_clip=None,
        factor_update_interval=100,
        eager=True,
    )
    optimizer = kfac_of(model)
    for layer in ("hidden", "logits"):
        poison(optimizer, "A", layer)
    # Between two updates of the factors.
    optimizer.factor_updates.assign(1)
    (state,) = optimizer.method.states
    state.counters.observed.assign([1, 1])
    optimizer.iterations.assign(1)
    gradients = [np.array(g) for g in gradients_of(model, X, Y)]
    before = model.get_weights()
    model.train_on_batch(X, Y)
    assert int(optimizer.inverse_updates) == 1
    for b, a, g in zip(before, model.get_weights(), gradients, strict=True):
        assert_close(b - a, g, 1e-5)


def test_statistics_that_overflow_are_not_taken(capfd: Any) -> None:
    """Inputs whose squares are infinite, under gradients that are finite."""
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(2, use_bias=False, name="huge"),
            layers.Lambda(lambda x: x * 1e-30),
            layers.Dense(CLASSES, name="logits"),
        ]
    )
    model.compile(
        tfkfac.KFAC(factor_update_interval=1), loss(), run_eagerly=True
    )
    x = np.ones((4, 2), "float32")
    y = np.zeros(4, "int32")
    model.train_on_batch(x, y)
    optimizer = kfac_of(model)
    before = optimizer.factors()
    for _ in range(2):
        model.train_on_batch(x * 1e25, y)
    after = optimizer.factors()
    assert_same(after["huge"], before["huge"])
    assert not np.array_equal(after["logits"]["G"], before["logits"]["G"])
    err = capfd.readouterr().err
    assert err.count("statistics") == 1
    assert "huge" in err
    assert "statistics not finite in huge: 2" in summary_text(optimizer)
    assert int(optimizer.skipped_steps) == 0
    assert_finite(model)


# -------------------------------------------------------- degenerate factors
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("damping", [0.0, 1e-8, 0.01])
def test_zero_inputs(damping: float, solver: str) -> None:
    """A of the first kernel is zero, and so is its gradient."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(2, use_bias=False, name="blind"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )
    model.compile(
        tfkfac.KFAC(damping=damping, solver=solver), loss(), run_eagerly=True
    )
    before = model.get_weights()
    for _ in range(3):
        model.train_on_batch(np.zeros((4, 3)), np.array([0, 1, 2, 0]))
    optimizer = kfac_of(model)
    assert not optimizer.factors()["blind"]["A"].any()
    assert_finite(model)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    # The bias of the other layer still learns: class 0 is the likelier.
    bias = model.get_weights()[-1]
    assert bias[0] > 0 > bias[1]
    assert [b.any() for b in bias[None]] == [True]
    text = summary_text(optimizer)
    assert "failed" not in text
    assert "not finite" not in text


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_zero_gradients(damping: float, solver: str) -> None:
    """G is zero; a later batch with a gradient is taken as it should."""
    model = compiled_mlp(damping=damping, solver=solver, eager=True)
    nothing = np.zeros(len(X), "float32")
    before = model.get_weights()
    model.train_on_batch(X, Y, sample_weight=nothing)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
    for _ in range(6):
        model.train_on_batch(X, Y)
    assert_finite(model)
    assert "failed" not in summary_text(kfac_of(model))
    assert not np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_factors_of_one_number(damping: float, solver: str) -> None:
    """One input, one unit, no bias: A and G are 1x1."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(1, use_bias=False, name="first"),
            layers.Dense(1, name="second"),
        ]
    )
    weights = ([[0.5]], [[1.0]], [0.0])
    model.set_weights([np.array(w) for w in weights])
    model.compile(
        tfkfac.KFAC(keras.optimizers.SGD(0.3), damping=damping, solver=solver),
        "mse",
        run_eagerly=True,
    )
    x = np.linspace(-1, 1, 8, dtype="float32")[:, None]
    losses = [model.train_on_batch(x, 2 * x) for _ in range(12)]
    blocks = kfac_of(model).factors()
    assert blocks["first"]["A"].shape == (1, 1)
    assert_close(blocks["first"]["A"], [[np.mean(x**2)]], 1e-5)
    assert_finite(model)
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_dead_units_and_fewer_examples_than_inputs(solver: str) -> None:
    """Singular factors without damping stay finite in every step."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((40,)),
            layers.Dense(
                30,
                activation="relu",
                bias_initializer=keras.initializers.Constant(-0.5),
            ),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(
        tfkfac.KFAC(damping=0.0, solver=solver), loss(), run_eagerly=True
    )
    x = np.random.default_rng(0).normal(size=(2, 40)).astype("float32")
    for _ in range(12):
        model.train_on_batch(x, np.array([0, 2]))
    assert_finite(model)
    assert "failed" not in summary_text(kfac_of(model))


# -------------------------------------------------------------- half precision
@pytest.fixture
def policy() -> Iterator[Callable[[str], None]]:
    """Sets Keras' dtype policy for the layers of one test."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


def wide_batch() -> tuple[Array, Array]:
    return data(64, seed=5)


@pytest.mark.parametrize(
    ("name", "eager"),
    [
        ("mixed_float16", True),
        pytest.param("mixed_float16", False, marks=pytest.mark.slow),
        ("mixed_bfloat16", True),
    ],
)
def test_mixed_precision_has_the_true_scale(
    name: str, eager: bool, policy: Callable[[str], None]
) -> None:
    """Factors as of float32, whatever the loss scale Keras puts around."""
    x, y = wide_batch()
    want = compiled_mlp(eager=True)
    want.train_on_batch(x, y)
    policy(name)
    model = compiled_mlp(eager=eager)
    if name == "mixed_float16":
        assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    else:
        assert type(model.optimizer) is tfkfac.KFAC
    model.train_on_batch(x, y)
    optimizer = kfac_of(model)
    assert int(optimizer.iterations) == 1
    tolerance = {"mixed_float16": 4e-3, "mixed_bfloat16": 3e-2}[name]
    for path, block in kfac_of(want).factors().items():
        for factor, value in block.items():
            got = optimizer.factors()[path][factor]
            assert got.dtype == np.float32
            assert_close(got, value, tolerance, f"{factor} of {path}")
    for got, value in zip(model.get_weights(), want.get_weights(), strict=True):
        assert got.dtype == np.float32
        assert_close(got, value, 10 * tolerance)


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_low_precision_trains(name: str, policy: Callable[[str], None]) -> None:
    """A few epochs with the defaults: finite and better than before."""
    x, y = wide_batch()
    policy(name)
    model = compiled_mlp(eager=True)
    history = model.fit(x, y, batch_size=32, epochs=4, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    state = curvature(kfac_of(model))
    factors = [v for k, v in state.items() if re.search(":factor_[AG]:", k)]
    assert {v.dtype.name for v in factors} == {"float32"}


@pytest.mark.parametrize("eager", [True, False])
def test_overflowed_step_is_skipped(
    eager: bool, policy: Callable[[str], None]
) -> None:
    """A loss scale beyond float16: the scaler halves it, nothing moves."""
    policy("mixed_float16")
    model = mlp()
    scaler = keras.optimizers.LossScaleOptimizer(
        tfkfac.KFAC(), initial_scale=2.0**40
    )
    model.compile(scaler, loss(), run_eagerly=eager)
    before = model.get_weights()
    state = curvature(kfac_of(model))
    model.train_on_batch(X, Y)
    assert float(scaler.dynamic_scale) == 2.0**39
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
    assert_same(curvature(kfac_of(model)), state)
    assert int(scaler.iterations) == 0
    for _ in range(30):
        model.train_on_batch(X, Y)
    assert int(scaler.iterations) > 0
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert_finite(model)


def scaled_step(model: Any, scaler: Any) -> None:
    gradients = gradients_of(
        model, X, Y, lambda y, p: scaler.scale_loss(loss()(y, p))
    )
    scaler.apply(gradients, model.trainable_variables)


def test_loss_scale_of_a_custom_loop_must_be_told() -> None:
    """A silent factor of 2^15 in G is worse than an error."""
    model = mlp()
    scaler = keras.optimizers.LossScaleOptimizer(tfkfac.KFAC())
    scaler.inner_optimizer.attach(model)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"attach\(model, loss_scaler=\.\.\."):
        scaled_step(model, scaler)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("eager", [True, False])
def test_loss_scale_of_a_custom_loop(eager: bool) -> None:
    model, plain = mlp(), compiled_mlp(eager=True)
    scaler = keras.optimizers.LossScaleOptimizer(
        tfkfac.KFAC(), initial_scale=512.0
    )
    scaler.inner_optimizer.attach(model, loss_scaler=scaler)
    scaler.build(model.trainable_variables)

    def step() -> None:
        scaled_step(model, scaler)

    (step if eager else tf.function(step))()
    plain.train_on_batch(X, Y)
    got, want = scaler.inner_optimizer.factors(), kfac_of(plain).factors()
    for layer in ("hidden", "logits"):
        for name in ("A", "G"):
            assert_close(find(got, layer)[name], want[layer][name], 1e-5)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_scaler_put_around_a_compiled_optimizer() -> None:
    """Known without a scaler first, then compiled with one: it is told."""
    model = compiled_mlp(eager=True)
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    want = optimizer.factors()["logits"]["G"]
    scaler = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(scaler, loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    got = optimizer.factors()["logits"]["G"]
    assert np.trace(got) < 2 * np.trace(want)
