"""Agreement and training of several processes with several devices."""

import numpy as np
import pytest

from tests.support.cluster import run
from tests.support.strategies import strategy
from tests.support.workers_collectives import OPTIMIZERS, batches, build

# Another algorithm with several replicas.
NOT_AS_ALONE = {"dp_kfac", "accelerator"}
QUICK = ["comm_opt", "dp_kfac", "rows"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick", marks=pytest.mark.slow),
        pytest.param(
            [name for name in OPTIMIZERS if name not in QUICK],
            id="all others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes_of_two_devices(names: list[str]) -> None:
    """The weights of all four replicas equal those of one process bitwise."""
    first, second = run(
        "tests.support.workers_collectives:train_on_grid",
        names,
        workers=2,
        devices=2,
        time_limit=300.0,
    )
    for name in names:
        for ours, theirs in zip(first[name], second[name], strict=True):
            for copy in (*ours, *theirs):
                np.testing.assert_array_equal(copy, ours[0])
    for name in set(names) - NOT_AS_ALONE:
        alone = build(strategy(None), name, [5])
        alone.fit(batches(6), verbose=0)
        for ours, want in zip(first[name], alone.get_weights(), strict=True):
            np.testing.assert_allclose(ours[0], want, atol=1e-5)
