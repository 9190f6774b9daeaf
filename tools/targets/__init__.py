"""What tools/time_to_target.py is made of.

The controller (`study`) starts a process for each training (`training`, with
`data`, `models`, `methods` and `recording`) that is not among the results yet;
`problems` says what is trained and how long. `results` turns the curves into
seconds to a target and claims, `report` and `plots` show them. The controller
does not import TensorFlow.
"""
