"""K-FAC as a preconditioner in front of any Keras optimizer."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.blocks.statistics import batch_statistics
from tfkfac.capture.registry import build_registry, tappable
from tfkfac.capture.scaling import LossBatch, example_scale
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.topology import find_topology
from tfkfac.optimizers.active import (
    ActiveBlock,
    active_blocks,
    decompose_owned,
    take_decompositions,
    take_statistics,
)
from tfkfac.optimizers.arguments import (
    check_choice,
    check_decay,
    check_skip_layers,
    default_inner,
    make_settings,
    serialize_skip_rule,
    settings_config,
)
from tfkfac.optimizers.hyperparameters import (
    Hyperparameter,
    Tunable,
    Value,
    dense_start,
)
from tfkfac.optimizers.placement import Placement
from tfkfac.optimizers.preconditioner import ReplicaState
from tfkfac.optimizers.summary import describe
from tfkfac.optimizers.wrapper import (
    Gradients,
    WrappingOptimizer,
    gradient_bytes,
)
from tfkfac.saving import Named, load_state, save_state
from tfkfac.solvers import SOLVERS

# The measured schedule: where the second and third interval begin, and the
# intervals of factors and decompositions.
_BOUNDARIES = (20, 100)
_FACTOR_INTERVALS = (1, 5, 10)
_INVERSE_INTERVALS = (5, 20, 50)


@keras.saving.register_keras_serializable(package="tfkfac")
class KFAC(WrappingOptimizer):
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
        super().__init__(default_inner(inner_optimizer, 0.1, 0.5), name)
        self.solver = check_choice("solver", solver, tuple(SOLVERS))
        self.weight_sharing = check_choice(
            "weight_sharing", weight_sharing, ("expand", "reduce")
        )
        self.factor_decay = check_decay(factor_decay)
        self._skip_layers = check_skip_layers(skip_layers)
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
        self._settings = make_settings(
            distribution,
            gradient_worker_fraction,
            assignment,
            symmetric_communication,
            factor_dtype,
            inverse_dtype,
        )
        self._placed: Placement | None = None
        self._states: tuple[ReplicaState, ...] = ()

    # ------------------------------------------------------------ the step
    def _prepare(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        batch: LossBatch,
        communicator: Communicator,
    ) -> Callable[[], Gradients]:
        state = self._states[self._position(communicator.rank)]
        active = active_blocks(
            state.preconditioners,
            gradients,
            [self._var_key(v) for v in variables],
            self._var_key,
        )
        scale = example_scale(self._loss_scale())

        def step() -> Gradients:
            self._update_factors(state, active, batch, scale, communicator)
            self._update_inverses(state, active, communicator)
            pairs = self._precondition(active, gradients, communicator)
            return self._replace(active, gradients, pairs)

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
            take_statistics(active, reduced, self.factor_decay)
            return state.factor_updates.assign_add(1)

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
            return state.inverse_updates.assign_add(1)

        due = self._due(
            "inverse_update_interval",
            _INVERSE_INTERVALS,
            state.inverse_updates,
        )
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
            one.position: one.state.decomposition.apply(plain[one.position])
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

    # --------------------------------------------------- binding and state
    def _layers_to_tap(self) -> list[keras.layers.Layer]:
        return tappable(self.bound_model(), self._skip_layers)

    def _attached(self) -> None:
        self._placed = None
        if self.built:
            self._create_state()

    def _create_state(self) -> None:
        """Makes each local worker's state; keeps what fits."""
        placement = self._placement()
        if not placement.blocks:
            warnings.warn(
                f"Model '{self.bound_model().name}' has no layer that K-FAC "
                f"supports: optimizer '{self.name}' leaves all of it to its "
                f"inner optimizer, {type(self.inner_optimizer).__name__}.",
                stacklevel=2,
            )
        topology = placement.topology
        if not self._states:
            self._states = tuple(ReplicaState() for _ in topology.local)
        for state, rank, device in zip(
            self._states, topology.local, topology.devices, strict=True
        ):
            with tf.init_scope(), tf.device(device):
                state.fill(placement, rank)

    def _description(self) -> dict[str, Any]:
        """What all workers must agree on."""
        registry = self._placement().registry
        layers = [
            [block.path, block.kind, list(block.factor_shapes.values())]
            for block in registry.blocks
        ]
        rest = [[left.path, left.reason] for left in registry.leftovers]
        return {
            **super()._description(),
            "layers": layers,
            "layers left to the inner optimizer": rest,
        }

    def _placement(self) -> Placement:
        """Blocks of the model, and which worker does what of them."""
        if self._placed is None:
            registry = build_registry(self.bound_model(), self._skip_layers)
            self._placed = Placement(
                registry,
                find_topology(self.bound_model().distribute_strategy),
                SOLVERS[self.solver](),
                self._settings,
            )
        return self._placed

    @property
    def factor_updates(self) -> tf.Variable:
        """Number of factor updates so far."""
        return self._states[0].factor_updates

    @property
    def inverse_updates(self) -> tf.Variable:
        """Number of updates of the decompositions so far."""
        return self._states[0].inverse_updates

    def _named_state(self) -> Named:
        (path, counters), *layers = self._states[0].named()
        skipped = {"skipped_steps": self._skipped[0]}
        return [(path, counters | skipped), *layers]

    def save_own_variables(self, store: Any) -> None:
        """Writes factors and decompositions, named by layer.

        Keras saves the inner optimizer by itself. With several workers no
        worker has all of the state and none is written: a loaded model then
        gathers its curvature anew from the first step on.

        Args:
            store: A mapping of names to arrays.
        """
        if self.built and self._topology.workers == 1:
            save_state(store, self._named_state())

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote.

        Args:
            store: A mapping of names to arrays.

        Raises:
            ValueError: If it does not fit the model or the solver.
        """
        if self._topology.workers == 1:
            load_state(store, self._named_state(), self.name)
        elif len(store.keys()):
            warnings.warn(
                f"Optimizer '{self.name}' does not load the curvature of a "
                "single worker into a job of several; it starts anew.",
                stacklevel=2,
            )

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

    # ----------------------------------------------------------- reporting
    def summary(self, print_fn: Callable[[str], None] = print) -> None:
        """Prints what is preconditioned, what is not and why, and the state.

        Args:
            print_fn: Function that takes the text. Defaults to `print`.

        Raises:
            ValueError: If the optimizer has no model, or one that is not
                built.
        """
        model = self.bound_model()
        self._check_built(model)
        title = (
            f"K-FAC '{self.name}' of model '{model.name}': solver "
            f"{self.solver}, inner optimizer "
            f"{type(self.inner_optimizer).__name__}"
        )
        text = describe(self._placement(), title)
        print_fn("\n".join([text, *self._events()]))

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the bias-corrected averages of the factors.

        Returns:
            For each layer path its "A" and "G" as arrays, those that this
            worker keeps; zeros before the first update. A block without one
            of the two leaves it out.

        Raises:
            ValueError: If the optimizer has not been built by a first step.
        """
        if not self.built:
            raise ValueError(
                f"Optimizer '{self.name}' has no factors yet. Train a step, "
                "or call `optimizer.build(model.trainable_variables)`."
            )
        return {
            p.block.path: {k: v.numpy() for k, v in p.factors.values().items()}
            for p in self._states[0].preconditioners
            if p.factors is not None
        }

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of this worker's curvature state.

        Known before training, for a built model.

        Returns:
            The bytes of "factors", "decompositions" and their "total".
        """
        self._check_built(self.bound_model())
        placement = self._placement()
        return placement.state_bytes(placement.topology.local[0])

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that this worker receives in a step.

        Known before training, for a built model.

        Returns:
            For a "plain" step, one that also updates the "factor"s and one
            that also renews the "inverse"s, the bytes of "gradients",
            "factors", "decompositions" and "preconditioned_gradients".
        """
        model = self.bound_model()
        self._check_built(model)
        placement = self._placement()
        size = gradient_bytes(model.trainable_variables)
        return placement.communication_bytes(placement.topology.local[0], size)

    def _events(self) -> list[str]:
        """What went wrong so far, for the summary."""
        if not self.built:
            return []
        events = [("steps skipped, gradients not finite", self._skipped[0])]
        events += self._states[0].events()
        counts = [(text, int(count.numpy())) for text, count in events]
        return [f"{text}: {count}" for text, count in counts if count]

    def _check_built(self, model: keras.Model) -> None:
        if not all(layer.built for layer in self._layers_to_tap()):
            raise ValueError(
                f"Model '{model.name}' is not built, so the sizes of its "
                "layers are not known. Call `model.build(input_shape)` or "
                "train a step first."
            )
