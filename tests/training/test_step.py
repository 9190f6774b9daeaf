"""A `Step` of several replicas, without a model."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.lockstep import run_together
from tfkfac.loss.batch import LossBatch
from tfkfac.loss.shares import measure_loss
from tfkfac.loss.terms import LossTerms, mean_over
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update


def step_of(group: Any, value: float, rows: int) -> Step:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    job = Job("test", model, keras.optimizers.SGD(1.0))
    job.create()
    kernel = model.trainable_variables[:1]
    batch = LossBatch((mean_over(rows),))
    return Step(job, [tf.fill([3, 2], value)], kernel, batch, group)


@pytest.mark.parametrize(
    ("values", "rows", "mean"),
    [
        ([1.0, 2.0], [6, 2], 1 * 0.75 + 2 * 0.25),
        # The mean over no example is NaN, and counts for nothing.
        ([float("nan"), 5.0], [0, 4], 5.0),
    ],
)
def test_gradients_are_weighted_by_rows(
    values: list[float], rows: list[int], mean: float
) -> None:
    def work(group: Any) -> Any:
        step = step_of(group, values[group.rank], rows[group.rank])
        step.reduce()
        return step.gradients[0]

    for gradient, _ in run_together(2, work):
        np.testing.assert_allclose(gradient, np.full([3, 2], mean))


def test_replicas_have_one_unit_whatever_their_shapes() -> None:
    """The unit is the mean over the terms of all replicas."""

    def work(group: Any) -> Any:
        rank = group.rank
        terms = LossTerms(
            tf.constant([3.0, 1.0][rank], tf.float64),
            tf.constant([2.0, 6.0][rank], tf.float64),
            is_fixed=False,
        )
        measure = measure_loss((terms,), group, 2, True)
        return float(measure.unit), float(measure.row_scale)

    for rank, (found, _) in enumerate(run_together(2, work)):
        assert found == (3.0, [2.0, 4 / 6][rank])


@pytest.mark.parametrize("reduces", [False, True])
def test_all_skip_a_step_that_one_skips(reduces: bool) -> None:
    def work(group: Any) -> Any:
        step = step_of(group, [1.0, float("inf")][group.rank], rows=4)
        step.reduce() if reduces else step.weigh()
        taken = []

        def direction() -> Update:
            taken.append(True)
            return Update(step.gradients)

        step.check_finite()
        step.apply(direction)
        return taken, int(step.job.skipped[0])

    for (taken, skipped), _ in run_together(2, work):
        assert (taken, skipped) == ([], 1)
