"""Variables that checkpoints follow and functions write; matrices by rows."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.ops import resource_variable_ops

from tfkfac.compat.graphs import in_xla
from tfkfac.compat.overrides import overridden

if TYPE_CHECKING:

    class Tracked:
        """`tf.Module` to a type checker, which takes TensorFlow for `Any`.

        A class below something that is `Any` may have any attribute, so that
        none of its own would be checked.
        """

        def __init__(self, name: str | None = None) -> None: ...

else:
    # This relies on `tf.train.Checkpoint` following the attributes of an
    # optimizer and of a `tf.Module`, and lists and tuples of them, to the
    # variables in them; dictionaries it leaves out.
    Tracked = tf.Module


def own_copy(variable: Any) -> tf.Variable:
    """This replica's copy of a mirrored variable.

    It relies on `_get_on_device_or_primary` of a distributed variable; another
    variable, which has no such method, is its own copy.
    """
    get = getattr(variable, "_get_on_device_or_primary", None)
    return variable if get is None else get()


def new_rows(count: int, length: int, dtype: tf.DType) -> tf.Tensor:
    """A matrix of zeros for `set_row`."""
    if in_xla():
        return tf.zeros([count, length], dtype)
    # What `tf.zeros` makes may be a constant, which is kept for other runs.
    return tf.raw_ops.Empty(shape=[count, length], dtype=dtype, init=True)


def copied_rows(matrix: tf.Tensor) -> tf.Tensor:
    """A copy for `set_row` of what is kept elsewhere, as in a variable."""
    return matrix if in_xla() else tf.raw_ops.DeepCopy(x=matrix)


def set_row(matrix: tf.Tensor, index: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """Returns a matrix with another row; that given must not be used again.

    `tf.tensor_scatter_nd_update` copies the matrix on a CPU.

    This relies on `InplaceUpdate` writing into the tensor it is given, and on
    TensorFlow making no constant of what `Empty` and `DeepCopy` return. XLA
    decides by itself what it copies.

    Args:
        matrix: What `new_rows`, `copied_rows` or this function returned.
        index: Number of the row, int32.
        row: The row.
    """
    if in_xla():
        return tf.tensor_scatter_nd_update(matrix, [[index]], row[None])
    return tf.raw_ops.InplaceUpdate(x=matrix, i=[index], v=row[None])


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
    """The handle outside of all functions that a captured one stands for.

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
    """True if a graph does anything but compute, and read variables.

    It relies on what TensorFlow says of the types of operations.
    """
    reads = auto_control_deps_utils.RESOURCE_READ_OPS
    return any(
        operation.op_def.is_stateful and operation.type not in reads
        for operation in graph.get_operations()
        if operation.type != "Placeholder"
    )
