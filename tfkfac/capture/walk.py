"""From a model to its ordered curvature blocks, and reasons for the rest."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import keras

from tfkfac.blocks import Block, block_types
from tfkfac.compat.layers import children

SkipRule = str | re.Pattern[str] | type[keras.layers.Layer]

# Layers that call their sublayers in a loop of their own, where no tape of
# ours can follow.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)


@dataclasses.dataclass(frozen=True)
class Leftover:
    """Trainable variables without a block.

    Attributes:
        path: Path of the layer that owns them.
        variables: The variables.
        reason: Why K-FAC does not precondition them.
    """

    path: str
    variables: tuple[keras.Variable, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class Registry:
    """What of a model is preconditioned and what is not."""

    blocks: tuple[Block, ...]
    leftovers: tuple[Leftover, ...]


@dataclasses.dataclass
class Node:
    """A layer on the walk through a model.

    Attributes:
        layer: The layer.
        path: Names of the containers and of the layer, joined by "/".
        reason: Why it can have no block, or None.
    """

    layer: keras.layers.Layer
    path: str
    reason: str | None


def walk(
    root: keras.layers.Layer, skip_layers: Sequence[SkipRule] = ()
) -> Iterator[Node]:
    """Yields every layer once, sublayers before their container.

    Args:
        root: The model. It is yielded last, with an empty path.
        skip_layers: Names, regular expressions or classes of layers.

    Raises:
        ValueError: If a rule of `skip_layers` matches no layer.
    """
    seen = {id(root)}
    paths: set[str] = set()
    used: set[int] = set()

    def unique(path: str) -> str:
        parent, _, name = path.rpartition("/")
        number = 1
        while path in paths:
            number += 1
            path = "/".join(filter(None, [parent, f"#{number}", name]))
        paths.add(path)
        return path

    def visit(
        layer: keras.layers.Layer, prefix: str, reason: str | None
    ) -> Iterator[Node]:
        for child in children(layer):
            if id(child) in seen:
                continue
            seen.add(id(child))
            path = unique(f"{prefix}{child.name}")
            rules = [
                i
                for i, rule in enumerate(skip_layers)
                if matches(rule, child, path)
            ]
            used.update(rules)
            why = "skip_layers" if rules else reason
            if why is None and isinstance(child, _LOOPS):
                why = f"used in the loop of a {type(child).__name__}"
            yield from visit(child, f"{path}/", why)
            yield Node(child, path, why)

    yield from visit(root, "", None)
    yield Node(root, "", None)
    unused = [r for i, r in enumerate(skip_layers) if i not in used]
    if unused:
        raise ValueError(
            "Argument `skip_layers` must match layers of the model. No layer "
            f"of '{root.name}' matches: {unused}"
        )


def matches(rule: SkipRule, layer: keras.layers.Layer, path: str) -> bool:
    """Whether a rule of `skip_layers` means this layer."""
    if isinstance(rule, type):
        return isinstance(layer, rule)
    return any(re.fullmatch(rule, name) for name in (layer.name, path))


def tappable(
    model: keras.Model, skip_layers: Sequence[SkipRule]
) -> list[keras.layers.Layer]:
    """Layers of a supported type, built or not, in the order of the walk."""
    return [
        node.layer
        for node in walk(model, skip_layers)
        if node.reason is None
        and node.layer.trainable
        and block_types(node.layer)
    ]


def unbuilt(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers whose weights or sublayers may not exist yet."""
    return [node.layer for node in walk(model) if not node.layer.built]


def build_registry(
    model: keras.Model, skip_layers: Sequence[SkipRule]
) -> Registry:
    """Gives each layer of a built model its blocks.

    Args:
        model: A built model.
        skip_layers: Layers to leave to the inner optimizer.

    Returns:
        The blocks in the order of the layers, and what is left over.
    """
    free = {id(v): v for v in model.trainable_variables}
    blocks: list[Block] = []
    leftovers: list[Leftover] = []
    for node in walk(model, skip_layers):
        layer, reason = node.layer, node.reason
        if reason is None and layer.built and layer.trainable:
            new, reason = _blocks_of(layer, node.path, free)
            blocks += new
        rest = [v for v in layer.trainable_variables if id(v) in free]
        for variable in rest:
            del free[id(variable)]
        if rest:
            reason = reason or f"no block for {type(layer).__name__}"
            leftovers.append(Leftover(node.path, tuple(rest), reason))
    return Registry(tuple(blocks), tuple(leftovers))


def _blocks_of(
    layer: keras.layers.Layer, path: str, free: dict[int, keras.Variable]
) -> tuple[list[Block], str | None]:
    """Makes a layer's blocks and takes their weights out of `free`.

    Returns:
        The blocks, and the reason if there could have been more.
    """
    blocks: list[Block] = []
    for prefix, kind in block_types(layer).items():
        reason = kind.unsupported(layer)
        if reason is not None:
            return blocks, reason
        block = kind(layer, insert(path, prefix))
        if not all(id(v) in free for v in block.variables):
            return blocks, "kernel frozen or shared with another layer"
        if block.variables:
            blocks.append(block)
        for variable in block.variables:
            del free[id(variable)]
    return blocks, None


def insert(path: str, prefix: str) -> str:
    """Puts a prefix before the last name of a path."""
    parent, slash, name = path.rpartition("/")
    return f"{parent}{slash}{prefix}{name}"
