"""Learning rate schedules."""

from tfkfac.schedules.fit_decay import FitDecay

__all__ = ["FitDecay"]
