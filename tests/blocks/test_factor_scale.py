"""What factors do not depend on, and their running averages."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.harness import (
    Step,
    assert_close,
    check_factors,
    compiled,
    find,
    half_squared_error,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import deep_model, one_layer, targets
from tests.support.reference import Array, RunningAverage, append_one, factors

SHARING = ["expand", "reduce"]
BATCH = 4


@pytest.mark.parametrize(
    ("eager", "scale"), [(True, 2.0**10), (False, 2.0**10), (False, 2.0**100)]
)
def test_loss_scale_is_undone(eager: bool, scale: float) -> None:
    """Inside Keras' LossScaleOptimizer: same factors, same step.

    A scale that grows in bfloat16 may be one whose square is infinite.
    """
    runs = []
    for scaled in (False, True):
        layer = layers.Dense(2, activation="tanh", name="block")
        model = one_layer(layer, (3,))
        x = make_input("", (3,), BATCH)
        optimizer = compiled(model)
        if scaled:
            outer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=scale
            )
            model.compile(
                optimizer=outer, loss=half_squared_error, run_eagerly=eager
            )
        model.train_on_batch(x, targets(model, x))
        block = find(optimizer.factors(), "block")
        runs.append([block["A"], block["G"], *weights_of(model)])
    for got, want in zip(runs[1], runs[0], strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize("copies", [2, 5])
@pytest.mark.parametrize("sharing", SHARING)
def test_batch_size_invariance(copies: int, sharing: str) -> None:
    """A repeated batch has the same factors and makes the same step."""
    x = make_input("", (6, 6, 2), 3)
    labels = np.array([0, 2, 1])
    steps: list[Step] = []
    for n in (1, copies):
        steps.append(
            train_once(
                deep_model("float32"),
                np.tile(x, (n, 1, 1, 1)),
                np.tile(labels, n),
                loss=keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True
                ),
                weight_sharing=sharing,
                kl_clip=0.02,
            )
        )
    one, many = steps
    assert set(one.factors) == set(many.factors)
    for path, block in one.factors.items():
        for key, value in block.items():
            assert_close(
                many.factors[path][key], value, 3e-5, f"{key} of {path}"
            )
    for got, want in zip(many.delta, one.delta, strict=True):
        assert_close(got, want, 1e-3, "step")


def test_running_average_over_changing_batches() -> None:
    """Bias-corrected, counted in factor updates, decay on the old value."""
    decay, every = 0.6, 2
    model = one_layer(layers.Dense(2, name="block"), (3,))
    optimizer = compiled(
        model, factor_decay=decay, factor_update_interval=every, inner=0.1
    )
    averages = RunningAverage(decay), RunningAverage(decay)
    current: list[Array] = []
    for step in range(5):
        x = make_input("", (3,), BATCH, seed=step)
        y = targets(model, x, seed=step)
        if step % every == 0:
            a = append_one(x.astype(np.float64))
            g = a @ np.vstack(weights_of(model)) - y
            new = factors(a[:, None], g[:, None])
            current = [m.update(v) for m, v in zip(averages, new, strict=True)]
        model.train_on_batch(x, y)
        A, G = current
        check_factors(find(optimizer.factors(), "block"), A, G)
