"""Modules of tools/studies/time_to_target.py.

The controller does not import TensorFlow: `plan` lists the trainings of
`problems` and `methods`, and `study` starts a process for each setting
(`training`, with `data`, `tiny`, `models` and `recording`) and keeps the
records. `equal` lists the trainings at equal processor seconds. `results`
compares records, `report` makes tables. Data and models are those of
tools/common/.
"""

import command  # noqa: F401, the module path
