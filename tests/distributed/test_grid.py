import itertools
from typing import Any

import pytest

from tfkfac.distributed.grid import gradient_workers, grid

DIVISORS = [
    (p, w) for p in (1, 2, 4, 6, 8) for w in range(1, p + 1) if not p % w
]


class TestGrid:
    @pytest.mark.parametrize("workers,count", DIVISORS)
    def test_partitions(self, workers: int, count: int) -> None:
        layout = grid(workers, count)
        everyone = list(range(workers))
        for groups in (layout.rows, layout.columns):
            assert sorted(itertools.chain(*groups)) == everyone
        assert {len(c) for c in layout.columns} == {count}
        assert {len(r) for r in layout.rows} == {workers // count}
        for row, column in itertools.product(layout.rows, layout.columns):
            assert len(set(row) & set(column)) == 1

    def test_row_by_row(self) -> None:
        assert grid(8, 2).rows == ((0, 1, 2, 3), (4, 5, 6, 7))
        assert grid(8, 2).columns == ((0, 4), (1, 5), (2, 6), (3, 7))

    @pytest.mark.parametrize("count", [0, 3, 8])
    def test_does_not_divide(self, count: int) -> None:
        with pytest.raises(ValueError, match=f"gradient_workers={count}"):
            grid(4, count)


class TestGradientWorkers:
    @pytest.mark.parametrize(
        "workers,fraction,count",
        [
            (4, 0.25, 1),
            (4, 0.5, 2),
            (4, 1, 4),
            (3, 1 / 3, 1),
            (49, 1 / 49, 1),  # times 49 is less than 1
            (3, 1 - 1 / 3 - 1 / 3, 1),  # 1.0000000000000002
            # Fewer than one is one.
            (4, 0.1, 1),
            (1, 0.5, 1),
        ],
    )
    def test_counts(self, workers: int, fraction: Any, count: int) -> None:
        assert gradient_workers(workers, fraction) == count

    @pytest.mark.parametrize(
        "workers,fraction", [(4, 0.3), (4, 0.75), (2, 0.7), (100, 0.29)]
    )
    def test_not_whole_or_no_divisor(self, workers: int, fraction: Any) -> None:
        with pytest.raises(ValueError) as error:
            gradient_workers(workers, fraction)
        assert "`gradient_worker_fraction` times" in str(error.value)
        assert f"gradient_worker_fraction={fraction}" in str(error.value)

    def test_message_names_what_is_allowed(self) -> None:
        with pytest.raises(ValueError, match="one of 1/4, 2/4, 1 with 4"):
            gradient_workers(4, 0.75)

    @pytest.mark.parametrize("fraction", [0, -0.5, 1.5, True, "half", None])
    def test_not_a_fraction(self, fraction: Any) -> None:
        with pytest.raises(ValueError, match=r"number in \(0, 1\]"):
            gradient_workers(4, fraction)

    def test_nan(self) -> None:
        with pytest.raises(ValueError, match=r"number in \(0, 1\]"):
            gradient_workers(4, float("nan"))
