"""A batch for each model; its content is random."""

import re

import numpy as np

VOCABULARY, SEQUENCE = 1000, 64
CLASSES = 10
_SHAPES = {
    "M1": (784,),
    "M2": (28, 28, 1),
    "M3": (32, 32, 3),
    "M4": (784,),
    "T": (SEQUENCE,),
    "D": (32, 32, 3),
    "MobileNetV2": (64, 64, 3),
    "ResNet50": (64, 64, 3),
}
MODELS = (*_SHAPES, "mlp-WIDTHxDEPTH")


def mlp_size(model: str) -> tuple[int, int] | None:
    """Width and depth of an "mlp-WIDTHxDEPTH"; None of other models."""
    match = re.fullmatch(r"mlp-([1-9]\d*)x([1-9]\d*)", model)
    return (int(match[1]), int(match[2])) if match else None


def exists(model: str) -> bool:
    """Whether there is a model of that name."""
    return model in _SHAPES or mlp_size(model) is not None


def input_shape(model: str) -> tuple[int, ...]:
    """Shape of one example."""
    size = mlp_size(model)
    return (size[0],) if size else _SHAPES[model]


def classes(model: str) -> int:
    """Number of classes of a classifier: the units of an mlp, else 10."""
    size = mlp_size(model)
    return size[0] if size else CLASSES


def make_batch(model: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets; images have their channels last."""
    random = np.random.RandomState(0)
    if model == "T":
        likelihood = 1 / np.arange(1, VOCABULARY + 1)  # Zipf's, as of words
        text = random.choice(
            VOCABULARY,
            (size, SEQUENCE + 1),
            p=likelihood / likelihood.sum(),
        ).astype("int32")
        return text[:, :-1], text[:, 1:]
    x = random.rand(size, *input_shape(model)).astype("float32")
    return x, x if model == "M4" else random.randint(0, classes(model), size)
