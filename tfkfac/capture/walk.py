"""The layers of a model in a fixed order, with unique paths."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import keras

from tfkfac.compat.layers import children

SkipRule = str | re.Pattern[str] | type[keras.layers.Layer]

# Layers that call their sublayers in a loop of their own, where no tape of
# ours can follow.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)


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


def unbuilt(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers whose weights or sublayers may not exist yet."""
    return [node.layer for node in walk(model) if not node.layer.built]
