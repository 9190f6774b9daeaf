"""Variables that a function of the user's writes, whoever made them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.ops import resource_variable_ops

from tfkfac.compat.overrides import overridden

_WRITES = ("assign", "scatter_", "batch_scatter_")
# Both, as TensorFlow's decorator of the first has copies of the methods.
_VARIABLES = (
    resource_variable_ops.ResourceVariable,
    resource_variable_ops.BaseResourceVariable,
)
# All that draws numbers prepares them by this.
_GENERATOR, _DRAWS = tf.random.Generator, "_prepare_key_counter"


@contextlib.contextmanager
def written_variables() -> Iterator[list[tf.Tensor]]:
    """Notes the handles of the variables that are written inside.

    Keras' own are known to its stateless scopes; this is for a
    `tf.Variable` or a `tf.random.Generator` that a loss keeps.

    In a graph this relies on `get_read_write_resource_inputs`, by which
    TensorFlow orders what reads and writes a resource, and which looks into
    the functions that an operation calls. Outside of graphs it relies on the
    methods of variables that begin with "assign" and "scatter", and on
    `_prepare_key_counter` of generators.
    """
    handles: list[tf.Tensor] = []
    with contextlib.ExitStack() as stack:
        if tf.executing_eagerly():
            note = functools.partial(_note, handles)
            for owner, name in _writing_methods():
                stack.enter_context(overridden(owner, name, note))
            yield handles
            return
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield handles
        for operation in graph.get_operations()[first:]:
            find = auto_control_deps_utils.get_read_write_resource_inputs
            for handle in find(operation)[1]:
                _add(handles, _outermost(handle))


def _outermost(handle: tf.Tensor) -> tf.Tensor:
    """What a handle in the graph of a function stands for outside of all.

    Two placeholders of one variable in one graph would be two variables to
    what orders operations. This relies on `captures` of a function's graph.
    """
    while not isinstance(handle, ops.EagerTensor):
        captures = getattr(handle.graph, "captures", ())
        outside = [own for own, inner in captures if inner is handle]
        if not outside:
            break
        (handle,) = outside
    return handle


def _note(
    handles: list[tf.Tensor],
    below: Callable[..., Any],
    /,
    variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Notes a variable, or that of a generator, whose method is called."""
    own = variable.state if isinstance(variable, _GENERATOR) else variable
    _add(handles, own.handle)
    return below(variable, *args, **kwargs)


def _writing_methods() -> list[tuple[type, str]]:
    """Classes and the names of their methods that write."""
    found = [
        (owner, name)
        for owner in _VARIABLES
        for name in vars(owner)
        if name.startswith(_WRITES)
    ]
    return [*found, (_GENERATOR, _DRAWS)]


def _add(handles: list[tf.Tensor], handle: tf.Tensor) -> None:
    known = any(handle is one for one in handles)
    if not known and _kind(handle) is not None:
        handles.append(handle)


def _kind(handle: tf.Tensor) -> tf.DType | None:
    """The dtype of the variable of a handle; None of another resource."""
    data = resource_variable_ops.get_eager_safe_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


@contextlib.contextmanager
def kept_variables(handles: Sequence[tf.Tensor]) -> Iterator[None]:
    """Gives variables back the values that they had at the beginning.

    Args:
        handles: As `written_variables` has noted them.
    """
    before = [
        tf.raw_ops.ReadVariableOp(resource=handle, dtype=_kind(handle))
        for handle in handles
    ]
    try:
        yield
    finally:
        for handle, value in zip(handles, before, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def has_effects(graph: tf.Graph) -> bool:
    """Whether a graph does anything but compute, and read variables.

    It relies on what TensorFlow says of the types of operations.
    """
    reads = auto_control_deps_utils.RESOURCE_READ_OPS
    return any(
        operation.op_def.is_stateful and operation.type not in reads
        for operation in graph.get_operations()
        if operation.type != "Placeholder"
    )
