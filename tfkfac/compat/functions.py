"""Functions that a graph has once, and calls of them for every layer."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.atomic_function import (
    AtomicFunction,
)
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework.ops import set_int_list_attr
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfkfac.compat.graphs import Tracked, in_xla, not_inlined, open_graphs

T = TypeVar("T")

# What the operations of a function cost, in calls of it.
_BODY = 6
# Attributes of graphs.
_SHARED = "_tfkfac_shared_functions"
_BRANCHES = "_tfkfac_branches"


class Kind(NamedTuple):
    """Rows of `each` for which a function has the same operations.

    Attributes:
        key: Distinguishes it from what the function does for other rows.
        any_size: True if sizes do not count, see `shared_call`.
        placed: True for a call that is `placed`, of one row alone as well.
    """

    key: Hashable = None
    any_size: bool = False
    placed: bool = False


class Member(Tracked):
    """State whose variables `each` can put in the place of another one's.

    Attributes:
        held: Names of the attributes that are variables, or lists of them.
    """

    held: ClassVar[tuple[str, ...]] = ()

    @property
    def like(self) -> Kind:
        """Kind of this state: equal for those that differ in variables only."""
        raise NotImplementedError

    def variable_values(self) -> list[Any]:
        """The variables, in order."""
        return [getattr(self, name) for name in self.held]

    def with_variables(self, values: Sequence[Any]) -> Self:
        """The same with other variables; nothing follows these."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        vars(other).update(zip(self.held, values, strict=True))
        return other


def each(
    function: Callable[..., Any] | Sequence[Callable[..., Any]],
    *columns: Any,
    like: Kind | Sequence[Kind | None] | None = None,
    around: Callable[[int], AbstractContextManager[None]] | None = None,
) -> list[Any]:
    """Calls a function for each row of some columns, equal rows as one.

    A hundred equal layers are a hundred calls of one function, which a graph
    has once. Each call costs a few milliseconds in the first step and some
    microseconds in every other; a function that does the same for some layers
    at once is called less often. What is there once is done without a call,
    unless that is placed.

    Args:
        function: The function, or that of each row. It must not use tensors
            or variables that are not its arguments, nor collectives.
        columns: Lists with an entry for each row, None where there is nothing
            to do. What is no list is the same for all. Entries are tensors,
            variables, nests or dataclasses of them, or `Member`; anything else
            is a constant of the function.
        like: Kind of all rows or of each; rows of None equal no others.
            Defaults to that of the `Member` of a row.
        around: Context of each row, by its number. Such rows are called one
            by one.

    Returns:
        What the function returns of each row, None where there is no row. In a
        graph sizes may be unknown; the caller may say them with `set_shape`.
    """
    count = max(len(column) for column in columns if isinstance(column, list))
    rows: dict[int, _Row] = {}
    for i in range(count):
        args = [c[i] if isinstance(c, list) else c for c in columns]
        if all(arg is not None for arg in args):
            own = function if callable(function) else function[i]
            kind = like if like is None or isinstance(like, Kind) else like[i]
            if like is None:
                kind = next(a.like for a in args if isinstance(a, Member))
            rows[i] = _Row(own, args, kind, own if callable(function) else None)
    if not tf.executing_eagerly() and around is None:
        found = _together(rows)
    else:
        found = {}
        for i, row in rows.items():
            with around(i) if around else contextlib.nullcontext():
                (found[i],) = _call([row])
    return [found.get(i) for i in range(count)]


def fields(rows: Sequence[Any], count: int) -> list[list[Any]]:
    """Columns of what `each` returns where the function returns tuples."""
    return [
        [None if row is None else row[k] for row in rows] for k in range(count)
    ]


def flags(column: Sequence[tf.Tensor | None], otherwise: bool) -> tf.Tensor:
    """Scalar bools of rows as one vector, `otherwise` where there is no row."""
    if not column:
        return tf.zeros([0], tf.bool)
    rest = tf.constant(otherwise)
    return tf.stack([rest if flag is None else flag for flag in column])


