"""Functions of which a graph has the operations once, and that it calls."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework.ops import set_int_list_attr
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfkfac.compat.graphs import on_one_device, open_graphs

T = TypeVar("T")

_SHARED = "_tfkfac_shared_functions"


def shared_call(
    signature: Hashable, function: Callable[..., T], *args: Any
) -> T:
    """Calls a function of which a graph has the operations once.

    What a step does for each of a hundred layers is traced, optimised and
    kept for the first of them; for the others it is one operation, a call.
    Running eagerly it is just the function.

    The functions live as long as the outermost graph does. This relies on a
    graph having attributes, on `_noinline` (see `repeat`), on what is called
    running on the device of the caller, and on errors in it naming the caller.

    Args:
        signature: What distinguishes the function, besides the shapes and
            dtypes of the arguments, from others that are called.
        function: The function. It must not use tensors or variables that are
            not its arguments, nor collectives.
        args: Nests of tensors and variables.
    """
    return _call(signature, function, args)


def placed_call(
    signature: Hashable, function: Callable[..., T], *args: Any
) -> T:
    """A `shared_call` of a function that TensorFlow goes through before.

    Where it does, convolutions get oneDNN's kernels, three to five times as
    fast on processors for which TensorFlow has them on. That takes some time
    in the first step: it is for a few functions that work long.

    This relies on what a `PartitionedCall` calls going through all of
    TensorFlow's passes.

    Args:
        signature: As for `shared_call`.
        function: As there.
        args: Nests of tensors and variables.
    """
    return _call(signature, function, args, placed=True)


def call_of_any_size(
    signature: Hashable, function: Callable[..., T], *args: Any
) -> T:
    """A `shared_call` that is traced once for tensors of all sizes.

    It relies on a `ResourceVariable` of a handle that it is given, of which
    TensorFlow knows as much of the shape as the handle's data say.

    Args:
        signature: As for `shared_call`.
        function: As there.
        args: Nests of tensors and variables of known ranks.

    Returns:
        What it returns. In a graph its sizes are unknown; the caller may say
        them with `set_shape`.
    """
    return _call(signature, function, args, any_size=True)


def kinds_of(args: Sequence[Any], any_size: bool = False) -> Hashable:
    """What shared calls of the same function have in common.

    Args:
        args: Nests of tensors and variables.
        any_size: Whether sizes do not count.
    """
    flat = tf.nest.flatten(args)
    return tuple(_Argument.of(leaf, any_size).kind for leaf in flat)


def _call(
    signature: Hashable,
    function: Callable[..., T],
    args: Sequence[Any],
    any_size: bool = False,
    placed: bool = False,
) -> T:
    """Calls the function that a graph keeps, or the one given eagerly.

    This relies on `inference_fn` of a concrete function, which a `tf.function`
    comes to after it has looked at its arguments. Most of the time of a call
    is for that.
    """
    graphs = _functions()
    if not graphs:
        return function(*args)
    outermost = graphs[-1]
    if not hasattr(outermost, _SHARED):
        setattr(outermost, _SHARED, {})
    shared = getattr(outermost, _SHARED)
    leaves = [_Argument.of(leaf, any_size) for leaf in tf.nest.flatten(args)]
    key = (signature, *(leaf.kind for leaf in leaves))
    if key not in shared:
        shared[key] = _trace(function, args, [leaf.kind for leaf in leaves])
    traced = shared[key]
    tensors = [leaf.tensor for leaf in leaves]
    if on_one_device() and not placed:
        made = _direct(traced.inference_fn, tensors)
    else:
        with _calls_as_written():
            made = traced.inference_fn.call_flat(*tensors)
    return tf.nest.pack_sequence_as(traced.structured_outputs, made)


def _direct(function: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls a function by an operation that is named after it.

    TensorFlow makes one kernel of it, as of any other operation. What is
    called by a `PartitionedCall` it places on devices, looks through for XLA
    and cuts in parts when it first runs, with all that is called in turn: a
    third of the first run of a graph.

    This relies on a graph knowing the functions that were added to it as
    operations, and on all operations in them being on the caller's device.

    Args:
        function: An `AtomicFunction` that is not to be inlined.
        tensors: What it is given.
    """
    graph = tf.compat.v1.get_default_graph()
    graph._add_function_recursive(function)
    returned = function.function_type.flat_outputs
    operation = graph._create_op_internal(
        function.cached_definition.signature.name,
        tensors,
        [spec.dtype for spec in returned],
        name="Call",
        op_def=function.cached_definition.signature,
    )
    say_what_is_read(operation, function.graph)
    for tensor, spec in zip(operation.outputs, returned, strict=True):
        tensor.set_shape(spec.shape)
    return list(operation.outputs)


