"""Factor types: storage, transfer and decomposition of symmetric matrices.

To add a factor type, subclass `Factor`; blocks declare their factor types.
"""

from tfkfac.factors.base import VALUES, Factor, MatrixPart, Part, Side, Tensors
from tfkfac.factors.low_rank import Limit, LowRank
from tfkfac.factors.matrices import Dense, Diagonal

__all__ = [
    "VALUES",
    "Dense",
    "Diagonal",
    "Factor",
    "Limit",
    "LowRank",
    "MatrixPart",
    "Part",
    "Side",
    "Tensors",
]
