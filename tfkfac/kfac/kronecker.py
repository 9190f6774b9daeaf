"""State, saving and reports of an optimizer with Kronecker factors."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.blocks import block_types
from tfkfac.blocks.registry import build_registry, tappable
from tfkfac.capture.taps import Tap, before_first_call
from tfkfac.capture.walk import SkipRule, unbuilt
from tfkfac.distributed.topology import find_topology
from tfkfac.kfac.placement import Placement, Settings
from tfkfac.kfac.state import ReplicaState
from tfkfac.kfac.summary import describe
from tfkfac.saving.store import Named
from tfkfac.solvers import SOLVERS
from tfkfac.wrapper.checks import gradient_bytes
from tfkfac.wrapper.optimizer import WrappingOptimizer


class KroneckerOptimizer(WrappingOptimizer):
    """Keeps a preconditioner for each block of the model.

    Args:
        inner_optimizer: The inner optimizer.
        name: Name of the optimizer.
        solver: Name of the solver.
        skip_layers: Layers to leave to the inner optimizer.
        settings: How the work is distributed.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        name: str,
        solver: str,
        skip_layers: tuple[SkipRule, ...],
        settings: Settings,
    ) -> None:
        super().__init__(inner_optimizer, name)
        self.solver = solver
        self._skip_layers = skip_layers
        self._settings = settings
        self._placed: Placement | None = None
        self._states: tuple[ReplicaState, ...] = ()

    # --------------------------------------------------- binding and state
    def _tap_layers(self) -> None:
        """Taps the layers there are, and again when more have been built."""
        for layer in tappable(self.bound_model(), self._skip_layers):
            Tap.open(layer, self)
        for layer in unbuilt(self.bound_model()):
            if not block_types(layer):
                before_first_call(layer, self._tap_layers)

    def _attached(self) -> None:
        self._tap_layers()
        self._placed = None
        if self.built:
            self._create_state()

    def _create_state(self) -> None:
        """Makes each local worker's state; keeps what fits."""
        self._placed = None  # what was seen before the model was built
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

    def _loss_scale(self) -> tf.Tensor | None:
        """What the loss was multiplied by before the gradients were taken."""
        scaler = self._scaler() if self._scaler is not None else None
        if scaler is not None:
            return tf.convert_to_tensor(scaler.dynamic_scale)
        if self._wrapped:
            raise ValueError(
                f"Optimizer '{self.name}' is inside a `LossScaleOptimizer` "
                "that it does not know, so the scale of its statistics is "
                "unknown. Call `optimizer.attach(model, loss_scaler=...)` "
                "with that `LossScaleOptimizer`, or compile the model with it."
            )
        return None

    def _event_counters(self) -> list[tuple[str, tf.Variable]]:
        return self._states[0].events()

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
