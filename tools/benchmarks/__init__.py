"""What tools/benchmark.py is made of.

The controller (`measurement`, `jobs`) starts a process for each
variant of an optimizer (`worker`) and lets them take turns; `phases` turns the
times of steps into numbers, `report` and `plots` show them. The controller
does not import TensorFlow. Data
and models are those of examples/.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
