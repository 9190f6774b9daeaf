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


def interval(spread: bool) -> list[float]:
    """A hundred steps of 1, factors for 2, decompositions for 10 in all."""
    times = [1.0] * 100
    for step in range(0, 100, 10):
        times[step] += 2.0 + (1.0 if spread else 0.0)
    if not spread:
        times[0] += 10.0
    return times


def test_spread_decompositions_cost_the_same() -> None:
    at_once = Phases.of(Mix(10, 100), 200, interval(spread=False))
    spread = Phases.of(Mix(10, 100), 200, interval(spread=True))
    assert at_once.mean == pytest.approx(1 + 10 * 2 / 100 + 10 / 100)
    assert spread.mean == pytest.approx(at_once.mean)
    assert (at_once.longest, spread.longest) == (13.0, 4.0)
    assert at_once.kinds() == {"inverse": 13.0, "factor": 3.0, "plain": 1.0}
