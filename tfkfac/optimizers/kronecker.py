"""State, saving and reports of an optimizer with Kronecker factors."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.capture.registry import (
    SkipRule,
    build_registry,
    tappable,
    unbuilt,
)
from tfkfac.distributed.topology import find_topology
from tfkfac.optimizers.checks import gradient_bytes
from tfkfac.optimizers.placement import Placement, Settings
from tfkfac.optimizers.preconditioner import ReplicaState
from tfkfac.optimizers.summary import describe
from tfkfac.optimizers.wrapper import WrappingOptimizer
from tfkfac.saving import Named, is_state, load_state, save_state
from tfkfac.solvers import SOLVERS


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
    def _layers_to_tap(self) -> list[keras.layers.Layer]:
        return tappable(self.bound_model(), self._skip_layers)

    def _attached(self) -> None:
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
        if not store.keys():
            return  # of an optimizer saved before it had any state
        why = self._cannot_load(store)
        if why is None:
            load_state(store, self._named_state(), self.name)
        else:
            warnings.warn(
                f"Optimizer '{self.name}' does not load its saved curvature: "
                f"{why}. It starts anew.",
                stacklevel=2,
            )

    def _cannot_load(self, store: Any) -> str | None:
        """Why saved state is of no use here, or None."""
        if not is_state(store):
            return "the file is of another optimizer"
        if not self.built:
            model = self._model() if self._model is not None else None
            if model is None or unbuilt(model):
                return "the model is not built"
            self.build(model.trainable_variables)
        if self._topology.workers > 1:
            return "it is of a single worker, and the job has several"
        return None

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
        if not self.built and unbuilt(model):
            raise ValueError(
                f"Model '{model.name}' is not built, so the sizes of its "
                "layers are not known. Call `model.build(input_shape)` or "
                "train a step first."
            )