class _Row(NamedTuple):
    """A function and its arguments in one row, of a kind or of none."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kind: Kind | None
    known: Callable[..., Any] | None

    @property
    def signature(self) -> Hashable:
        """Key of the function besides the kinds of its arguments."""
        constants = tuple(arg for arg in self.args if _is_constant(arg))
        return self.kind and (self.known, self.kind, constants)

    @property
    def nests(self) -> list[Any]:
        """The arguments as nests of tensors and variables."""
        return list(map(_opened, self.args))

    def of(self, *nests: Any) -> Any:
        """Calls the function with such nests in the arguments' places."""
        pairs = zip(self.args, nests, strict=True)
        return self.function(*(_closed(arg, nest) for arg, nest in pairs))


def _together(rows: Mapping[int, _Row]) -> dict[int, Any]:
    """Makes calls, several of a kind in one."""
    kinds: dict[Hashable, list[int]] = {}
    found: dict[int, Any] = {}
    for i, row in rows.items():
        key: Hashable = i
        if row.kind is not None:
            leaves = tf.nest.flatten(row.nests)
            sizes = (_Leaf.of(leaf, row.kind.any_size) for leaf in leaves)
            key = row.signature, *sizes
        kinds.setdefault(key, []).append(i)
    for members in kinds.values():
        first = rows[members[0]]
        if len(members) == 1 and not (first.kind and first.kind.placed):
            found[members[0]] = first.function(*first.args)
            continue
        size = group_size(len(members))
        for start in range(0, len(members), size):
            group = members[start : start + size]
            found.update(
                zip(group, _call([rows[i] for i in group]), strict=True)
            )
    return found


def _call(rows: Sequence[_Row]) -> list[Any]:
    """Calls the function of some equal rows once for all of them."""
    first = rows[0]
    if first.kind is None or tf.executing_eagerly():
        return [row.function(*row.args) for row in rows]

    def together(*many: Sequence[Any]) -> list[Any]:
        return [first.of(*nests) for nests in many]

    _, any_size, placed = first.kind
    return shared_call(
        (len(rows), first.signature),
        together,
        *(row.nests for row in rows),
        any_size=any_size,
        placed=placed,
    )


def group_size(count: int) -> int:
    """Number of equal calls in one; those left over are another function."""
    return min(
        range(1, math.isqrt(count) + 1),
        key=lambda size: _BODY * (size + count % size) + count // size,
    )


def _is_constant(arg: Any) -> bool:
    """True for what is neither a tensor nor made of such."""
    is_state = isinstance(arg, Member) or dataclasses.is_dataclass(arg)
    return not (is_state or tf.nest.is_nested(arg) or tf.is_tensor(arg))


def _opened(arg: Any) -> Any:
    """An argument as a nest of tensors and variables."""
    if isinstance(arg, Member):
        return arg.variable_values()
    if dataclasses.is_dataclass(arg):
        return [getattr(arg, field.name) for field in dataclasses.fields(arg)]
    return [] if _is_constant(arg) else arg


def _closed(arg: Any, nest: Any) -> Any:
    """Inverse of `_opened`, with what is in a nest."""
    if isinstance(arg, Member):
        return arg.with_variables(nest)
    if dataclasses.is_dataclass(arg) and not isinstance(arg, type):
        names = [field.name for field in dataclasses.fields(arg)]
        return dataclasses.replace(arg, **dict(zip(names, nest, strict=True)))
    return arg if _is_constant(arg) else nest


