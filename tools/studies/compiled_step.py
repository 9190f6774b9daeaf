"""Write the training step that XLA compiles in `fit` where there is a GPU.

    python tools/studies/compiled_step.py m1 --optimizer kfac --output m1.pb

The file is the serialized `HloModuleProto`, before the optimizations of XLA.
The printed line counts its instructions and Cholesky decompositions. No GPU is
needed. The data are random: no step runs.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import command  # noqa: F401, isort: skip, sets the module path
import tfkfac
from common import networks
from common.arguments import make_parser_of
from tfkfac.compat.overrides import overridden

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adam": lambda: keras.optimizers.Adam(),
    "muon": lambda: keras.optimizers.Muon(),
    "natural": lambda: tfkfac.KFAC(0.1),
    "kfac": lambda: tfkfac.KFAC(),
}
CLASSES, TOKENS = 10, 64


def mlp(width: int, depth: int, inputs: int) -> keras.Model:
    """Return hidden layers of equal width, and an output layer."""
    hidden = [layers.Dense(width, "relu") for _ in range(depth)]
    return keras.Sequential(
        [keras.Input((inputs,)), *hidden, layers.Dense(CLASSES)]
    )


def transformer() -> keras.Model:
    """Six layers of width 128 that predict the next token."""
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(TOKENS, 128)(inputs)
    for _ in range(6):
        x = networks.transformer_block(x)
    return keras.Model(inputs, layers.Dense(TOKENS)(x))


# Each model with its number of examples in a batch.
MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "m1": (lambda: mlp(512, 2, 784), 128),
    "dense10": (lambda: mlp(256, 9, 256), 32),
    "resnet20": (lambda: networks.resnet((32, 32, 3), CLASSES, 20), 128),
    "transformer": (transformer, 32),
}


def random_batch(model: keras.Model, size: int) -> tuple[Any, Any]:
    """Return random inputs and labels."""
    generator = np.random.default_rng(0)
    shape = (size, *model.input_shape[1:])
    if model.inputs[0].dtype == "int32":
        x = generator.integers(0, TOKENS, shape).astype("int32")
    else:
        x = generator.normal(size=shape).astype("float32")
    labels = generator.integers(0, CLASSES, (size, *model.output_shape[1:-1]))
    return x, labels.astype("int32")


def list_gpu(device: str | None = None) -> list[str]:
    """Pretend that there is a GPU, as `tf.config.list_physical_devices`."""
    return ["a GPU"]


def compiled_step(name: str, optimizer: str) -> tuple[str, bytes]:
    """Return the text and the serialized module of the step of `fit`."""
    keras.utils.set_random_seed(0)
    make, batch = MODELS[name]
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Without a GPU, tfkfac trains with `jit_compile=False`.
    with mock.patch.object(tf.config, "list_physical_devices", list_gpu):
        model.compile(OPTIMIZERS[optimizer](), loss, jit_compile=True)
    x, y = random_batch(model, batch)
    model._symbolic_build(data_batch=(x, y))
    steps: list[Any] = []

    def capture(below: Any, function: Any) -> Any:
        """Keep the compiled function, which Keras or tfkfac calls later."""
        is_wrapped = isinstance(function, functools.partial)
        steps.append(function.args[0] if is_wrapped else function)
        return below(function)

    with overridden(model, "_autoconvert_optionals", capture):
        model.make_train_function()
    step = steps[0]
    data = tf.constant(x), tf.constant(y)

    def lower(data: Any) -> tuple[str, bytes]:
        lowered = step.experimental_get_compiler_ir(data)
        return lowered(stage="hlo"), lowered(stage="hlo_serialized")

    method = getattr(model.optimizer, "method", None)
    if method is None:
        return lower(data)
    results: list[tuple[str, bytes]] = []
    # The inverse updates follow the step in `fit`; they are not in the module.
    method.run_compiled(lambda data: results.append(lower(data)), data)
    return results[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file and print the line."""
    parser = make_parser_of(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="kfac")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args(arguments)
    text, module = compiled_step(options.model, options.optimizer)
    options.output.write_bytes(module)
    count = sum(" = " in line for line in text.splitlines())
    print(f"{count} instructions, {text.count('cholesky(')} cholesky(")


if __name__ == "__main__":
    main()
