"""Training steps, state and reports of `GaussNewton`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ForwardTap
from tfkfac.compat.graphs import Tracked
from tfkfac.curvature.hessian import dense, flat_space
from tfkfac.distributed.collectives import all_reduce_bytes
from tfkfac.gauss_newton import support
from tfkfac.gauss_newton.objective import Jacobian, Objective, activations
from tfkfac.gauss_newton.solve import NormalEquations, Search, search, unit
from tfkfac.linalg.symmetric import pack, packed_size, unpack
from tfkfac.linalg.tensors import rounding
from tfkfac.linalg.vectors import FlatSpace
from tfkfac.saving.entries import Contents
from tfkfac.saving.slots import Slots, planned
from tfkfac.shell.conditions import Conditions
from tfkfac.shell.method import Method
from tfkfac.shell.model import train_without_xla
from tfkfac.shell.tables import bytes_text, table
from tfkfac.training.guards import count_each, refuse
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update, indices_in

# Numbers of residuals for which `summary` shows sizes before the first step.
EXAMPLES = (100, 1_000, 10_000, 100_000)
# Keys of `last_step`.
_NAMES = (
    "damping",
    "tries",
    "predicted_reduction",
    "actual_reduction",
    "accepted",
    "residuals",
)
_OTHER_GRADIENT = (
    "Argument `grads` of `apply` must be the gradient of the loss that "
    "`compute_loss` returned, which `GaussNewton` minimises. Received: another "
    f"gradient. {support.ONE_LOSS} Row i of an output must depend only on row "
    "i of the inputs."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `GaussNewton` that the method uses."""

    damping: float
    momentum: float
    solve: str
    max_tries: int
    max_bytes: int | None


class State(Slots):
    """State of one replica, equal on all replicas."""

    def __init__(self, damping: float, dtype: tf.DType) -> None:
        super().__init__("replica")
        # Damping of the first try of the next step, and the previous step d,
        # zero if it was rejected. Its size changes if layers are frozen.
        self.damping = self.slot("damping", (), "float64", damping, least=0)
        self.previous = self.slot("previous_step", [None], dtype)
        self.tries = self.slot("tries")
        self.rejected = self.slot("rejected_steps")
        # Steps whose reduction is below rounding errors.
        self.settled = self.slot("settled_steps")
        self.last = self.slot("last", [len(_NAMES)], "float64", saved=False)

    def previous_step(self, space: FlatSpace) -> tf.Tensor:
        """Return the previous step; 0 in the first step or after freezing."""
        previous = tf.cond(
            tf.size(self.previous) == space.size,
            lambda: tf.cast(self.previous, space.dtype),
            lambda: tf.zeros([space.size], space.dtype),
        )
        return tf.ensure_shape(previous, [space.size])

    def record(self, result: Search, residuals: tf.Tensor, name: str) -> None:
        """Record the result of a step's tries."""
        self.damping.assign(result.damping)
        self.previous.assign(tf.cast(result.change, self.previous.dtype))
        self.tries.assign_add(tf.cast(result.tries, tf.int64))
        self.settled.assign_add(tf.cast(result.settled, tf.int64))
        count_each(
            ~(result.accepted | result.settled),
            self.rejected,
            [name],
            "a step is rejected, since no damping lowered the loss; the "
            "weights stay.",
        )
        values = (
            result.used,
            result.tries,
            result.predicted,
            result.actual,
            result.accepted,
            residuals,
        )
        self.last.assign(tf.stack([tf.cast(v, tf.float64) for v in values]))


