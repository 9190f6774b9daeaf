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
    """Ritz values after the first estimation; bytes of the state."""
    model = mlp()
    model.compile(small(num_smallest=1, warmup_steps=2), loss())
    optimizer = model.optimizer
    before = optimizer.state_bytes()
    for step in range(4):
        estimated = step > 2
        assert (optimizer.spectrum().size > 0) == estimated
        assert ("Ritz values" in summary_text(optimizer)) == estimated
        model.train_on_batch(X, Y)
    assert (np.diff(optimizer.spectrum()) > 0).all()
    state = {k.split(":")[1]: v for k, v in curvature(optimizer).items()}
    state = {k: v for k, v in state.items() if not k.startswith("run_")}
    del state["set_learning_rate"]
    assert set(state) == SAVED
    floats = sum(v.nbytes for v in state.values() if v.dtype == np.float32)
    want = {"directions": floats, "basis": 4 * SIZE * 4}
    want |= {"copies": 0, "counters": 6 * 8}
    want["total"] = sum(want.values())
    assert optimizer.state_bytes() == before == want
    traffic = optimizer.communication_bytes()
    assert set(traffic) == {"warmup", "plain", "estimation"}
    for sizes in traffic.values():  # no communication on one device
        assert set(sizes.values()) == {0}
