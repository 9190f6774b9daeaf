"""Learning rate schedules."""

from tfkfac.training.fit_decay import FitDecay

__all__ = ["FitDecay"]
