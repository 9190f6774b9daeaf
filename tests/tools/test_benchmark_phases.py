import pytest

from benchmarks.phases import Mix, Phases


def test_median_of_each_phase() -> None:
    """Three intervals of four steps, from step 6 on, one of them disturbed."""
    by_step = {
        **{6: 1.0, 7: 2.0, 8: 9.0, 9: 4.0},
        **{10: 1.2, 11: 2.2, 12: 9.2, 13: 4.2},
        **{14: 1.1, 15: 70.0, 16: 9.1, 17: 4.1},
    }
    phases = Phases.of(Mix(1, 4), 6, list(by_step.values()))
    # Steps 8, 12 and 16 have phase 0, then come 9, 10 and 7.
    assert phases.times == (9.1, 4.1, 1.1, 2.2)
    assert phases.mean == pytest.approx((9.1 + 4.1 + 1.1 + 2.2) / 4)
    assert phases.median == pytest.approx((4.1 + 2.2) / 2)
    assert phases.longest == 9.1
