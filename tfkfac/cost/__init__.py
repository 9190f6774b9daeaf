"""Seconds, bytes and memory of K-FAC, before it is run.

Sizes of factors, plans and messages are those of the library itself. Seconds
come of them by a few numbers of a `Machine`.
"""

from tfkfac.cost.estimate import Candidate, Estimate, compare, recommend
from tfkfac.cost.machine import Machine

__all__ = ["Candidate", "Estimate", "Machine", "compare", "recommend"]
