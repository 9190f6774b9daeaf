"""Second-order optimizers for Keras on TensorFlow.

>>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")
"""

from tfkfac import curvature
from tfkfac.distributed.strategy import MultiWorkerMirroredStrategy
from tfkfac.optimizers import binding
from tfkfac.optimizers.fosi import FOSI
from tfkfac.optimizers.kfac import KFAC

__version__ = "0.1.0"
__all__ = ["FOSI", "KFAC", "MultiWorkerMirroredStrategy", "curvature"]

binding.install()
