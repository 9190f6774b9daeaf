"""Kinds of factors: how a symmetric matrix is kept, sent, solved and applied.

A new kind is one class here, a `Factor`; a block declares which it has.
"""

from tfkfac.factors.base import (
    VALUES,
    Factor,
    MatrixPart,
    Part,
    Side,
    Tensors,
    kind_of,
)
from tfkfac.factors.low_rank import Limit, LowRank
from tfkfac.factors.matrices import Dense, Diagonal, Stack

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
    "Stack",
    "Tensors",
    "kind_of",
]
