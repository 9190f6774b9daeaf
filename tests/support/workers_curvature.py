"""Directional curvature in a training step, alone and on several workers."""

import functools
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.reference import Array
from tests.support.strategies import strategy
from tests.support.workers_terms import batches
from tfkfac.capture.model_taps import ForwardTap
from tfkfac.compat.graphs import Sum, state_variable
from tfkfac.curvature.directional import LossInputs, directional_curvature
from tfkfac.distributed.collectives import differentiable_sum
from tfkfac.kfac import optimizer as optimizers
from tfkfac.kfac.method import KFACMethod
from tfkfac.training.step import Step

ROWS, DIRECTIONS = ([0, 1, 2, 3, 4], [5, 6, 7]), 2


class MeasuringMethod(KFACMethod):
    """Measures the curvature along fixed directions before each step."""

    def attach(self, job: Any) -> None:
        super().attach(job)
        ForwardTap.open(job.model)

    def create(self) -> Any:
        self.forms = self.job.for_each(
            lambda rank: state_variable(
                tf.zeros([DIRECTIONS] * 2), tf.float64, "forms"
            )
        )
        return super().create()

    def run(self, step: Step) -> None:
        model, group = step.job.model, step.group
        weights = model.trainable_variables
        rng = np.random.default_rng(1)
        directions = [
            [tf.constant(rng.normal(size=v.shape)) for v in weights]
            for _ in range(DIRECTIONS)
        ]
        total: Sum = tf.identity
        if group.size > 1:
            total = functools.partial(differentiable_sum, group)
        form = directional_curvature(
            model,
            LossInputs.of(model, step.batch, step.loss),
            weights,
            directions,
            step.loss.unit,
            total,
            group.size,
        )
        (form,) = group.all_reduce([form])
        self.job.local_state(self.forms).assign(form)
        super().run(step)


def measure(kind: str | None) -> list[Array]:
    """Return the curvature on each local replica, of an uneven batch."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)), rng.integers(0, 3, 8)
    with floats("float64"):
        measuring = mock.patch.object(optimizers, "KFACMethod", MeasuringMethod)
        with measuring, strategy(kind).scope():
            optimizer = tfkfac.KFAC()
            keras.utils.set_random_seed(0)
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(5, kernel_regularizer="l2"),
                    layers.BatchNormalization(synchronized=True),
                    layers.Activation("tanh"),
                    layers.Dense(3),
                ]
            )
            model.compile(
                optimizer,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        steps = [[*ROWS]] if kind is not None else [[[*ROWS[0], *ROWS[1]]]]
        model.fit(batches(kind, steps, (x, y)), steps_per_epoch=1, verbose=0)
    return [np.array(v) for v in model.optimizer.method.forms]
