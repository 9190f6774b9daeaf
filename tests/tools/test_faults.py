"""The matrix of faults, with real processes; see `tools/studies/faults.py`."""

import pytest

import faults

# Seconds within which others have to be told, on a busy machine; TensorFlow's
# own detection of a worker that is stopped takes 10, a standstill is told of
# after 60.
SOON = 15.0
LATE = {"stop": 30.0, "hang": 90.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.FAULTS)
def test_it_is_said_and_ends(name: str) -> None:
    fault, result = faults.FAULTS[name], faults.run(name)
    assert result.problem(fault) is None, result.output
    if fault.says is not None:
        assert result.said is not None
        assert result.said < LATE.get(name, SOON)