class GaussNewtonMethod(Method):
    """Exact minimisation of the damped Gauss-Newton model of a batch."""

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.states: tuple[State, ...] = ()
        # Residuals and forward-pass scalars per example; `run` sets both.
        self.outputs, self.activations = 1, 0
        self.conditions: Conditions | None = None  # the model in `minimize`

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """Run one training step (equations in `gauss_newton/solve.py`)."""
        objective = Objective.of(step, self.space)
        model, residuals = self.job.model, objective.residuals
        self.outputs = max(rows.size for rows in objective.rows)
        self.activations = max(activations(model, r) for r in objective.rows)
        spaces = self.spaces(objective, residuals)
        # Limit the residuals, unless the space of weights can be used.
        checks: list[tf.Operation] = []
        if support.PARAMETERS not in spaces and not isinstance(residuals, int):
            checks = [self.limits.check_residuals(residuals)]
        # Limit the scalars that a backward pass stores.
        max_examples = max(support.MAX_STORED // max(self.activations, 1), 1)
        with tf.control_dependencies(checks):
            block = self.limits.block
            before, jacobian = objective.at_weights(block, max_examples)
        state = self.job.local_state(self.states)
        weights = objective.weights
        indices = iter(indices_in(step, weights))
        weight_indices = [
            None if g is None else next(indices) for g in step.gradients
        ]
        by_index = dict(zip(weight_indices, step.gradients, strict=True))
        gradients = [by_index.get(i) for i in range(len(weights))]
        gradient = self.space.join(dense(gradients))
        # Drop Keras' gradients, which the Jacobian makes redundant.
        step.drop_gradients(range(len(weight_indices)), before)
        searches = [
            functools.partial(
                self.search, space, objective, before, jacobian, state, gradient
            )
            for space in spaces
        ]

        def direction() -> Update:
            if len(searches) == 1:
                result = searches[0]()
            else:
                limit = min(self.space.size - 1, self.limits.max_residuals())
                result = tf.cond(residuals <= limit, *searches)
            state.record(result, residuals, self.job.name)
            tensors = self.space.split(-result.change)  # gradients for SGD
            return Update(
                [None if i is None else tensors[i] for i in weight_indices]
            )

        step.check_finite()
        step.apply(direction)

    def search(
        self,
        space: str,
        objective: Objective,
        before: tf.Tensor,
        jacobian: Jacobian,
        state: State,
        given: tf.Tensor,
    ) -> Search:
        """Try dampings, solving in `space`, until a step lowers the loss.

        `given` is the gradient that was passed to `apply`.
        """
        derivatives: Callable[[tf.Tensor], tf.Tensor]
        if space == support.RESIDUALS:
            residuals = jacobian.residuals()
            matrix = jacobian.matrix()
            equations = NormalEquations.of_residuals(matrix, residuals)
            derivatives = jacobian.second_derivatives
        else:
            # Sum `K^T K`, `K^T r` and the loss over all replicas.
            matrix, gradient = jacobian.gram_matrix()
            group = objective.step.group
            if group.size > 1:
                # Send a triangle of the symmetric matrix.
                tensors = [pack(matrix), gradient, before]
                packed, gradient, before = group.all_reduce(tensors)
                matrix = unpack(packed, tuple(matrix.shape))
            # Diagonal of R, the Hessian of the L2 penalties.
            ridge = self.space.join(
                [
                    2 * support.l2_of(v) * tf.ones(v.shape, self.space.dtype)
                    for v in self.job.model.trainable_variables
                ]
            )
            diagonal = tf.linalg.diag_part(matrix) + ridge
            matrix = tf.linalg.set_diag(matrix, diagonal)
            gradient += ridge * self.space.join(jacobian.values)
            scale = unit(tf.reduce_mean(tf.linalg.diag_part(matrix)))
            equations = NormalEquations(matrix, gradient, gradient, scale)

            def derivatives(change: tf.Tensor) -> tf.Tensor:
                vector = jacobian.second_derivatives(change)
                return objective.sum(jacobian.pull(vector))

        if self.job.topology.replicas == 1:
            # Units of the difference: the gradient, and its size for residuals
            # of random signs, `|K| |r| / sqrt(m)`. The factor is 0.02 for
            # float32, since products in TF32 have errors of 5e-4.
            r, gradient = jacobian.residuals(), equations.gradient
            square = equations.scale * self.space.size
            square *= tf.reduce_mean(tf.square(r))
            limit = tf.sqrt(tf.reduce_sum(tf.square(gradient)) + square)
            limit *= rounding(objective.precision) ** 0.25
            differs = tf.norm(given - gradient) > limit
            check = refuse(differs & (state.tries == 0), _OTHER_GRADIENT)
            with tf.control_dependencies([check]):
                before = tf.identity(before)
        return search(
            equations,
            objective.loss_after,
            before,
            tf.convert_to_tensor(state.damping),
            self.settings.momentum * state.previous_step(self.space),
            tf.cast(self.job.inner_optimizer.learning_rate, tf.float64),
            self.settings.max_tries,
            objective.precision,
            derivatives,
        )

    def spaces(
        self, objective: Objective, residuals: int | tf.Tensor
    ) -> tuple[str, ...]:
        """Return the solve space of a step; both if chosen at run time."""
        replicas = self.job.topology.replicas
        # Several replicas may have different numbers of residuals.
        is_known = isinstance(residuals, int) and replicas == 1
        terms = objective.step.batch.terms
        return support.choose_solve_spaces(
            self.limits,
            self.settings.solve,
            residuals if is_known else None,
            support.why_only_parameters(self.job.model, replicas, terms),
        )

    # --------------------------------------------------- binding and state
    @override
    def attach(self, job: Job) -> None:
        if job.scaling.scaler is not None:
            raise ValueError(
                "A `LossScaleOptimizer` must not wrap `GaussNewton`, which "
                "needs float32 or float64."
            )
        self.job = job
        train_without_xla(
            job.model,
            "XLA compiles neither the Jacobian of second derivatives nor "
            "TensorFlow's least squares, which `GaussNewton` needs.",
        )
        ForwardTap.open(job.model)

    @property
    def space(self) -> FlatSpace:
        """Conversion of all trainable weights to flat vectors."""
        return flat_space(self.job.model.trainable_variables)

    @property
    def limits(self) -> support.Limits:
        """The sizes of a step, and its memory limit."""
        max_bytes = self.settings.max_bytes or support.DEFAULT_MAX_BYTES
        n, dtype = self.space.size, self.space.dtype
        return support.Limits(
            n, dtype, max_bytes, self.outputs, self.activations
        )

    @override
    def create(self) -> Sequence[Tracked]:
        model, replicas = self.job.model, self.job.topology.replicas
        support.check_model(model)
        only = support.why_only_parameters(model, replicas)
        support.choose_solve_spaces(
            self.limits, self.settings.solve, None, only
        )
        if not self.states:
            damping, dtype = self.settings.damping, self.space.dtype
            self.states = self.job.for_each(lambda rank: State(damping, dtype))
        return self.states

    @override
    def contents(self, rank: int) -> Contents:
        return Contents(self.job.at(self.states, rank).entries())

    @override
    def events(self) -> list[tuple[str, tf.Variable]]:
        state = self.states[0]
        return [
            ("rejected steps, no damping lowered the loss", state.rejected),
            ("steps at the rounding error of the loss", state.settled),
        ]

    # ----------------------------------------------------------- reporting
    def last_step(self) -> dict[str, float]:
        """Values of the last step; empty before the first step."""
        if not self.states:
            return {}
        values = [float(v) for v in self.states[0].last.numpy()]
        last = dict(zip(_NAMES, values, strict=True))
        return last if last["tries"] else {}

    @override
    def summary(self) -> list[str]:
        job, last, limits = self.job, self.last_step(), self.limits
        state = bytes_text(self.state_bytes()["total"])
        only = support.why_only_parameters(job.model, job.topology.replicas)
        solve = self.settings.solve if only is None else support.PARAMETERS
        titles = [
            f"GaussNewton '{job.name}' of model '{job.model.name}': "
            f"{self.space.size:,} weights n in {self.space.dtype.name}, "
            f"state {state}."
        ]
        if last:
            damping = float(self.states[0].damping.numpy())
            titles.append(
                f"Damping now {damping:.3g} of the mean of the diagonal; "
                f"{int(self.states[0].tries.numpy())} tries in "
                f"{int(job.clock)} steps."
            )
        rows = []
        for m in [int(last["residuals"])] if last else EXAMPLES:
            space = limits.space(solve, m)
            need = bytes_text(limits.peak_bytes(space, m))
            suffix = "" if limits.allows(space, m) else " (too large)"
            rows.append((f"{m:,}", space, need + suffix))
        header = ("Residuals m", "Space", "Bytes of a step")
        return [*titles, "", *table(header, rows)]

    @override
    def state_bytes(self) -> dict[str, int]:
        space = self.space
        with planned():
            counters = State(self.settings.damping, space.dtype).bytes
        previous = space.size * space.dtype.size
        total = previous + counters
        return {"previous_step": previous, "counters": counters, "total": total}

    @override
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        size, item = self.space.size, self.space.dtype.size
        sizes = {
            "gradients": size * item,
            "curvature": packed_size((size, size)) * item,
            # Losses before the step and after the first try.
            "losses": 2 * tf.float64.size,
            # Right-hand side for the acceleration in the first try.
            "acceleration": size * item,
        }
        workers = self.job.topology.replicas
        plain = {k: all_reduce_bytes(v, workers) for k, v in sizes.items()}
        return {"plain": plain}
