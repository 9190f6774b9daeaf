"""Modules of tools/studies/time_to_target.py.

The controller does not import TensorFlow: `plan` lists the trainings of
`problems` and `methods`, and `study` starts a process for each setting
(`training`, with `data`, `tiny`, `models` and `recording`) and keeps the
records. `results` compares them, `report` makes tables. Data and models are
those of tools/common/.
"""

import command  # noqa: F401, the module path
