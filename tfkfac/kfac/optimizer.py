"""K-FAC as a preconditioner in front of any Keras optimizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.blocks import LayerGradient
from tfkfac.blocks.statistics import batch_statistics
from tfkfac.capture.scaling import LossBatch, example_scale
from tfkfac.distributed.collectives import Communicator
from tfkfac.kfac.active import (
    ActiveBlock,
    active_blocks,
    decompose_owned,
    take_decompositions,
    take_statistics,
)
from tfkfac.kfac.kronecker import KroneckerOptimizer
from tfkfac.kfac.state import ReplicaState
from tfkfac.solvers import SOLVERS
from tfkfac.wrapper.arguments import (
    check_choice,
    check_decay,
    check_skip_layers,
    default_inner,
    make_settings,
    serialize_skip_rule,
    settings_config,
)
from tfkfac.wrapper.hyperparameters import (
    Hyperparameter,
    Tunable,
    Value,
    dense_start,
)
from tfkfac.wrapper.optimizer import Gradients, Update

# The measured schedule: where the second and third interval begin, and the
# intervals of factors and decompositions.
_BOUNDARIES = (20, 100)
_FACTOR_INTERVALS = (1, 5, 10)
_INVERSE_INTERVALS = (5, 20, 50)


@keras.saving.register_keras_serializable(package="tfkfac")
class KFAC(KroneckerOptimizer):
    """Kronecker-factored approximate curvature in front of any optimizer.

    For each layer the gradient, as a matrix `W` of inputs by outputs, is
    multiplied by the inverse of `A (x) G`: the second moments of the layer's
    inputs and of the gradients at its pre-activations (Martens & Grosse, 2015;
    Distributed K-FAC, TPDS 2022). Factors and decompositions are renewed on
    clocks of their own. The result, clipped in the metric of the Fisher
    matrix, goes to the inner optimizer. Factors have the scale of the true
    Fisher matrix: `damping` does not depend on the batch size.

    Weights without a block (see `summary`) go to the inner optimizer as they
    are.

    >>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")

    Args:
        inner_optimizer: A Keras optimizer, its identifier or config, or a
            float, the learning rate of `SGD(momentum=0.5)`. Defaults to 0.1.
        damping: Tikhonov damping of the Fisher matrix. A number, a schedule or
            a callable of the iteration. Defaults to 0.01.
        solver: "inverse" (Cholesky inverses with factored damping) or "eigen"
            (eigen-decompositions, exact damping). Defaults to "inverse".
        factor_decay: Weight of the old factors in the running average, in
            [0, 1). Defaults to 0.95.
        factor_update_interval: Steps between updates of the factors: an
            integer, a schedule or a callable of the iteration. None is every
            step at first, every 5 from step 20, every 10 from step 100.
        inverse_update_interval: The same for the decompositions. None is 5
            at first, 20 from step 20, 50 from step 100.
        kl_clip: Largest squared length of a step in the Fisher metric, as a
            number, a schedule or a callable; None switches it off. Defaults
            to 0.02.
        weight_sharing: "expand" or "reduce": what weights used at several
            positions are approximated by (Eschenhagen et al., 2023). Defaults
            to "expand".
        distribution: What the workers of a `tf.distribute` job share:
            "comm_opt" (factors are all-reduced, each is decomposed by one
            worker and its decomposition sent to all: plain steps send nothing
            extra), "mem_opt" (a layer's owner keeps its decompositions,
            preconditions and sends the result), "hybrid_opt" (a group of
            gradient workers does, KAISA, SC'21) or "dp_kfac" (the owner also
            keeps the factors, of its own batch alone: no factor is ever
            sent). Without effect on a single device.
        gradient_worker_fraction: With "hybrid_opt", the share of the workers
            that are gradient workers of a layer, in (0, 1]: times the number
            of workers it must be whole and divide that number.
        assignment: What the owners are balanced by: "compute" (n^3 for a
            factor of size n), "memory" (n^2) or "round_robin". None is
            "round_robin" for "dp_kfac" and "compute" for the others.
        symmetric_communication: Whether symmetric matrices are sent as
            triangles (KAISA, section 4.3).
        factor_dtype: Dtype of factors in storage and on the wire: "float32",
            "bfloat16" or "float16". None is that of the weights, at least
            float32. Decompositions are always computed in float32 or better.
        inverse_dtype: The same for the decompositions.
        skip_layers: Names, regular expressions (they match a layer's whole
            name or path) or classes of layers to leave to the inner optimizer.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is not allowed.
    """

    damping = Tunable()
    kl_clip = Tunable()
    factor_update_interval = Tunable()
    inverse_update_interval = Tunable()

    def __init__(
        self,
        inner_optimizer: Any = None,
        *,
        damping: Value = 0.01,
        solver: str = "inverse",
        factor_decay: float = 0.95,
        factor_update_interval: Value = None,
        inverse_update_interval: Value = None,
        kl_clip: Value = 0.02,
        weight_sharing: str = "expand",
        distribution: str = "comm_opt",
        gradient_worker_fraction: float | None = None,
        assignment: str | None = None,
        symmetric_communication: bool = False,
        factor_dtype: str | None = None,
        inverse_dtype: str | None = None,
        skip_layers: Iterable[Any] = (),
        name: str = "kfac",
    ) -> None:
        super().__init__(
            default_inner(inner_optimizer, 0.1, 0.5),
            name,
            check_choice("solver", solver, tuple(SOLVERS)),
            check_skip_layers(skip_layers),
            make_settings(
                distribution,
                gradient_worker_fraction,
                assignment,
                symmetric_communication,
                factor_dtype,
                inverse_dtype,
            ),
        )
        self.weight_sharing = check_choice(
            "weight_sharing", weight_sharing, ("expand", "reduce")
        )
        self.factor_decay = check_decay(factor_decay)
        self._hyperparameters = {
            "damping": Hyperparameter("damping", damping),
            "kl_clip": Hyperparameter(
                "kl_clip", kl_clip, positive=True, optional=True
            ),
            "factor_update_interval": Hyperparameter(
                "factor_update_interval",
                factor_update_interval,
                integer=True,
                optional=True,
            ),
            "inverse_update_interval": Hyperparameter(
                "inverse_update_interval",
                inverse_update_interval,
                integer=True,
                optional=True,
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
        state = self._states[self._position()]
        active = active_blocks(
            state.preconditioners,
            gradients,
            [self._var_key(v) for v in variables],
            self._var_key,
        )
        scale = example_scale(self._loss_scale())

        def step() -> Update:
            self._update_factors(state, active, batch, scale, communicator)
            self._update_inverses(state, active, communicator)
            pairs = self._precondition(active, gradients, communicator)
            return Update(self._replace(active, gradients, pairs))

        return step

    def _update_factors(
        self,
        state: ReplicaState,
        active: Sequence[ActiveBlock],
        batch: LossBatch,
        scale: tf.Tensor | float,
        communicator: Communicator,
    ) -> None:
        """Local statistics -> [all-reduce] -> averages, if they are due."""

        def update() -> tf.Tensor:
            statistics = {
                one.position: batch_statistics(
                    one.block,
                    one.records,
                    self.weight_sharing,
                    scale,
                    batch.weightless,
                    batch.examples,
                )
                for one in active
                if self._placement().plan.observes(
                    communicator.rank, one.position
                )
            }
            reduced = self._placement().exchange.reduce_statistics(
                communicator, statistics
            )
            taken = take_statistics(active, reduced, self.factor_decay)
            with tf.control_dependencies(communicator.outputs()):
                return state.factor_updates.assign_add(taken)

        due = self._due(
            "factor_update_interval", _FACTOR_INTERVALS, state.factor_updates
        )
        tf.cond(due, update, lambda: tf.convert_to_tensor(state.factor_updates))

    def _update_inverses(
        self,
        state: ReplicaState,
        active: Sequence[ActiveBlock],
        communicator: Communicator,
    ) -> None:
        """Owners decompose -> gradient workers receive, if that is due."""

        def update() -> tf.Tensor:
            damping = self._value("damping")
            made = decompose_owned(active, self._placement().solver, damping)
            layers = [one.position for one in active]
            parts = self._placement().exchange.share_decompositions(
                communicator, made, layers
            )
            take_decompositions(active, parts, damping)
            with tf.control_dependencies(communicator.outputs()):
                return state.inverse_updates.assign_add(1)

        due = self._due(
            "inverse_update_interval",
            _INVERSE_INTERVALS,
            state.inverse_updates,
        )
        # Before the first statistics (an empty batch) there is nothing.
        due = tf.logical_and(due, state.factor_updates > 0)
        tf.cond(
            due, update, lambda: tf.convert_to_tensor(state.inverse_updates)
        )

    def _precondition(
        self,
        active: Sequence[ActiveBlock],
        gradients: Gradients,
        communicator: Communicator,
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Gradient workers apply -> receivers receive.

        Returns:
            Gradient matrices `W` and `P`, the preconditioned ones.
        """
        plain = {
            one.position: one.block.to_matrix(
                [gradients[i] for i in one.indices]
            )
            for one in active
        }
        own = {
            one.position: one.state.decomposition.apply(
                LayerGradient(plain[one.position])
            )
            for one in active
            if one.state.decomposition is not None
        }
        shared = self._placement().exchange.share_gradients(
            communicator, own, list(plain)
        )
        return [(plain[i], shared[i]) for i in plain]

    def _replace(
        self,
        active: Sequence[ActiveBlock],
        gradients: Gradients,
        pairs: Sequence[tuple[tf.Tensor, tf.Tensor]],
    ) -> Gradients:
        """Puts the clipped preconditioned gradients in their places."""
        replaced = list(gradients)
        scale = self._clip_scale(pairs)
        for one, (_, preconditioned) in zip(active, pairs, strict=True):
            scaled = preconditioned * tf.cast(scale, preconditioned.dtype)
            new = one.block.from_matrix(scaled)
            for i, gradient in zip(one.indices, new, strict=True):
                replaced[i] = gradient
        return replaced

    def _clip_scale(
        self, pairs: Sequence[tuple[tf.Tensor, tf.Tensor]]
    ) -> tf.Tensor:
        """`nu = min(1, sqrt(kl_clip / (lr^2 |sum <P, W>|)))` (eq. 16)."""
        if self.kl_clip is None or not pairs:
            return tf.constant(1.0)
        products = [tf.reduce_sum(p * w) for w, p in pairs]
        total = tf.abs(tf.add_n([tf.cast(x, tf.float32) for x in products]))
        rate = tf.cast(self.learning_rate, tf.float32)
        length = tf.square(rate) * total
        clipped = tf.sqrt(tf.math.divide_no_nan(self._value("kl_clip"), length))
        return tf.where(length > 0, tf.minimum(clipped, 1.0), 1.0)

    def _value(self, name: str) -> tf.Tensor:
        return self._hyperparameters[name].at(self._clock())

    def _clock(self) -> tf.Tensor:
        return tf.cast(self.iterations, tf.int64)

    def _due(
        self, name: str, measured: tuple[int, ...], done: tf.Variable
    ) -> tf.Tensor:
        """Whether an interval ends here, or nothing was done yet."""
        if self._hyperparameters[name].get() is None:
            interval = dense_start(self._clock(), _BOUNDARIES, measured)
        else:
            interval = self._value(name)
        due = tf.equal(self._clock() % interval, 0)
        return tf.logical_or(due, tf.equal(done, 0))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "solver": self.solver,
            "factor_decay": self.factor_decay,
            "weight_sharing": self.weight_sharing,
            **settings_config(self._settings),
            "skip_layers": [serialize_skip_rule(r) for r in self._skip_layers],
        }
