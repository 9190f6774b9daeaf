"""Walk through the layers of a model in a fixed order, with unique paths."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ModelTap
from tfkfac.capture.taps import Tap, forget_first_call
from tfkfac.compat.models import all_layers, children
from tfkfac.compat.overrides import release_moments

# Layers that call their sublayers in a loop, where taps do not work.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)
_RECURRENT = (
    keras.layers.RNN,
    keras.layers.SimpleRNNCell,
    keras.layers.GRUCell,
    keras.layers.LSTMCell,
)
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)

# `Node.reason` of layers that `KFAC(skip_layers=, only_layers=)` excludes.
SKIPPED = "skip_layers or only_layers"

LayerRule = str | re.Pattern[str] | type[keras.layers.Layer]


@dataclasses.dataclass
class Node:
    """A layer of a model."""

    layer: keras.layers.Layer
    path: str  # names of the containers and of the layer, joined by "/"
    reason: str | None  # why the layer can have no block
    # The `TimeDistributed` that calls the layer at each time step; its input
    # and output are recorded.
    distributor: keras.layers.TimeDistributed | None = None
    # True for an `RNN`, the layers inside of an `RNN`, and Keras' cells.
    is_recurrent: bool = False

    @property
    def tapped(self) -> keras.layers.Layer:
        """The layer whose calls are recorded."""
        return self.distributor or self.layer


def walk(
    root: keras.layers.Layer,
    skip_layers: Sequence[LayerRule] = (),
    only_layers: Sequence[LayerRule] | None = None,
) -> Iterator[Node]:
    """Yield every layer once, sublayers before their container.

    The root is last and has an empty path. Layers that match a rule of
    `skip_layers`, or none of `only_layers`, get the reason `SKIPPED`. A rule is
    a layer class, or a pattern of names or paths; it includes the sublayers.

    Raises:
        ValueError: If a rule matches no layer.
    """
    seen, layers = {id(root)}, all_layers(root)
    # Layers that a `TimeDistributed` and another layer contain: taps would
    # record the calls of only one of these containers.
    wrapped = {id(outer.layer) for outer in filter(distributor, layers)}
    num_containers = collections.Counter(
        id(child) for layer in layers for child in children(layer)
    )
    ambiguous = {key for key in wrapped if num_containers[key] > 1}
    # Recurrent layers, the layers inside them, and cells of Keras.
    recurrent = {
        id(layer)
        for outer in layers
        if isinstance(outer, _RECURRENT)
        for layer in all_layers(outer)
    }
    paths: set[str] = set()

    def visit(parent: Node, prefix: str) -> Iterator[Node]:
        # Reason why the sublayers can have no block, or None.
        reason_inside, loop = parent.reason, parent.distributor
        if loop is None and isinstance(parent.layer, _LOOPS):
            loop = None if distributor(parent.layer) else parent.layer
        if loop is not None:
            reason_inside = reason_inside or (
                f"used in the loop of a {type(loop).__name__}"
            )
        for child in children(parent.layer):
            if id(child) in seen:
                continue
            seen.add(id(child))
            path, number = f"{prefix}{child.name}", 1
            while path in paths:  # make the path unique
                number += 1
                path = f"{prefix}#{number}/{child.name}"
            paths.add(path)
            reason = reason_inside
            if reason is None and id(child) in ambiguous:
                reason = "used in a TimeDistributed and elsewhere"
            node = Node(
                child,
                path,
                reason,
                distributor(parent.layer),
                id(child) in recurrent,
            )
            yield from visit(node, f"{path}/")
            yield node

    root_node = Node(root, "", None)
    nodes = list(visit(root_node, ""))
    skipped = matching("skip_layers", skip_layers, nodes, root.name)
    included = matching("only_layers", only_layers or (), nodes, root.name)
    for node in (*nodes, root_node):
        excluded = only_layers is not None and id(node.layer) not in included
        if excluded or id(node.layer) in skipped:
            node.reason = SKIPPED
        yield node


def matching(
    name: str, rules: Sequence[LayerRule], nodes: Sequence[Node], model: str
) -> set[int]:
    """Return ids of layers that rules match, and of their sublayers.

    A rule that matches no layer is an error.
    """
    result: set[int] = set()
    unused: list[LayerRule] = []
    for rule in rules:
        matched = [x.layer for x in nodes if matches(rule, x.layer, x.path)]
        # Include sublayers that `walk` reached through another container.
        result.update(id(x) for layer in matched for x in all_layers(layer))
        if not matched:
            unused.append(rule)
    if unused:
        raise ValueError(
            f"Argument `{name}` must match layers of the model. No layer of "
            f"'{model}' matches: {unused}"
        )
    return result


def distributor(
    layer: keras.layers.Layer,
) -> keras.layers.TimeDistributed | None:
    """Return the layer if it is a `TimeDistributed`, else None."""
    wrapper = keras.layers.TimeDistributed
    if isinstance(layer, wrapper) and type(layer).call is wrapper.call:
        return layer
    return None


def matches(rule: LayerRule, layer: keras.layers.Layer, path: str) -> bool:
    """True if a rule matches the class, name or path of a layer."""
    if isinstance(rule, type):
        return isinstance(layer, rule)
    return any(re.fullmatch(rule, name) for name in (layer.name, path))


def unbuilt(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers whose weights or sublayers may not exist yet."""
    return [node.layer for node in walk(model) if not node.layer.built]


def detach(model: keras.Model, owner: object | None) -> None:
    """Remove an owner's taps from a model; None if the owner was deleted."""
    for node in walk(model):
        forget_first_call(node.layer)
        release_moments(node.layer)
        Tap.close(node.layer, owner)
    for tap_class in ModelTap.__subclasses__():
        tap_class.close(model)


def needs_loop(model: keras.Model) -> bool:
    """True if TensorFlow cannot vectorise a model's gradient over examples.

    This is the case for grouped convolutions, for recurrent layers with a
    mask, or with weights before them, and for `EinsumDense` (so also attention)
    in float32 on a CPU. Examples then need a slow loop.
    """
    layers = [node.layer for node in walk(model)]
    # oneDNN of TensorFlow 2.21 corrupts memory in the vectorised gradient.
    is_einsum = any(
        isinstance(x, keras.layers.EinsumDense) and x.compute_dtype == "float32"
        for x in layers
    )
    if is_einsum and not tf.config.list_logical_devices("GPU"):
        return True
    if any(isinstance(x, _CONVOLUTIONS) and x.groups > 1 for x in layers):
        return True
    recurrent = [x for x in layers if isinstance(x, keras.layers.RNN)]
    if not recurrent:
        return False
    has_mask = any(
        getattr(layer, "mask_zero", False)
        or isinstance(layer, keras.layers.Masking)
        for layer in layers
    )
    first_weights = {id(v) for v in recurrent[0].trainable_variables}
    earlier_layers = layers[: layers.index(recurrent[-1])]
    earlier_weights = [v for x in earlier_layers for v in x.trainable_variables]
    return has_mask or any(id(v) not in first_weights for v in earlier_weights)
