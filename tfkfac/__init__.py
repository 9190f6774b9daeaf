"""Second-order optimizers for Keras on TensorFlow.

>>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")
"""

import keras

from tfkfac import (
    blocks,
    callbacks,
    curvature,
    factors,
    fisher,
    schedules,
    solvers,
)
from tfkfac.blocks import register_block
from tfkfac.callbacks.model import supervise
from tfkfac.cluster.strategy import MultiWorkerMirroredStrategy
from tfkfac.compat.models import after_compile
from tfkfac.fisher import register_distribution
from tfkfac.fosi.optimizer import FOSI
from tfkfac.gauss_newton.optimizer import GaussNewton
from tfkfac.kfac.optimizer import KFAC
from tfkfac.kfac.settings import Distribution
from tfkfac.shell.loss_scale import LossScaleOptimizer
from tfkfac.solvers import register_solver

__version__ = "0.2.0.dev0"
__all__ = [
    "FOSI",
    "KFAC",
    "Distribution",
    "GaussNewton",
    "LossScaleOptimizer",
    "MultiWorkerMirroredStrategy",
    "blocks",
    "callbacks",
    "curvature",
    "factors",
    "fisher",
    "register_block",
    "register_distribution",
    "register_solver",
    "schedules",
    "solvers",
]

after_compile(supervise)
# Register the names, so that `model.compile("kfac")` works like "adam".
keras.saving.get_custom_objects().update(
    kfac=KFAC, fosi=FOSI, gaussnewton=GaussNewton, gauss_newton=GaussNewton
)