def say_what_is_read(
    call: tf.Operation, body: tf.Graph, before: int = 0
) -> None:
    """Notes which variables a call only reads, so that others need not wait.

    Args:
        call: The operation that calls a function.
        body: The graph of the function.
        before: How many inputs the operation has before those of the function.
    """
    find = auto_control_deps_utils.get_read_only_resource_input_indices_graph
    set_int_list_attr(
        call,
        auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR,
        [before + place for place in find(body)],
    )


class _Kind(NamedTuple):
    """What a function has to know of a tensor or a variable it is given."""

    is_variable: bool
    dtype: tf.DType
    shape: tuple[int | None, ...]

    @property
    def spec(self) -> tf.TensorSpec:
        """What is passed in its place, the handle of a variable."""
        if self.is_variable:
            return tf.TensorSpec([], tf.resource)
        return tf.TensorSpec(self.shape, self.dtype)

    def within(self, tensor: tf.Tensor) -> tf.Tensor | tf.Variable:
        """What was passed as it was before."""
        if not self.is_variable:
            return tensor
        shape = tf.TensorShape(self.shape)
        data = handle_data_util.create_handle_data(shape, self.dtype)
        handle_data_util.set_handle_data(tensor, data)
        return ResourceVariable(
            trainable=False, shape=shape, dtype=self.dtype, handle=tensor
        )


class _Argument(NamedTuple):
    """A tensor that is passed to a function, and what it stands for."""

    tensor: tf.Tensor
    kind: _Kind

    @classmethod
    def of(cls, leaf: Any, any_size: bool) -> "_Argument":
        is_variable = isinstance(leaf, tf.Variable)
        tensor = leaf.handle if is_variable else tf.convert_to_tensor(leaf)
        sizes = [None] * leaf.shape.rank if any_size else leaf.shape.as_list()
        return cls(tensor, _Kind(is_variable, leaf.dtype, tuple(sizes)))


def _trace(
    function: Callable[..., Any], args: Sequence[Any], kinds: Sequence[_Kind]
) -> Any:
    """Traces a function of such arguments, which is not to be inlined."""
    structure = tf.nest.map_structure(lambda _: None, args)

    def flat(*tensors: tf.Tensor) -> Any:
        given = [
            kind.within(tensor)
            for kind, tensor in zip(kinds, tensors, strict=True)
        ]
        return function(*tf.nest.pack_sequence_as(structure, given))

    traced = tf.function(
        flat,
        input_signature=[kind.spec for kind in kinds],
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    return traced.get_concrete_function()


def _functions() -> list[tf.Graph]:
    """The functions that are being traced, the outermost one last."""
    return [graph for graph in open_graphs() if graph.building_function]


@contextlib.contextmanager
def _calls_as_written() -> Iterator[None]:
    """Keeps TensorFlow from optimising the functions that are called here.

    A function that is not inlined would be optimised by itself before it first
    runs: some milliseconds, for next to nothing. Constants are folded and what
    is there twice is found all the same.

    This relies on the `function_call_options` of a thread's context, of which
    a call in a graph gets its `config_proto`.
    """
    current = context.context()
    before = current.function_call_options
    current.function_call_options = context.FunctionCallOptions(
        before.executor_type, as_written()
    )
    try:
        yield
    finally:
        current.function_call_options = before


def as_written() -> tf.compat.v1.ConfigProto:
    """What a call says whose function TensorFlow does not optimise."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config
