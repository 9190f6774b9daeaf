"""FOSI and DHO2: Newton steps along extreme directions, Adam on the rest."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.forward import ForwardCall, ForwardTap, find_call
from tfkfac.capture.loss_batch import LossBatch
from tfkfac.compat.graphs import in_graph
from tfkfac.curvature.hessian import flat_space
from tfkfac.distributed.collectives import Communicator
from tfkfac.fosi.directions import HybridState
from tfkfac.fosi.estimation import Estimation, local_hessian
from tfkfac.fosi.layouts import LAYOUTS
from tfkfac.fosi.multirole import MultiRoleOptimizer, MultiRoleState
from tfkfac.fosi.subspace import Subspace
from tfkfac.wrapper.arguments import check_choice, check_count, check_range
from tfkfac.wrapper.hyperparameters import Hyperparameter, Tunable, Value
from tfkfac.wrapper.optimizer import Gradients, Update
from tfkfac.wrapper.shares import batch_share, weighted


@keras.saving.register_keras_serializable(package="tfkfac")
class FOSI(MultiRoleOptimizer):
    """Newton steps along extreme directions, any optimizer on the rest.

    Every `update_interval` steps a Lanczos iteration finds the directions `V`
    of extreme curvature `lambda` of the loss on the current batch (FOSI,
    Sivan et al., 2023). Each step then splits the gradient `g` (algorithm 3):

    ```
    c  = V^T g                      m = momentum m + c
    d  = inner optimizer's change of the weights, for the gradient g - V c
    w += s (d - V V^T d) - alpha V (m / |lambda|)
    ```

    The inner optimizer's change is the difference of the weights around its
    own `apply`, with its weight decay; its slots see the split gradient only.
    The rest is added where it has updated the weights, before it averages or
    constrains them. With directions of no curvature or before the first
    estimation, a step is the inner optimizer's, bit for bit (for dense
    gradients: those of embeddings are made dense).

    Under several replicas this is DHO2 (Gu et al., 2025): the basis of the
    Lanczos iteration and the directions are divided among them.

    The optimizer needs the loss of the current batch: `fit` and
    `train_on_batch` compute it by `Model.compute_loss`, and a custom loop has
    to do so as well.

    >>> model.compile(optimizer=tfkfac.FOSI("adam"), loss="mse")

    Args:
        inner_optimizer: A Keras optimizer, its identifier or config. Defaults
            to "adam".
        num_largest: Number of directions of largest curvature.
        num_smallest: Number of directions of smallest (most negative)
            curvature.
        alpha: Learning rate of the Newton steps: a number, a schedule or a
            callable of the iteration. Defaults to 0.1.
        update_interval: Steps between estimations: an integer, a schedule or
            a callable of the iteration. Defaults to 800.
        warmup_steps: Number of steps that the inner optimizer does alone,
            before the first estimation. Defaults to 100.
        lanczos_steps: Hessian-vector products of an estimation. None is
            `max(4 r, 2 ln n)` for `r` directions and `n` weights.
        momentum: Momentum of the Newton steps, in [0, 1). It is carried over
            to new directions. Defaults to 0.9.
        learning_rate_clip: Largest factor `s` on the inner optimizer's change.
            The factor is `lambda_max / lambda_k`, of the largest and the
            smallest of the `num_largest` curvatures: without the former,
            larger steps are stable. It is 1 for inner optimizers other than
            SGD, whose steps do not scale with the gradient. Defaults to 1.
        layout: What several replicas keep of the directions: "rows" (the same
            elements of all directions) or "columns" (whole directions, as
            published, which moves several times as much in each step).
        accelerator_fraction: Share of the replicas that are accelerators
            (MR-DHO2): the last ones, rounded to whole replicas. They train on
            no batch; in the time of an interval they do the estimation at its
            first weights, on their parts of its first batch, and the workers
            take over the result at its end. Defaults to 0: all train, and
            wait for each estimation.
        final_update: With accelerators, what workers do with the result:
            "stale" (steps as above with it, in the next interval) or "paper"
            (the inner optimizer's steps, and at the end of an interval one
            Newton step with the sum of all its gradients, as published: it
            diverges for `alpha` times `update_interval` above 2 and is there
            to reproduce the paper). Defaults to "stale".
        seed: Seed of the Lanczos iteration's start vector.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is not allowed.
    """

    alpha = Tunable()
    update_interval = Tunable()

    def __init__(
        self,
        inner_optimizer: Any = "adam",
        *,
        num_largest: int = 10,
        num_smallest: int = 0,
        alpha: Value = 0.1,
        update_interval: Value = 800,
        warmup_steps: int = 100,
        lanczos_steps: int | None = None,
        momentum: float = 0.9,
        learning_rate_clip: float = 1.0,
        layout: str = "rows",
        accelerator_fraction: float = 0.0,
        final_update: str = "stale",
        seed: int = 0,
        name: str = "fosi",
    ) -> None:
        super().__init__(
            inner_optimizer,
            name,
            check_count("num_largest", num_largest),
            check_count("num_smallest", num_smallest),
            check_steps(lanczos_steps, num_largest + num_smallest),
            check_choice("layout", layout, tuple(LAYOUTS)),
            check_range("accelerator_fraction", accelerator_fraction, 0, 1),
        )
        if num_largest + num_smallest == 0:
            raise ValueError(
                "Arguments `num_largest` and `num_smallest` must not both be 0."
            )
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        self.momentum = check_range("momentum", momentum, 0, 1)
        self.learning_rate_clip = check_range(
            "learning_rate_clip", learning_rate_clip, 1
        )
        self.final_update = check_choice(
            "final_update", final_update, ("stale", "paper")
        )
        self.seed = check_count("seed", seed)
        self._hyperparameters = {
            "alpha": Hyperparameter("alpha", alpha),
            "update_interval": Hyperparameter(
                "update_interval", update_interval, integer=True
            ),
        }

    # ------------------------------------------------------------ the step
    def _prepare(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        batch: LossBatch,
        communicator: Communicator,
    ) -> Callable[[], Update]:
        model = self.bound_model()
        state = self._states[self._position()]
        calls = ForwardTap.open(model).take()
        if self._roles.accelerators:
            return self._prepare_worker(
                state, gradients, variables, communicator
            )
        call = find_call(model, batch, calls)

        def step() -> Update:
            self._update_directions(state, batch, call, communicator)
            return self._split(state, gradients, variables, communicator)

        return step

    def _prepare_worker(
        self,
        state: HybridState,
        gradients: Gradients,
        variables: list[keras.Variable],
        group: Communicator,
    ) -> Callable[[], Update]:
        """The step of a worker beside accelerators."""
        if self.final_update == "stale":
            return lambda: self._split(state, gradients, variables, group)
        assert isinstance(state, MultiRoleState)

        def step() -> Update:
            gradient = self._join(gradients, variables)
            begun = tf.cast(state.last >= 0, gradient.dtype)
            assert state.gradient_sum is not None
            state.gradient_sum.assign_add(begun * gradient)
            return Update(gradients)

        return step

    def _reduce(
        self,
        gradients: Gradients,
        batch: LossBatch,
        communicator: Communicator,
    ) -> Gradients:
        if not self._reduces_late():
            return super()._reduce(gradients, batch, communicator)
        share = batch_share(batch, communicator, self._topology.workers)
        return [
            None if g is None else weighted(tf.convert_to_tensor(g), share)
            for g in gradients
        ]

    def _reduces_late(self) -> bool:
        """Whether gradients are added up where they are split."""
        if self._roles.accelerators and self.final_update == "paper":
            return False
        return self._layout().reduces_gradients

    def _all_finite(
        self, gradients: Gradients, communicator: Communicator
    ) -> tf.Tensor:
        finite = super()._all_finite(gradients, communicator)
        if not self._reduces_late():
            return finite
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        (total,) = communicator.all_reduce([bad])
        return tf.equal(total, 0)

    def _update_directions(
        self,
        state: HybridState,
        batch: LossBatch,
        call: ForwardCall,
        group: Communicator,
    ) -> None:
        """A Lanczos estimation at the current weights, if it is due."""
        model = self.bound_model()

        def update() -> tf.Tensor:
            share = batch_share(batch, group, self._topology.workers)
            estimation = Estimation(self._geometry, group, self.seed)
            variables = model.trainable_variables
            local = local_hessian(model, batch, call, variables, estimation)
            group.outputs()  # those are used in every product
            found = estimation.run(local, share)
            subspace = state.subspace
            assert subspace is not None
            part = subspace.layout.arrange(found.rows, group)
            self._take(state, found.values, part, group)
            with tf.control_dependencies(group.outputs()):
                return state.last.assign(self._clock())

        last = state.last
        due = self._due(state)
        tf.cond(due, in_graph(update), lambda: tf.convert_to_tensor(last))

    def _split(
        self,
        state: HybridState,
        gradients: Gradients,
        variables: list[keras.Variable],
        group: Communicator,
    ) -> Update:
        """Splits the gradient: Newton steps in V, the inner one outside."""
        subspace = state.subspace
        assert subspace is not None
        weights = self.bound_model().trainable_variables
        space = flat_space(weights)
        position = {self._var_key(v): i for i, v in enumerate(weights)}
        order = [
            position[self._var_key(v)]
            for v, g in zip(variables, gradients, strict=True)
            if g is not None
        ]
        present = [g is not None for g in gradients]
        dense = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        before = [tf.identity(v.value) for v in weights]
        active = state.estimations > 0

        def split() -> list[tf.Tensor]:
            gradient = self._join(gradients, variables)
            inside, rest = subspace.project_out(gradient, group)
            whole = space.split(rest)
            parts = [whole[i] for i in order]
            with tf.control_dependencies(group.outputs()):
                return [tf.identity(x) for x in (inside, *parts)]

        nothing = tf.zeros(subspace.momentum.shape, space.dtype)

        def keep() -> list[tf.Tensor]:
            whole = dense
            if self._reduces_late():
                whole = group.all_reduce(dense)
            group.outputs()  # the gradients are always used
            return [nothing, *whole]

        inside, *parts = tf.cond(active, split, keep)
        if subspace.accumulated is not None:
            # The inner optimizer takes the mean over as many steps.
            steps = self.inner_optimizer.gradient_accumulation_steps
            subspace.accumulated.assign_add(inside / steps)

        def after() -> None:
            def correct() -> tf.Tensor:
                changes = map(tf.subtract, [v.value for v in weights], before)
                change = space.join(list(changes))
                change = self._correction(subspace, inside, change, group)
                with tf.control_dependencies(group.outputs()):
                    # Weights without a gradient stay as they are.
                    self._add_to_weights(change, order)
                return tf.constant(0)

            tf.cond(active, correct, lambda: tf.constant(0))

        rest = iter(parts)
        return Update([next(rest) if one else None for one in present], after)

    def _join(
        self, gradients: Gradients, variables: list[keras.Variable]
    ) -> tf.Tensor:
        """The gradient as a flat vector."""
        weights = self.bound_model().trainable_variables
        known = {
            self._var_key(v): tf.convert_to_tensor(g)
            for v, g in zip(variables, gradients, strict=True)
            if g is not None
        }
        ordered = [known.get(self._var_key(v)) for v in weights]
        return flat_space(weights).join(ordered)

    def _correction(
        self,
        subspace: Subspace,
        inside: tf.Tensor,
        change: tf.Tensor,
        group: Communicator,
    ) -> tf.Tensor:
        """What is added to the inner optimizer's change of the weights.

        `(s - 1) d - s V V^T d - alpha V (m / |lambda|)`
        """
        projected = subspace.coefficients(change, group)
        if subspace.accumulated is not None:
            inside = tf.identity(subspace.accumulated)
            subspace.accumulated.assign(tf.zeros_like(inside))
        momentum = subspace.momentum.assign(
            self.momentum * subspace.momentum + inside
        )
        alpha = tf.cast(self._value("alpha"), change.dtype)
        newton = alpha * momentum * subspace.inverse_curvature(group.rank)
        if not self._scales_rate():
            return -subspace.combine([projected, newton], group)
        # s = clip(lambda_max / lambda_k, 1, learning_rate_clip)
        scale = tf.clip_by_value(
            subspace.rate_ratio(), 1.0, self.learning_rate_clip
        )
        moved = subspace.combine([scale * projected, newton], group)
        return (scale - 1) * change - moved

    def _scales_rate(self) -> bool:
        """Whether s can be other than 1: SGD's steps scale with gradients."""
        is_sgd = isinstance(self.inner_optimizer, keras.optimizers.SGD)
        return is_sgd and self.learning_rate_clip > 1

    def _due(self, state: HybridState) -> tf.Tensor:
        """Whether an interval begins here, or nothing was done yet."""
        clock = self._clock()
        since = clock - self.warmup_steps
        begins = tf.equal(since % self._value("update_interval"), 0)
        begins |= state.last < 0
        return (since >= 0) & begins & tf.not_equal(state.last, clock)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        names = (
            "num_largest",
            "num_smallest",
            "warmup_steps",
            "lanczos_steps",
            "momentum",
            "learning_rate_clip",
            "layout",
            "accelerator_fraction",
            "final_update",
            "seed",
        )
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own}


def check_steps(value: Any, directions: int) -> int | None:
    """Returns `lanczos_steps`: None, or at least one for each direction.

    Raises:
        ValueError: If it is neither.
    """
    if value is None:
        return None
    return check_count("lanczos_steps", value, max(directions, 1))
