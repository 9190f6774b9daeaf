"""Second-order optimizers for Keras on TensorFlow.

>>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")
"""

from tfkfac import blocks, callbacks, cost, curvature, factors, fisher
from tfkfac.blocks import register_block
from tfkfac.cluster.strategy import MultiWorkerMirroredStrategy
from tfkfac.compat.optimizers import find_by_name
from tfkfac.fisher import register_distribution
from tfkfac.fosi.optimizer import FOSI
from tfkfac.gauss_newton.optimizer import GaussNewton
from tfkfac.kfac.length import LevenbergMarquardt, QuadraticStep
from tfkfac.kfac.optimizer import KFAC
from tfkfac.kfac.settings import Distribution
from tfkfac.shell import binding, carry
from tfkfac.shell.loss_scale import LossScaleOptimizer
from tfkfac.supervision import aftermath, fit

__version__ = "0.1.0"
__all__ = [
    "FOSI",
    "KFAC",
    "Distribution",
    "GaussNewton",
    "LevenbergMarquardt",
    "LossScaleOptimizer",
    "MultiWorkerMirroredStrategy",
    "QuadraticStep",
    "blocks",
    "callbacks",
    "cost",
    "curvature",
    "factors",
    "fisher",
    "register_block",
    "register_distribution",
]

binding.install()
carry.install()
fit.install()
aftermath.install()
find_by_name(KFAC)
find_by_name(FOSI)
find_by_name(GaussNewton)
