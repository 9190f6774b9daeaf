"""Files and reports of FOSI."""

import numpy as np
import pytest

from tests.support.fosi_reference import SIZE, data, loss, mlp, small
from tests.support.reference import Array
from tests.support.small import curvature, summary_text

X, Y = data()


# --------------------------------------------------------------------- files
def test_state_of_other_sizes_is_refused() -> None:
    store: dict[str, Array] = {}
    models = []
    for count in (2, 3):
        model = mlp()
        model.compile(small(num_largest=count), loss())
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    models[0].optimizer.save_own_variables(store)
    with pytest.raises(ValueError, match="does not fit"):
        models[1].optimizer.load_own_variables(store)


# ------------------------------------------------------------------- reports
SAVED = {
    "directions", "estimations", "failures", "inner_momentum", "largest_rate",
    "last_estimation", "momentum", "ritz_values", "skipped_steps", "square",
    "version", "warmup",
}  # fmt: skip


def test_reports() -> None:
    """The summary has the time of the first estimation, bytes, Ritz values."""
    model = mlp()
    model.compile(small(num_smallest=1, warmup_steps=2), loss())
    optimizer = model.optimizer
    before = optimizer.state_bytes()
    optimizer.build(model.trainable_variables)
    for step in range(4):
        text = summary_text(optimizer)
        come = len(optimizer.spectrum()) > 0
        assert come == ("Ritz values" in text) == (step > 2)
        assert ("0, the first before update 3\n" in text + "\n") != come
        model.train_on_batch(X, Y)
    kept = {k.split(":")[1]: v for k, v in curvature(optimizer).items()}
    assert set(kept) == SAVED
    own = sum(v.nbytes for v in kept.values() if v.dtype == np.float32)
    want = {"directions": own, "basis": 4 * SIZE * 4}
    want |= {"copies": 0, "counters": 6 * 8}
    want["total"] = sum(want.values())
    assert optimizer.state_bytes() == before == want
    traffic = optimizer.communication_bytes()
    assert set(traffic) == {"warmup", "plain", "estimation"}
    for kind in traffic.values():  # nothing moves on one device
        assert set(kind.values()) == {0}
    values = optimizer.spectrum()
    assert (np.diff(values) > 0).all()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "FOSI 'fosi' of model 'mlp'" in text
    assert "SGD on the rest" in text
    for line in (
        f"Weights {SIZE}",
        "Directions 2 of largest and 1 of smallest curvature",
        "Lanczos steps 4",
        "Estimations 1",
        f"Ritz values {', '.join(f'{v:.4g}' for v in values)}",
    ):
        assert line in lines
