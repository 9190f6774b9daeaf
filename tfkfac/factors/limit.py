"""Which symmetric matrices are kept whole."""

import dataclasses

from tfkfac.factors.base import Factor
from tfkfac.factors.low_rank import LowRank
from tfkfac.factors.matrices import Dense, Stack


@dataclasses.dataclass(frozen=True)
class Limit:
    """Up to which size a symmetric matrix is kept whole.

    Attributes:
        size: Most rows of a matrix that is kept whole, or None for any.
        rank: Rank to which a wider one is approximated, if it has as many
            rows.
    """

    size: int | None = None
    rank: int = 64

    def matrix(self, size: int) -> Factor:
        """The kind of one matrix."""
        return self._low_rank(size) if self.exceeded(size) else Dense(size)

    def stack(self, count: int, size: int) -> Factor:
        """The kind of one matrix for each of `count` independent parts."""
        if self.exceeded(size):
            return self._low_rank(size, count)
        return Stack(count, size)

    def exceeded(self, size: int) -> bool:
        """Whether a matrix of this size is not kept whole."""
        return self.size is not None and size > self.size

    def _low_rank(self, size: int, *stack_shape: int) -> LowRank:
        return LowRank(size, min(self.rank, size - 1), stack_shape)
