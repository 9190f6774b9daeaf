import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfkfac.distributed.assignment import assign, cost


def makespan(costs: list[int], chosen: Sequence[int], workers: int) -> int:
    loads = [0] * workers
    for piece, worker in zip(costs, chosen, strict=True):
        loads[worker] += piece
    return max(loads)


class TestCost:
    @pytest.mark.parametrize(
        "shape,compute,memory",
        [
            ((10, 10), 1000, 100),
            ((4, 10, 10), 4000, 400),
            ((10,), 10, 10),
            ((1, 1), 1, 1),
        ],
    )
    def test_counts(
        self, shape: tuple[int, ...], compute: int, memory: int
    ) -> None:
        assert cost(shape, "compute") == compute
        assert cost(shape, "memory") == memory

    def test_policy_unknown(self) -> None:
        with pytest.raises(ValueError, match="Argument `assignment` must be"):
            cost((2, 2), "magic")


class TestAssign:
    @given(
        st.lists(st.integers(0, 20), min_size=1, max_size=7),
        st.integers(1, 3),
    )
    def test_lpt_bound(self, costs: list[int], workers: int) -> None:
        chosen = assign(costs, workers, "compute")
        best = min(
            makespan(costs, every, workers)
            for every in itertools.product(range(workers), repeat=len(costs))
        )
        # 4/3 - 1/(3m), without fractions.
        bound = (4 * workers - 1) * best
        assert 3 * workers * makespan(costs, chosen, workers) <= bound

    def test_costly_first_ties_by_order(self) -> None:
        assert assign([5, 5, 9, 5], 2, "compute") == (1, 1, 0, 0)
        assert assign([1, 1, 1], 3, "memory") == (0, 1, 2)

    def test_every_turn_is_balanced(self) -> None:
        """By hand: without turns, both nines would have one worker each."""
        costs, turns = [9, 8, 5, 4, 4, 1], [0, 1, 0, 1, 0, 1]
        assert assign(costs, 2, "compute", turns) == (0, 1, 1, 0, 1, 0)
        # Turn 0 is 9 | 5 + 4, turn 1 is 4 + 1 | 8.
        assert assign(costs, 2, "compute") == (0, 1, 1, 0, 0, 1)
        # Memory is held over all turns.
        memory = assign(costs, 2, "memory")
        assert assign(costs, 2, "memory", turns) == memory

    def test_round_robin(self) -> None:
        assert assign([9, 1, 1, 1, 1], 3, "round_robin") == (0, 1, 2, 0, 1)

    def test_more_workers_than_pieces(self) -> None:
        assert sorted(assign([3, 2], 8, "compute")) == [0, 1]

    def test_nothing(self) -> None:
        assert assign([], 2, "compute") == ()

    def test_no_workers(self) -> None:
        with pytest.raises(ValueError, match=r"`workers`.*workers=0"):
            assign([1], 0, "compute")
