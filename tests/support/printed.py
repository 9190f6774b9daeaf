"""Registers the solvers of `examples/experiments/printed.py`."""

import importlib
import pathlib
import sys

# Processes of a test cluster have only the root of the repository on the path.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
importlib.import_module("experiments.printed")