def shared_call(
    signature: Hashable,
    function: Callable[..., T],
    *args: Any,
    any_size: bool = False,
    placed: bool = False,
) -> T:
    """Calls a function of which a graph has the operations once.

    What a step does for each of a hundred layers is traced, optimised and
    kept for the first of them; for the others it is one operation, a call.
    Running eagerly it is just the function. The functions live as long as the
    outermost graph does.

    This relies on `inference_fn` of a concrete function, which a `tf.function`
    comes to after it has looked at its arguments: most of the time of a call
    is for that. What is called runs on the device of the caller, and errors in
    it name the caller.

    Args:
        signature: What distinguishes the function, besides the shapes and
            dtypes of the arguments, from others that are called.
        function: The function. It must not use tensors or variables that are
            not its arguments, nor collectives.
        args: Nests of tensors and variables, with `any_size` of known ranks.
        any_size: True to trace it once for tensors of all sizes. Those of what
            it returns are unknown; the caller may say them with `set_shape`.
        placed: True to let TensorFlow go through the function with all of its
            passes, as it does with what a `PartitionedCall` calls. Where it
            does, convolutions get oneDNN's kernels, three to five times as
            fast. It takes some time in the first step: for a few functions
            that work long.
    """
    graphs = [graph for graph in open_graphs() if graph.building_function]
    if not graphs:
        return function(*args)
    shared = _kept(graphs[-1], _SHARED, dict)
    leaves = tf.nest.flatten(args)
    kinds = [_Leaf.of(leaf, any_size) for leaf in leaves]
    key = signature, *kinds
    if key not in shared:
        shared[key] = _trace(function, args, kinds)
    traced = shared[key]
    tensors = [
        leaf.handle if kind.is_variable else tf.convert_to_tensor(leaf)
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    if _on_one_device() and not placed:
        made = _direct(traced.inference_fn, tensors)
    else:
        with _calls_as_written():
            made = traced.inference_fn.call_flat(*tensors)
    return tf.nest.pack_sequence_as(traced.structured_outputs, made)


def _on_one_device() -> bool:
    """True if there is one device alone, on which nothing is compiled."""
    return len(tf.config.list_logical_devices()) == 1 and not in_xla()


def _direct(function: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls a function by an operation that is named after it.

    TensorFlow makes one kernel of it, as of any other operation. What is
    called by a `PartitionedCall` it places on devices, looks through for XLA
    and cuts in parts when it first runs, with all that is called in turn: a
    tenth of the first step.

    This relies on a graph knowing the functions that were added to it as
    operations, and on all operations in them being on the caller's device.
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
    _say_what_is_read(operation, function.graph)
    for tensor, spec in zip(operation.outputs, returned, strict=True):
        tensor.set_shape(spec.shape)
    return list(operation.outputs)


def _say_what_is_read(
    call: tf.Operation, body: tf.Graph, before: int = 0
) -> None:
    """Notes which variables a call only reads, so that others need not wait.

    It has some inputs before those of the function.
    """
    find = auto_control_deps_utils.get_read_only_resource_input_indices_graph
    set_int_list_attr(
        call,
        auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR,
        [before + place for place in find(body)],
    )


def _kept(graph: tf.Graph, name: str, make: Callable[[], Any]) -> Any:
    """Something that lives as long as a graph does."""
    if not hasattr(graph, name):
        setattr(graph, name, make())
    return getattr(graph, name)


class _Leaf(NamedTuple):
    """Form of a tensor or a variable that a function is given."""

    is_variable: bool
    dtype: tf.DType
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, leaf: Any, any_size: bool) -> Self:
        """The form of a leaf, which may stand for those of all sizes."""
        sizes = [None] * leaf.shape.rank if any_size else leaf.shape.as_list()
        return cls(isinstance(leaf, tf.Variable), leaf.dtype, tuple(sizes))

    @property
    def spec(self) -> tf.TensorSpec:
        """Signature of what is passed: of a variable its handle."""
        if self.is_variable:
            return tf.TensorSpec([], tf.resource)
        return tf.TensorSpec(self.shape, self.dtype)

    def within(self, tensor: tf.Tensor) -> tf.Tensor | tf.Variable:
        """Makes a variable of its handle again, of the shape in its data."""
        if not self.is_variable:
            return tensor
        shape = tf.TensorShape(self.shape)
        data = handle_data_util.create_handle_data(shape, self.dtype)
        handle_data_util.set_handle_data(tensor, data)
        return ResourceVariable(
            trainable=False, shape=shape, dtype=self.dtype, handle=tensor
        )


def _trace(
    function: Callable[..., Any], args: Sequence[Any], kinds: Sequence[_Leaf]
) -> Any:
    """Traces a function of such arguments, which is not to be inlined."""
    structure = tf.nest.map_structure(lambda _: None, args)

    def flat(*tensors: tf.Tensor) -> Any:
        given = [
            kind.within(tensor)
            for kind, tensor in zip(kinds, tensors, strict=True)
        ]
        return function(*tf.nest.pack_sequence_as(structure, given))

    signature = [kind.spec for kind in kinds]
    return not_inlined(flat, signature).get_concrete_function()


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
        before.executor_type, _as_written()
    )
    try:
        yield
    finally:
        current.function_call_options = before


