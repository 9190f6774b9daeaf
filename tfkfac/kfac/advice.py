"""What users are told, once, of a model or a setting that will disappoint."""

import sys
import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfkfac.blocks.registry import Leftover, Registry, count_weights
from tfkfac.capture.walk import SKIPPED
from tfkfac.compat.models import last_layers
from tfkfac.kfac.active import ActiveBlock
from tfkfac.loss.batch import LossBatch
from tfkfac.shell.support import uses_xla
from tfkfac.solvers import Solver
from tfkfac.solvers.eigen import EigenSolver
from tfkfac.training.job import Job

# Below this share of the weights most of a model is not trained by K-FAC.
_LOW_COVERAGE = 0.5
# A weight that is a larger share of the model is missed if it has no block.
_LARGE = 0.05
# Layers named by the warning of it, and besides all those of large weights.
_MOST_NAMED = 3
# Preconditioned layers of a model whose first step takes five seconds of a core
# and more; 50 dense ones took 6.2, most of it tracing.
_DEEP = 50
# 2, and room for rounding.
_LARGEST_SOFTMAX = 2.02


class Advice:
    """Warns of something, once and on one worker."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def give(self, job: Job, text: str | None) -> None:
        """Warns, of nothing if there is no text."""
        if text is None or text in self._given:
            return
        self._given.add(text)
        if 0 in job.topology.local:
            warnings.warn(text, stacklevel=4)

    def announce(self, job: Job, registry: Registry) -> None:
        """Says of a deep model that its first step will take a while."""
        blocks = len(registry.blocks)
        text = (
            f"tfkfac: {job.name} traces the training step of model "
            f"'{job.model.name}', with {blocks} preconditioned layers: the "
            "first step takes a while, once."
        )
        if blocks < _DEEP or text in self._given:
            return
        self._given.add(text)
        if 0 in job.topology.local:
            print(text, file=sys.stderr, flush=True)


def coverage_warning(registry: Registry, job: Job) -> str | None:
    """Returns what to say of weights that K-FAC leaves alone, or None.

    That is if they are most of the model, or if one is a large part of it or
    its last layer's, which is named then. Layers of `skip_layers` do not count:
    that they are left alone is known.

    Args:
        registry: Blocks and leftovers of the model.
        job: The job.
    """
    left = [one for one in registry.left if one.reason != SKIPPED]
    covered = registry.covered
    total = covered + sum(one.weights for one in left)
    last = {id(w) for layer in last_layers(job.model) for w in layer.weights}

    def is_missed(one: Leftover) -> bool:
        return any(
            count_weights([v]) > _LARGE * total or id(v) in last
            for v in one.variables
        )

    if covered >= _LOW_COVERAGE * total and not any(map(is_missed, left)):
        return None
    what = (
        f"K-FAC preconditions {covered / total:.1%} of the weights of model "
        f"'{job.model.name}' ({covered:,} of {total:,})"
    )
    if not registry.blocks:
        what = f"Model '{job.model.name}' has no layer that K-FAC supports"
    left.sort(key=lambda one: one.weights, reverse=True)
    named = [
        f"{one.path or '(model)'} ({one.weights:,} weights: {one.reason})"
        for place, one in enumerate(left)
        if place < _MOST_NAMED or is_missed(one)
    ]
    named += ["..."] if len(left) > len(named) else []
    inner = type(job.inner_optimizer).__name__
    return (
        f"{what}. Its inner optimizer, {inner}, trains the others alone: "
        f"{', '.join(named)}. See `optimizer.summary()`; for layers of your "
        "own there is `tfkfac.register_block`."
    )


def solver_warning(model: keras.Model, solver: type[Solver]) -> str | None:
    """Returns what to say of a solver that XLA makes slow, or None."""
    if not (issubclass(solver, EigenSolver) and uses_xla(model)):
        return None
    # Measured on a CPU: 45 to 72 times, 1e-6 accurate in float32.
    return (
        f"Model '{model.name}' is compiled by XLA, whose eigen-decompositions "
        "are loops of Jacobi rotations: many times slower than TensorFlow's "
        "and about 1e-6 accurate. Compile the model with jit_compile=False, or "
        "use KFAC(solver='inverse')."
    )


def unseen_loss_warning(job: Job, batch: LossBatch) -> str | None:
    """Returns what to say of a loss that is taken for a mean, or None."""
    if job.terms_of(batch):
        return None
    return (
        f"Optimizer '{job.name}' has not seen the loss of model "
        f"'{job.model.name}' being computed and takes it for the mean over the "
        "examples, the leading dimension of each layer's input. If it is a sum "
        "or a mean over tokens or pixels, its steps are far too short or too "
        "long: compute it with `model.compute_loss`, or say what it is the "
        "mean over by `optimizer.attach(model, loss_terms=...)`, 1 for a sum."
    )


def looks_summed(
    layers: Sequence[ActiveBlock], scale: tf.Tensor
) -> tf.Tensor | None:
    """Whether a loss that nobody has seen is a sum, taken for a mean.

    It can be told of a softmax cross-entropy: an example's gradient at the
    logits adds up to 0, and its absolute values to 2 at most.

    Args:
        layers: The blocks of the step.
        scale: What makes an example's own gradient of the recorded ones, and
            the number of examples, if the loss is their mean.

    Returns:
        A scalar bool; None where it cannot be told.
    """
    if not layers:
        return None
    last = min(layers, key=lambda one: min(r.order for r in one.records))
    g = last.used.rows(last.records[-1]).g
    if g.shape.rank != 3 or g.shape[-1] == 1:
        return None
    g *= tf.cast(scale, g.dtype) * tf.cast(tf.shape(g)[0], g.dtype)
    sizes = tf.reduce_sum(tf.abs(g), -1)
    is_softmax = tf.reduce_all(tf.abs(tf.reduce_sum(g, -1)) <= 1e-3 * sizes)
    return is_softmax & (tf.reduce_mean(sizes) > _LARGEST_SOFTMAX)
