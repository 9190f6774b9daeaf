"""Private modules that compat imports. Nothing here imports tfkfac."""

import importlib

import pytest

from tests.compat.contracts import contract

PRIVATE = [
    (
        "keras.src.backend.common.masking",
        "get_keras_mask",
        "losses.in_place_of",
    ),
    (
        "keras.src.backend.common.masking",
        "set_keras_mask",
        "losses.in_place_of",
    ),
    (
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer",
        "optimizers.updates_in_replica",
    ),
    (
        "tensorflow.python.eager.record",
        "could_possibly_record",
        "graphs.under_tape",
    ),
    (
        "tensorflow.python.framework.ops",
        "gradient_registry",
        "graphs.is_constant_to_tapes",
    ),
    (
        "tensorflow.python.ops.control_flow_util",
        "GraphOrParentsInXlaContext",
        "graphs.in_xla",
    ),
    (
        "tensorflow.python.ops.resource_variable_ops",
        "ResourceVariable",
        "graphs.state_variable",
    ),
]


@pytest.mark.parametrize(("module", "name", "function"), PRIVATE)
def test_private_modules_are_there(
    module: str, name: str, function: str
) -> None:
    with contract(f"compat.{function}", f"There is {module}.{name}."):
        assert hasattr(importlib.import_module(module), name)