def _as_written() -> tf.compat.v1.ConfigProto:
    """Config of a call whose function TensorFlow does not optimise."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def when(predicate: tf.Tensor, do: Callable[[], object]) -> list[tf.Operation]:
    """Does something if a predicate says so, else nothing.

    In a `tf.cond` each tensor that a branch uses is a placeholder of both
    branches, and three operations more once TensorFlow has put its own control
    flow in place of the condition: half of the nodes of a K-FAC step. Here the
    branch is a function that stays one, and nothing is traced for the other.

    This relies on the operation `If` taking functions that are made of their
    definition, and on `captured_inputs` of a function that is traced.
    Where there are several devices, or XLA compiles, the branch calls the
    function, which is then placed on them as elsewhere, and the condition
    itself is replaced, as in `tf.cond`: all that is passed to the kernel of
    `If` has to be on one. Branches of two replicas that only read a variable
    must not wait for each other, so the condition says which ones it only
    reads.

    Collectives are legal in what is done; what it returns is lost. Returns
    what to wait for until it is done, if anything.
    """
    if tf.executing_eagerly():
        if predicate:
            do()
        return []

    def body() -> None:
        do()

    # Profiles of a step and its graph show it.
    body.__name__ = getattr(do, "__name__", "branch").strip("<>")
    function = not_inlined(body).get_concrete_function()
    name = function.name.decode()
    graph = tf.compat.v1.get_default_graph()
    graph._add_function_recursive(function.inference_fn)
    # Who looks for the graph of a branch, to export it, is given the body's.
    _kept(graph, _BRANCHES, list).append(function)
    alone = _on_one_device()
    condition = tf.raw_ops.If(
        cond=predicate,
        input=function.captured_inputs,
        Tout=[],
        then_branch=name if alone else _add(f"{name}_called", function, True),
        else_branch=_add(f"{name}_otherwise", function, False),
    )
    _say_what_is_read(condition, function.graph, before=1)
    condition._set_attr(
        "_lower_using_switch_merge", tf.compat.v1.AttrValue(b=not alone)
    )
    return [condition]


def _add(name: str, function: Any, calls: bool) -> str:
    """Makes a function known that takes what another one takes.

    It calls that one with it, or does nothing.
    """
    definition = FunctionDef()
    signature = definition.signature
    signature.name = name
    types = [t.dtype.as_datatype_enum for t in function.captured_inputs]
    for i, kind in enumerate(types):
        signature.input_arg.add(name=f"x{i}", type=kind)
    if calls:
        call = definition.node_def.add(name="call")
        call.op = "StatefulPartitionedCall"
        call.input.extend(argument.name for argument in signature.input_arg)
        call.attr["Tin"].list.type.extend(types)
        call.attr["Tout"].list.SetInParent()
        call.attr["f"].func.name = function.name.decode()
        call.attr["config_proto"].s = _as_written().SerializeToString()
        signature.is_stateful = True
        signature.control_output.append(call.name)
        definition.control_ret[call.name] = call.name
    context.context().add_function_def(definition)
    atomic = AtomicFunction(
        name,
        context.context(),
        function.function_type,
        [function.inference_fn],
        cached_graph=function.graph,
    )
    tf.compat.v1.get_default_graph()._add_function_recursive(atomic)
    return name
