"""A method on a job and a step made by hand, without a Keras optimizer."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.lockstep import run_together
from tfkfac.checks import check_choice
from tfkfac.loss.batch import LossBatch
from tfkfac.loss.shares import measure_loss
from tfkfac.loss.terms import LossTerms, mean_over
from tfkfac.saving.entries import Contents
from tfkfac.shell.arguments import Argument, Tunable
from tfkfac.shell.method import Method
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = np.arange(8) % 2


def model_of(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((3,)), layers.Dense(2)])


def gradients_of(model: Any) -> list[Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        value = loss(Y, model(X, training=True))
    return tape.gradient(value, [v.value for v in model.trainable_variables])


def test_kfac_by_hand_equals_the_optimizer() -> None:
    """Two steps, bit for bit."""
    by_hand, by_keras = model_of(), model_of()
    inner = keras.optimizers.SGD(0.1, momentum=0.5)
    method, job = tfkfac.KFAC().method, Job("by hand", by_hand, inner)
    method.attach(job)
    for parameter in method.hyperparameters():
        parameter.build()
    job.create()
    method.create()
    inner.build(by_hand.trainable_variables)
    optimizer = tfkfac.KFAC(0.1).attach(by_keras)
    for _ in range(2):
        variables = by_hand.trainable_variables
        gradients = gradients_of(by_hand)
        method.run(Step(job, gradients, variables, LossBatch(), job.group()))
        optimizer.apply(gradients_of(by_keras), by_keras.trainable_variables)
    before = model_of().get_weights()
    for ours, theirs, start in zip(
        by_hand.get_weights(), by_keras.get_weights(), before, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
        assert not np.array_equal(ours, start)


# ----------------------------------------------------------- several replicas
class Counting:
    """A group that counts its reductions."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = group.rank, group.size
        self.calls = 0
        self._group = group

    def all_reduce(self, tensors: Any, dtype: Any = None) -> Any:
        self.calls += 1
        return self._group.all_reduce(tensors, dtype)


def step_of(group: Any, gradient: Any, rows: int | None) -> Step:
    model = model_of()
    job = Job("test", model, keras.optimizers.SGD(1.0))
    job.create()
    terms = () if rows is None else (mean_over(rows),)
    variable = model.trainable_variables[:1]
    return Step(job, [gradient], variable, LossBatch(terms), group)


def test_the_share_is_worked_out_once() -> None:
    """Gradients are weighted by rows; one reduction for the number of rows."""

    def work(group: Any) -> Any:
        counting = Counting(group)
        gradient = tf.fill([3, 2], float(group.rank + 1))
        step = step_of(counting, gradient, rows=[6, 2][group.rank])
        step.reduce()
        assert step.loss is step.loss
        share = step.loss.share
        assert share is not None
        return step.gradients[0], float(share), counting.calls

    for rank, ((gradient, share, calls), _) in enumerate(run_together(2, work)):
        assert share == [0.75, 0.25][rank]
        np.testing.assert_allclose(gradient, 1 * 0.75 + 2 * 0.25)
        assert calls == 2


def test_replicas_have_one_unit_whatever_their_shapes() -> None:
    """The mean over the terms of what each has found."""

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


def test_an_empty_batch_counts_for_nothing() -> None:
    """The mean over no example is NaN."""

    def work(group: Any) -> Any:
        value = [float("nan"), 5.0][group.rank]
        step = step_of(group, tf.fill([3, 2], value), rows=[0, 4][group.rank])
        step.reduce()
        return step.gradients[0]

    for gradient, _ in run_together(2, work):
        np.testing.assert_array_equal(gradient, np.full([3, 2], 5.0))


@pytest.mark.parametrize("reduces", [False, True])
def test_all_skip_a_step_that_one_cannot_do(reduces: bool) -> None:
    def work(group: Any) -> Any:
        value = [1.0, float("inf")][group.rank]
        step = step_of(group, tf.fill([3, 2], value), rows=4)
        step.reduce() if reduces else step.weigh()
        taken = []

        def direction() -> Update:
            taken.append(True)
            return Update(step.gradients)

        step.apply_if_finite(direction)
        return taken, int(step.job.skipped[0])

    for (taken, skipped), _ in run_together(2, work):
        assert (taken, skipped) == ([], 1)


# -------------------------------------------------- another method altogether
class Scaled(Method):
    """The smallest method there is: gradients times a tunable factor."""

    factor = Tunable(positive=True)
    kind = Argument(check_choice, ("plain",))

    def attach(self, job: Job) -> None:
        self.job = job

    def create(self) -> Sequence[tf.Module]:
        return ()

    def run(self, step: Step) -> None:
        step.reduce()

        def direction() -> Update:
            factor = self.factor.at(self.job.clock)
            scaled = [
                None if g is None else g * tf.cast(factor, g.dtype)
                for g in step.gradients
            ]
            return Update(scaled)

        step.apply_if_finite(direction)

    def agreement(self) -> dict[str, Any]:
        return {}

    def contents(self, rank: int) -> Contents:
        return Contents([])

    def events(self) -> list[tuple[str, tf.Variable]]:
        return []

    def summary(self) -> list[str]:
        return ["scaled"]

    def state_bytes(self) -> dict[str, int]:
        return {"total": 0}

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        return {}


class ScaledOptimizer(SecondOrderOptimizer):
    method_type = Scaled

    def __init__(
        self,
        inner_optimizer: Any = 0.1,
        *,
        factor: Any = 1.0,
        kind: str = "plain",
        name: str = "scaled",
    ) -> None:
        inner = keras.optimizers.get(inner_optimizer)
        super().__init__(inner, Scaled(locals()), name)


def test_a_method_of_ones_own() -> None:
    model = model_of()
    optimizer = ScaledOptimizer(keras.optimizers.SGD(0.1), factor=3.0)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    want = [
        w - 0.1 * 3.0 * g.numpy()
        for w, g in zip(model.get_weights(), gradients_of(model), strict=True)
    ]
    optimizer.apply(gradients_of(model), model.trainable_variables)
    for got, expected in zip(model.get_weights(), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_tunable_is_declared_once() -> None:
    """And so is checked, shown, changed and in the config."""
    optimizer = ScaledOptimizer("sgd", factor=2)
    assert optimizer.factor == 2.0
    optimizer.factor = 4
    assert optimizer.factor == 4.0
    config = optimizer.get_config()
    assert (config["factor"], config["kind"]) == (4.0, "plain")
    for make in (
        lambda: ScaledOptimizer("sgd", factor=0),
        lambda: setattr(optimizer, "factor", -1.0),
    ):
        with pytest.raises(ValueError, match="`factor` must be a positive"):
            make()
    with pytest.raises(AttributeError, match=r"`kind` cannot.*Received"):
        optimizer.kind = "other"
    assert optimizer.kind == "plain"
