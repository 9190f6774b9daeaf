"""K-FAC as a preconditioner in front of any Keras optimizer."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.blocks.statistics import batch_statistics
from tfkfac.capture.registry import Registry, build_registry, tappable
from tfkfac.capture.scaling import LossBatch, LossTap, example_scale
from tfkfac.factors import factor_bytes
from tfkfac.optimizers.arguments import (
    check_choice,
    check_decay,
    check_skip_layers,
    default_inner,
    serialize_skip_rule,
)
from tfkfac.optimizers.hyperparameters import (
    Hyperparameter,
    Tunable,
    Value,
    dense_start,
)
from tfkfac.optimizers.preconditioner import (
    ActiveBlock,
    Preconditioner,
    active_blocks,
    same_shape_key,
)
from tfkfac.optimizers.summary import describe
from tfkfac.optimizers.wrapper import Gradients, WrappingOptimizer
from tfkfac.saving import Named, load_state, save_state
from tfkfac.solvers import SOLVERS, decomposition_bytes
from tfkfac.variables import count_events, state_variable

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
        self._registry: Registry | None = None
        self._preconditioners: tuple[Preconditioner, ...] = ()
        self.factor_updates = state_variable(0, "int64", "factor_updates")
        self.inverse_updates = state_variable(0, "int64", "inverse_updates")

    # ------------------------------------------------------------ the step
    def _prepare(
        self, gradients: Gradients, variables: list[keras.Variable]
    ) -> Callable[[], Gradients]:
        active = active_blocks(
            self._preconditioners,
            gradients,
            [self._var_key(v) for v in variables],
            self._var_key,
        )
        batch = LossTap.open(self.bound_model()).take()
        scale = example_scale(self._loss_scale())

        def step() -> Gradients:
            self._update_factors(active, batch, scale)
            self._update_inverses(active)
            pairs = self._precondition(active, gradients)
            return self._replace(active, gradients, pairs)

        return step

    def _update_factors(
        self,
        active: Sequence[ActiveBlock],
        batch: LossBatch,
        scale: tf.Tensor | float,
    ) -> None:
        """Takes this batch into the running averages, if they are due."""

        def update() -> tf.Tensor:
            finite = []
            for one in active:
                statistics = batch_statistics(
                    one.block,
                    one.records,
                    self.weight_sharing,
                    scale,
                    batch.weightless,
                    batch.examples,
                )
                factors = one.state.factors
                finite.append(factors.update(statistics, self.factor_decay))
            count_events(
                [tf.logical_not(flag) for flag in finite],
                [one.state.factors.rejected for one in active],
                [one.block.path for one in active],
                "statistics are not finite, the factors keep their values.",
            )
            return self.factor_updates.assign_add(1)

        due = self._due(
            "factor_update_interval", _FACTOR_INTERVALS, self.factor_updates
        )
        tf.cond(due, update, lambda: tf.convert_to_tensor(self.factor_updates))

    def _update_inverses(self, active: Sequence[ActiveBlock]) -> None:
        """Decomposes the damped factors, if that is due."""

        def update() -> tf.Tensor:
            damping = self._value("damping")
            good = [
                one.state.decomposition.update(
                    one.state.factors.values(), damping
                )
                for one in active
            ]
            count_events(
                [tf.logical_not(flag) for flag in good],
                [one.state.decomposition.failures for one in active],
                [one.block.path for one in active],
                "the decomposition failed, the last good one stays in use; a "
                "larger damping may help.",
            )
            return self.inverse_updates.assign_add(1)

        due = self._due(
            "inverse_update_interval", _INVERSE_INTERVALS, self.inverse_updates
        )
        tf.cond(due, update, lambda: tf.convert_to_tensor(self.inverse_updates))

    def _precondition(
        self, active: Sequence[ActiveBlock], gradients: Gradients
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Gradient matrices `W` and `P`, the preconditioned ones."""
        pairs = []
        for one in active:
            matrix = one.block.to_matrix([gradients[i] for i in one.indices])
            pairs.append((matrix, one.state.decomposition.apply(matrix)))
        return pairs

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
        self._registry = None
        if self.built:
            self._create_state(self.bound_model())

    def _create_state(self, model: keras.Model) -> None:
        """Makes a preconditioner for each block; keeps those that fit."""
        known = {same_shape_key(p.block): p for p in self._preconditioners}
        blocks = self._find_blocks().blocks
        if not blocks:
            warnings.warn(
                f"Model '{model.name}' has no layer that K-FAC supports: "
                f"optimizer '{self.name}' leaves all of it to its inner "
                f"optimizer, {type(self.inner_optimizer).__name__}.",
                stacklevel=2,
            )
        if any(same_shape_key(b) not in known for b in blocks):
            # Nothing is known of the new ones: update at once.
            self.factor_updates.assign(0)
            self.inverse_updates.assign(0)
        self._preconditioners = tuple(
            known.get(same_shape_key(b)) or Preconditioner(b, self.solver)
            for b in blocks
        )

    def _find_blocks(self) -> Registry:
        """Blocks of the model, and what is left to the inner optimizer."""
        if self._registry is None:
            self._registry = build_registry(
                self.bound_model(), self._skip_layers
            )
        return self._registry

    def _named_state(self) -> Named:
        counters = {
            "factor_updates": self.factor_updates,
            "inverse_updates": self.inverse_updates,
            "skipped_steps": self.skipped_steps,
        }
        layers = [(p.block.path, p.named()) for p in self._preconditioners]
        return [("", counters), *layers]

    def save_own_variables(self, store: Any) -> None:
        """Writes factors and decompositions, named by layer.

        Keras saves the inner optimizer by itself.

        Args:
            store: A mapping of names to arrays.
        """
        if self.built:
            save_state(store, self._named_state())

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote.

        Args:
            store: A mapping of names to arrays.

        Raises:
            ValueError: If it does not fit the model or the solver.
        """
        load_state(store, self._named_state(), self.name)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "solver": self.solver,
            "factor_decay": self.factor_decay,
            "weight_sharing": self.weight_sharing,
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
        text = describe(self._find_blocks(), SOLVERS[self.solver](), title)
        print_fn("\n".join([text, *self._events()]))

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the bias-corrected averages of the factors.

        Returns:
            For each layer path its "A" and "G" as arrays; zeros before the
            first update. A block without one of the two leaves it out.

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
            for p in self._preconditioners
        }

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of the curvature state, also before training.

        Returns:
            The bytes of "factors", "decompositions" and their "total".
        """
        self._check_built(self.bound_model())
        blocks, solver = self._find_blocks().blocks, SOLVERS[self.solver]()
        factors = sum(factor_bytes(b) for b in blocks)
        decompositions = sum(decomposition_bytes(solver, b) for b in blocks)
        return {
            "factors": factors,
            "decompositions": decompositions,
            "total": factors + decompositions,
        }

    def _events(self) -> list[str]:
        """What went wrong so far, for the summary."""
        events = [("steps skipped, gradients not finite", self.skipped_steps)]
        for p in self._preconditioners:
            name = p.block.path
            events += [
                (f"statistics not finite in {name}", p.factors.rejected),
                (f"failed decompositions of {name}", p.decomposition.failures),
            ]
        counts = [(text, int(count.numpy())) for text, count in events]
        return [f"{text}: {count}" for text, count in counts if count]

    def _check_built(self, model: keras.Model) -> None:
        if not all(layer.built for layer in self._layers_to_tap()):
            raise ValueError(
                f"Model '{model.name}' is not built, so the sizes of its "
                "layers are not known. Call `model.build(input_shape)` or "
                "train a step first."
            )
