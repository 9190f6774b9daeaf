"""A model by its name, the machine, and what comes of both."""

import argparse
import time

import keras
import tensorflow as tf

import tfkfac
from common.inception import inception_v4
from planning.cost import Estimate, Machine, measure_worker
from planning.cost import compare as compare_distributions

_STEPS = 3


def build(name: str, size: int | None) -> keras.Model:
    """Builds a model without its weights.

    Args:
        name: One of `keras.applications`, or "InceptionV4".
        size: Height and width of its images; None is the usual one.

    Raises:
        ValueError: If there is none of that name, or it refuses the size.
    """
    if name == "InceptionV4":
        if size is not None:
            raise ValueError("InceptionV4 has images of 299 x 299 pixels.")
        return inception_v4()
    make = getattr(keras.applications, name, None)
    if not callable(make):
        known = sorted(
            key
            for key, value in vars(keras.applications).items()
            if callable(value)
        )
        raise ValueError(
            f"MODEL must be one of {', '.join([*known, 'InceptionV4'])}. "
            f"Received: {name!r}"
        )
    shape = None if size is None else (size, size, 3)
    return make(weights=None, input_shape=shape)


def machine(
    options: argparse.Namespace, model: keras.Model
) -> tuple[Machine, float | None]:
    """The machine that is meant, and a first-order step if it is measured."""
    # Of one worker nothing is sent.
    bandwidth, latency = options.bandwidth or 1.0, options.latency or 0.0
    if not options.measure:
        return Machine.of(options.flops, bandwidth, latency), None
    numbers = measure_worker()
    known = Machine.of(
        **numbers,
        bandwidth=bandwidth,
        latency=latency,
        tree_broadcast=not tf.config.list_physical_devices("GPU"),
    )
    return known, first_order_step(model, options.batch)


def first_order_step(model: keras.Model, batch: int) -> float:
    """Seconds of a step of SGD on random inputs."""
    sgd = keras.optimizers.SGD(1e-6)
    sgd.build(model.trainable_variables)
    if len(model.inputs) != 1 or None in model.inputs[0].shape[1:]:
        raise ValueError(
            f"Model '{model.name}' must have one input of known size to be "
            f"measured. Received: {model.inputs}"
        )
    (tensor,) = model.inputs
    x = tf.random.stateless_uniform([batch, *tensor.shape[1:]], [0, 0])
    x = tf.cast(x, tensor.dtype)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        variables = model.trainable_variables
        sgd.apply(tape.gradient(loss, variables), variables)
        return loss

    times = []
    for _ in range(_STEPS + 1):
        start = time.perf_counter()
        step().numpy()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def compare(
    options: argparse.Namespace,
    optimizer: tfkfac.KFAC,
    on: Machine,
    first_order: float | None,
) -> list[Estimate]:
    """All distributions of the model."""
    return compare_distributions(
        optimizer,
        on,
        options.workers,
        options.batch,
        solvers=options.solvers,
        size=options.image_size,
        passes=options.fisher_passes,
        first_order=first_order,
    )
