"""Faults of workers, with real processes: those without other tests.

The others have tests in tests/cluster and tests/supervision.
"""

import pytest

import faults

SOON_S = 15.0  # until others report the fault, on a busy machine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill", "pause"])
def test_it_is_reported_and_ends(name: str) -> None:
    fault, result = faults.FAULTS[name], faults.run(name)
    assert result.problem(fault) is None, result.output
    if fault.line is not None:
        assert result.reported_s is not None and result.reported_s < SOON_S
