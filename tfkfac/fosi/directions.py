"""State, saving and reports of an optimizer with directions of curvature."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.capture.forward import ForwardTap
from tfkfac.compat.graphs import count_events, state_variable
from tfkfac.compat.inner_update import own_copy
from tfkfac.curvature.hessian import flat_space
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.roles import Roles, assign_roles
from tfkfac.distributed.topology import find_topology
from tfkfac.distributed.traffic import all_reduce_bytes
from tfkfac.fosi.estimation import estimation_bytes
from tfkfac.fosi.handover import piece_bytes
from tfkfac.fosi.layouts import LAYOUTS, Geometry, Layout
from tfkfac.fosi.subspace import Subspace
from tfkfac.kfac.summary import bytes_text, table
from tfkfac.linalg.lanczos import default_steps
from tfkfac.saving.store import Named
from tfkfac.wrapper.checks import gradient_bytes
from tfkfac.wrapper.optimizer import WrappingOptimizer


class HybridState(tf.Module):
    """The curvature state of one replica.

    Attributes:
        subspace: The directions; None on an accelerator.
        estimations: Number of estimations so far.
        last: The update before which the last one was done or begun; -1 if
            there was none.
        failures: Number of estimations that were not finite.
    """

    def __init__(self, subspace: Subspace | None) -> None:
        super().__init__(name="replica")
        self.subspace = subspace
        self.estimations = state_variable(0, "int64", "estimations")
        self.last = state_variable(-1, "int64", "last_estimation")
        self.failures = state_variable(0, "int64", "failures")

    def named(self) -> dict[str, tf.Variable]:
        """All variables by name, for saving."""
        named = {
            "estimations": self.estimations,
            "last_estimation": self.last,
            "failures": self.failures,
        }
        if self.subspace is not None:
            named |= self.subspace.named()
        return named


class HybridOptimizer(WrappingOptimizer):
    """Keeps directions of extreme curvature of the whole model.

    Args:
        inner_optimizer: The inner optimizer.
        name: Name of the optimizer.
        num_largest: Number of directions of largest curvature.
        num_smallest: Number of directions of smallest curvature.
        lanczos_steps: Lanczos steps, None for the default.
        layout: Name of the layout.
        accelerator_fraction: Share of the replicas that are accelerators.
    """

    warmup_steps: int

    def __init__(
        self,
        inner_optimizer: Any,
        name: str,
        num_largest: int,
        num_smallest: int,
        lanczos_steps: int | None,
        layout: str,
        accelerator_fraction: float,
    ) -> None:
        super().__init__(inner_optimizer, name)
        self.num_largest = num_largest
        self.num_smallest = num_smallest
        self.lanczos_steps = lanczos_steps
        self.layout = layout
        self.accelerator_fraction = accelerator_fraction
        self._states: tuple[HybridState, ...] = ()

    # --------------------------------------------------- binding and state
    def _attached(self) -> None:
        ForwardTap.open(self.bound_model())
        # A fraction that leaves nobody is refused here, not in the first step.
        self._roles_in(self.bound_model().distribute_strategy)
        if self.built and self._find_geometry() != self._geometry:
            self._create_state()

    def _create_state(self) -> None:
        self._roles = self._roles_in(self.bound_model().distribute_strategy)
        self._geometry = self._find_geometry()
        asked = self.num_largest + self.num_smallest
        if self._geometry.directions < asked:
            warnings.warn(
                f"Model '{self.bound_model().name}' has "
                f"{self._geometry.size} weights: optimizer '{self.name}' "
                f"uses {self._geometry.directions} directions, not {asked}.",
                stacklevel=2,
            )
        topology = self._topology
        states = []
        for rank, device in zip(topology.local, topology.devices, strict=True):
            with tf.init_scope(), tf.device(device):
                states.append(self._new_state(rank))
        self._states = tuple(states)

    def _new_state(self, rank: int) -> HybridState:
        return HybridState(self._new_subspace(rank))

    def _new_subspace(self, rank: int) -> Subspace | None:
        if not self._roles.trains(rank):
            return None
        return Subspace(self._layout(), self._accumulates())

    def _accumulates(self) -> bool:
        return bool(self.inner_optimizer.gradient_accumulation_steps)

    def _roles_in(self, strategy: tf.distribute.Strategy) -> Roles:
        return assign_roles(
            find_topology(strategy).workers, self.accelerator_fraction
        )

    def _find_geometry(self) -> Geometry:
        """Sizes; never more directions or steps than weights."""
        space = flat_space(self.bound_model().trainable_variables)
        largest = min(self.num_largest, space.size)
        smallest = min(self.num_smallest, space.size - largest)
        steps = self.lanczos_steps
        if steps is None:
            steps = default_steps(space.size, largest + smallest)
        steps = min(steps, space.size)
        return Geometry(space.size, largest, smallest, steps, space.dtype)

    def _layout(self) -> Layout:
        return LAYOUTS[self.layout](self._geometry, len(self._roles.workers))

    def _take(
        self,
        state: HybridState,
        values: tf.Tensor,
        part: tf.Tensor,
        group: Communicator,
    ) -> None:
        """Uses new directions from now on, if there are any."""
        subspace = state.subspace
        assert subspace is not None
        # The same bits on every worker, so all take the same branch.
        finite = tf.reduce_all(tf.math.is_finite(values))
        count_events(
            [tf.logical_not(finite)],
            [state.failures],
            [self.name],
            "an estimation of curvature is not finite and left out.",
        )
        # An empty batch has no curvature; what is known of others is kept.
        usable = finite & tf.reduce_any(values != 0)

        def take() -> tf.Tensor:
            subspace.take(values, part, group)
            with tf.control_dependencies(group.outputs()):
                return state.estimations.assign_add(1)

        count = state.estimations
        tf.cond(usable, take, lambda: tf.convert_to_tensor(count))

    def _add_to_weights(
        self, change: tf.Tensor, places: Iterable[int] | None = None
    ) -> None:
        """Adds a flat vector to this replica's weights, or some of them."""
        weights = self.bound_model().trainable_variables
        parts = flat_space(weights).split(change)
        for i in range(len(weights)) if places is None else places:
            own_copy(weights[i].value).assign_add(parts[i])

    def _value(self, name: str) -> tf.Tensor:
        return self._hyperparameters[name].at(self._clock())

    def _clock(self) -> tf.Tensor:
        return tf.cast(self.iterations, tf.int64)

    def _named_state(self) -> Named:
        state = self._states[0].named()
        return [("", {**state, "skipped_steps": self._skipped[0]})]

    def _event_counters(self) -> list[tuple[str, tf.Variable]]:
        text = "estimations of curvature that were not finite"
        return [(text, self._states[0].failures)]

    @property
    def estimations(self) -> tf.Variable | int:
        """Number of estimations of the directions so far."""
        return self._states[0].estimations if self._states else 0

    # ----------------------------------------------------------- reporting
    def spectrum(self) -> np.ndarray:
        """Returns the Ritz values of the last estimation.

        Returns:
            The values in use, ascending; empty before the first estimation
            that found any curvature, and on accelerators.
        """
        if not self.built or self._states[0].subspace is None:
            return np.zeros([0], np.float32)
        if int(self._states[0].estimations.numpy()) == 0:
            return np.zeros([0], np.float32)
        return np.asarray(self._states[0].subspace.ritz_values.numpy())

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of this replica's curvature state.

        Known before training, for a built model.

        Returns:
            The bytes of the "directions" and what goes with them, of the
            "basis" of the Lanczos iteration, which lives during an estimation
            only (on accelerators, always), and their "total".
        """
        self._prepare_report()
        rank = self._topology_now().local[0]
        geometry, item = self._geometry, self._geometry.dtype.size
        trains = self._roles.trains(rank)
        count = Subspace.count(self._layout(), self._accumulates())
        directions = count * item if trains else 0
        estimators = self._roles.accelerators or self._roles.workers
        basis = 0
        if rank in estimators:
            length = -(-geometry.size // len(estimators))
            basis = geometry.steps * length * item
        return {
            "directions": directions,
            "basis": basis,
            "total": directions + basis,
        }

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that this replica receives in a step.

        Known before training, for a built model.

        Returns:
            For a step of the "warmup", a "plain" one and one with an
            "estimation", the bytes of "gradients", of the "projections" of
            gradient and update, of the "lanczos" iterations, of "directions"
            on their way to who keeps them, and of the "weights" that
            accelerators follow. With accelerators an estimation is spread
            over an interval and its result handed over in one step.
        """
        self._prepare_report()
        model, roles = self.bound_model(), self._roles
        rank = self._topology_now().local[0]
        layout, workers = self._layout(), len(roles.workers)
        size = gradient_bytes(model.trainable_variables)
        step = {
            "gradients": all_reduce_bytes(size, workers),
            "projections": layout.projection_bytes(),
            "lanczos": 0,
            "directions": 0,
            "weights": 0,
        }
        if not roles.trains(rank):
            step = dict.fromkeys(step, 0)
        estimators = roles.accelerators or roles.workers
        estimation = dict(step)
        if rank in estimators:
            estimation["lanczos"] = estimation_bytes(
                self._geometry, len(estimators)
            )
        if roles.trains(rank):
            estimation["directions"] = layout.arrangement_bytes()
        if roles.accelerators:
            estimation["directions"] = piece_bytes(layout, roles, rank)
        if not roles.trains(rank):
            for kind in (step, estimation):
                kind["weights"] = gradient_bytes(model.variables)
        return {
            "warmup": {**step, "projections": 0},
            "plain": step,
            "estimation": estimation,
        }

    def summary(self, print_fn: Callable[[str], None] = print) -> None:
        """Prints the sizes, the state and the spectrum.

        Args:
            print_fn: Function that takes the text. Defaults to `print`.

        Raises:
            ValueError: If the optimizer has no model, or one that is not
                built.
        """
        self._prepare_report()
        model, geometry, roles = self.bound_model(), self._geometry, self._roles
        inner = type(self.inner_optimizer).__name__
        state = self.state_bytes()
        rows = [
            ("Weights", f"{geometry.size:,}"),
            (
                "Directions",
                f"{geometry.largest} of largest and {geometry.smallest} of "
                "smallest curvature",
            ),
            ("Lanczos steps", str(geometry.steps)),
            ("Estimations", self._estimations_text()),
            ("State: directions", bytes_text(state["directions"])),
            ("State: Lanczos basis", bytes_text(state["basis"])),
        ]
        if len(roles.workers) + len(roles.accelerators) > 1:
            rows += [
                ("Workers", ", ".join(map(str, roles.workers))),
                (
                    "Accelerators",
                    ", ".join(map(str, roles.accelerators)) or "-",
                ),
                ("Layout", self.layout),
            ]
        if roles.accelerators:
            shares = ", ".join(f"{s:.0%}" for s in self.idle_share())
            rows.append(("Time spent waiting", shares))
        values = self.spectrum()
        if len(values):
            text = ", ".join(f"{value:.4g}" for value in values)
            rows.append(("Ritz values", text))
        title = (
            f"FOSI '{self.name}' of model '{model.name}': Newton steps in the "
            f"directions, {inner} on the rest"
        )
        lines = [title, "", *table(("", "Value"), rows), *self._events()]
        print_fn("\n".join(lines))

    def idle_share(self) -> np.ndarray:
        """Returns the share of the time that each replica has waited.

        That is for the others at the end of a step, counted from the second
        step on. If it is high on workers, the accelerators are too slow for
        `update_interval`; if it is high on accelerators, fewer would do.

        Returns:
            A number in [0, 1] for each replica, workers first; zeros without
            accelerators.
        """
        self._prepare_report()
        return np.zeros(len(self._roles.workers))

    def _estimations_text(self) -> str:
        if not self.built:
            return "0"
        return str(int(self._states[0].estimations.numpy()))

    def _prepare_report(self) -> None:
        """Finds the sizes, also before the optimizer is built.

        Raises:
            ValueError: If the model is not built.
        """
        model = self.bound_model()
        self._check_built(model)
        if not self.built:
            self._roles = self._roles_in(model.distribute_strategy)
            self._geometry = self._find_geometry()

    def _topology_now(self) -> Any:
        return find_topology(self.bound_model().distribute_strategy)
