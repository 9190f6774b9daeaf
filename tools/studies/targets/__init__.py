"""What tools/studies/time_to_target.py is made of.

The controller does not import TensorFlow: `plan` says which trainings there
are, of `problems` and `methods`, and `study` starts a process for each setting
(`training`, with `data`, `tiny`, `models` and `recording`) and keeps the
records. `results` turns these into seconds to a target and claims, `report`
into tables. Data and models are those of examples/.
"""

import command  # noqa: F401, the module path
