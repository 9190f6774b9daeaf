"""State of other layers, shapes and solvers is refused or computed again."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.reference import eigen_solve, inverse_solve
from tests.support.saved_models import compiled, train
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    loss,
)


def state_of(names: str, width: int = 5, **arguments: Any) -> dict[str, Any]:
    """The saved state for a network of dense layers of these names."""
    *hidden, last = names.split()
    stack = [layers.Dense(width, name=name) for name in hidden]
    stack.append(layers.Dense(CLASSES, name=last))
    model = keras.Sequential([keras.Input((FEATURES,)), *stack])
    model.compile(tfkfac.KFAC(**{"step": "natural", **arguments}), loss())
    return curvature(kfac_of(model))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: state_of("first logits"), "'kfac'.*'first'.*'hidden'"),
        (lambda: state_of("hidden"), r"Only in the model: \['logits'\]"),
        (
            lambda: state_of("hidden logits more"),
            r"Only in the file: \['more'\]",
        ),
        (
            lambda: state_of("hidden logits", skip_layers=["hidden"]),
            r"Only in the model: \['hidden'\]",
        ),
        (
            lambda: state_of("hidden logits", 9),
            r"does not fit layer 'hidden'.*\(5, 5\).*\(9, 9\)",
        ),
    ],
    ids=["other", "fewer", "more", "skipped", "wider"],
)
def test_other_layers(state: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kfac_of(compiled_mlp()).load_own_variables(state())


@pytest.mark.parametrize(
    ("saved", "loaded"), [("eigen", "inverse"), ("inverse", "eigen")]
)
def test_other_solver(saved: str, loaded: str, tmp_path: Path) -> None:
    """Factors are loaded; the next step decomposes them at any interval."""
    arguments: Any = {"kl_clip": None, "factor_update_interval": 3}
    arguments |= {"inverse_update_interval": 3, "damping": 0.1}
    model = compiled("sequential", "plain", solver=saved, **arguments)
    train(model, 0, 4)
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled("sequential", "plain", solver=loaded, **arguments)
    train(other, 0, 1)
    words = rf"'kfac'.*\['{saved}'\].*\['{loaded}'\] is reset"
    with pytest.warns(UserWarning, match=words):
        other.load_weights(tmp_path / "model.weights.h5")
    factors = kfac_of(other).factors()
    for layer, kept in kfac_of(model).factors().items():
        assert_same(factors[layer], kept)
    before = other.get_weights()
    x, y = data(seed=4)
    kernel, bias, *_ = (np.array(g) for g in gradients_of(other, x, y))
    other.train_on_batch(x, y)
    solve = {"eigen": eigen_solve, "inverse": inverse_solve}[loaded]
    step = solve(np.vstack([kernel, bias]), **factors["hidden"], damping=0.1)
    moved = np.vstack(
        [b - w for b, w in zip(before, other.get_weights(), strict=True)][:2]
    )
    np.testing.assert_allclose(moved, 0.05 * step, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("natural", "spectral"), ("spectral", "natural")]
)
def test_other_step(saved: str, loaded: str) -> None:
    """Factors are loaded; momenta and length of spectral steps are reset."""
    state = state_of("hidden logits", step=saved)
    optimizer = kfac_of(compiled_mlp(step=loaded))
    with pytest.warns(UserWarning, match="is reset"):
        optimizer.load_own_variables(state)


def test_empty_state_changes_nothing() -> None:
    model = compiled_mlp(eager=True)
    train(model, 0, 1)
    before = everything(model)
    with pytest.warns(UserWarning, match="no curvature in the loaded file"):
        kfac_of(model).load_own_variables({})
    assert_same(everything(model), before)
