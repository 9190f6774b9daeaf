"""Kinds of factors: how a symmetric matrix is kept, sent, solved and applied.

A new kind is one class here, a `Factor`; a block declares which it has.
"""

from tfkfac.factors.base import VALUES, Factor, Side, Tensors, kind_of
from tfkfac.factors.diagonal import Diagonal
from tfkfac.factors.limit import Limit
from tfkfac.factors.low_rank import LowRank
from tfkfac.factors.matrices import Dense, Stack
from tfkfac.factors.parts import MatrixPart, Part

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
