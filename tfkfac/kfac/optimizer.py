"""K-FAC as a preconditioner in front of any Keras optimizer."""

from collections.abc import Iterable
from typing import Any, Never

import keras
import numpy as np
import tensorflow as tf

from tfkfac.checks import check_choice, check_count, check_range
from tfkfac.fisher.types import TYPES
from tfkfac.kfac.method import KFACMethod
from tfkfac.kfac.settings import (
    check_batch_fraction,
    check_decay,
    check_skip_layers,
    check_step,
    make_settings,
    serialize_skip_rule,
    settings_config,
)
from tfkfac.shell.arguments import (
    check_inner,
    choose_inner,
    refuse_unknown,
    take_over_accumulation,
)
from tfkfac.shell.hyperparameters import Value
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.solvers import SOLVERS


@keras.saving.register_keras_serializable(package="tfkfac")
class KFAC(SecondOrderOptimizer):
    """Kronecker-factored approximate curvature in front of any optimizer.

    For each layer the gradient, as a matrix `W` of inputs by outputs, is
    multiplied by the inverse of `A (x) G`: the second moments of the layer's
    inputs and of the gradients at its pre-activations (Martens & Grosse, 2015;
    Distributed K-FAC, TPDS 2022). Factors and decompositions are renewed on
    clocks of their own. The result, clipped in the metric of the Fisher
    matrix, goes to the inner optimizer.

    Factors, damping and clip are in units of the negative log-likelihood of a
    term of the loss (an example, token or pixel, whatever Keras' mean is over):
    they do not depend on the batch size, and a mean, a sum and any multiple of
    one loss make the same steps. With several losses, number of terms and unit
    are those of the one with the largest unit, its weight included.

    Weights without a block (see `summary`) go to the inner optimizer as they
    are; when these are most of a model, a warning says so. Layer classes of
    your own get a block by `tfkfac.register_block`.

    >>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")

    Args:
        inner_optimizer: A Keras optimizer, its identifier or config, or a
            float or schedule, the learning rate of `SGD(momentum=0.5)`.
            Defaults to 0.1. See `step` for what "quadratic" needs.
        damping: Tikhonov damping of the Fisher matrix. A number, a schedule or
            a callable of the iteration; with `step="quadratic"` also a
            `tfkfac.LevenbergMarquardt`, but not with
            `gradient_accumulation_steps`. Defaults to 0.01.
        solver: "inverse" (Cholesky inverses with factored damping) or "eigen"
            (eigen-decompositions, exact damping). Two more reproduce papers as
            printed: "plain_inverse" adds the whole damping to each factor
            (Distributed K-FAC, eq. 9 and 10), and with "eigen_outer" a layer's
            owner sends the damped outer product of the eigenvalues in place of
            these (KAISA, section 4.4), the same steps for more traffic.
            Defaults to "inverse".
        factor_decay: Weight of the old factors in the running average, in
            [0, 1). Defaults to 0.95.
        factor_update_interval: Steps between updates of the factors: an
            integer, a schedule or a callable of the iteration. None is every
            step at first, every 5 from step 20, every 20 from step 100.
        inverse_update_interval: The same for the decompositions. None is 5
            at first, 20 from step 20, 100 from step 100. Each is renewed once
            in an interval: where they are little work, all at its start; in
            a large model in up to four turns over the interval, so that no
            step takes much longer than the others. The first ones are made
            as soon as there are factors.
        kl_clip: Largest squared length of a step in the Fisher metric, as a
            number, a schedule or a callable; None switches it off. Without
            effect with `step="quadratic"`, whose model chooses the length.
            Defaults to 0.02.
        weight_sharing: "expand" or "reduce": what weights used at several
            positions are approximated by (Eschenhagen et al., 2023). "average"
            is DP-KFAC as printed (eq. 13), the mean over the positions of the
            gradients too, where "reduce" has their sum: with S positions G is
            S^2 times smaller than the Fisher matrix', and `damping` weighs
            that much more. Defaults to "expand".
        factor_batch_fraction: Share of the examples of a batch that a factor
            update looks at, in (0, 1]: at least one, evenly spaced over the
            batch of each worker, and other ones in the next update. They
            stand for all, so the factors' scale is the same; their noise
            grows. None is a quarter, but at least 64 examples of all workers
            together whose statistics are added up: smaller batches are taken
            whole. A number is exactly that.
        fisher: Whose gradients the factors G are made of, where the loss is
            computed by `model.compute_loss`, as `fit` does. "monte_carlo": of
            labels drawn from the model's own predictions (Martens & Grosse,
            section 5), by one more backward pass to the pre-activations in
            steps that update factors. "empirical": of the labels of the
            batch, at no cost. "type2": no draws, but the columns of a square
            root of the Hessian at the outputs, all of them (the generalised
            Gauss-Newton matrix): a backward pass for each output of an
            example, at most 1,024. The two that ask the model need the
            distribution that the loss is a likelihood of, see
            `tfkfac.register_distribution`; weights of examples count once,
            not squared. None is "empirical" where all labels are classes or a
            distribution is not known, else "monte_carlo". Defaults to None.
        distribution: What the workers of a `tf.distribute` job share:
            "comm_opt" (factors are all-reduced, each is decomposed by one
            worker and its decomposition sent to all: plain steps send nothing
            extra), "mem_opt" (a layer's owner keeps its decompositions,
            preconditions and sends the result), "hybrid_opt" (a group of
            gradient workers does, KAISA, SC'21) or "dp_kfac" (the owner also
            keeps the factors, of its own batch alone: no factor is ever
            sent). Without effect on a single device. "auto" is the one of the
            first three with which `tfkfac.cost` says that steps are shortest,
            by products, decompositions and messages that all workers time for
            a moment before the first step; `summary` says what was chosen.
        gradient_worker_fraction: With "hybrid_opt", the share of the workers
            that are gradient workers of a layer, in (0, 1]: times the number
            of workers it must be whole and divide that number.
        assignment: What the owners are balanced by: "compute" (n^3 for a
            factor of size n), "memory" (n^2) or "round_robin". None is
            "round_robin" for "dp_kfac" and "compute" for the others.
        symmetric_communication: Whether symmetric matrices are sent as
            triangles (KAISA, section 4.3).
        factor_dtype: Dtype of factors on the wire: "float32", "bfloat16" or
            "float16". None is that of the weights, at least float32. Their
            running averages are kept in that dtype in any case: half
            precision would round away what a new batch adds to them.
            TensorFlow adds no bfloat16 on GPUs: among several of them factors
            in it are sent as float32.
        inverse_dtype: Dtype of decompositions in storage and on the wire:
            "float32", "bfloat16" or None, that of the weights but at least
            float32. They are computed in float32 or better.
        max_factor_dim: Most rows of a factor that is kept as a whole matrix:
            its memory grows with the square of the width, the work of its
            decomposition with the cube. Of a wider one the product with
            `factor_rank` fixed columns is kept, sent and averaged, from which
            Nystroem's approximation is made. Its decomposition acts on the
            leading directions, and as a multiple of the identity on all
            others; `summary` says how much of the trace is in the leading
            ones. None is no limit. Defaults to 640.
        factor_rank: Number of these columns, at least 1; one less than the
            factor has rows if these are fewer. Defaults to 64.
        skip_layers: Names, regular expressions (they match a layer's whole
            name or path) or classes of layers to leave to the inner optimizer.
        gradient_accumulation_steps: Number of micro-batches, at least 2, that
            make one step together, as if they were one batch: gradients and
            statistics are added up, and all intervals count steps. None is 1.
            That of the inner optimizer is taken over. It is refused with a
            `damping` that is a `tfkfac.LevenbergMarquardt`.
        step: "inner" leaves the length of a step to `kl_clip` and the inner
            optimizer. "quadratic" chooses it anew each time (Martens & Grosse,
            2015, sections 6.4 and 7): the update is `alpha Delta + mu d`, with
            `Delta` the negative preconditioned gradient, d the update before,
            and the `(alpha, mu)` for which the quadratic model of the loss,
            with its exact Gauss-Newton matrix and the damping, is least. That
            takes a forward pass and two Jacobian-vector products, in training
            mode on a part of the batch, which change no state. Weights without
            a block are moved along their negative gradient, by a third such
            number. The Gauss-Newton matrix is that of the loss of the model's
            outputs, for Keras' cross-entropies of the logits behind a softmax
            or sigmoid; regularisers of weights are part of the model, losses
            that layers add are so by their gradient alone. The inner optimizer
            must be SGD with a learning rate alone, a multiplier of the step
            that is 1.0 by default. The loss must be computed by
            `model.compute_loss`, as Keras does.
        quadratic_batch_fraction: Share of each worker's examples that the
            Gauss-Newton matrix is of, in (0, 1]: at least one, evenly spaced,
            and other ones in the next step; with
            `gradient_accumulation_steps`, of the last micro-batch. None is a
            quarter, but at least 64 examples of all workers together. Only
            with `step="quadratic"`.
        max_skipped_steps: Steps in a row, at least 1, skipped because their
            gradients were not finite, that end the training with an error on
            all workers; see `check_skipped_steps`. None is any number.
        learning_rate: Learning rate of the inner SGD, if there is no other
            `inner_optimizer`: a float, a schedule or a callable.
        momentum: Momentum of the inner SGD, likewise.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is not allowed.
    """

    method_type = KFACMethod
    _method: KFACMethod
    # The method's, shown as attributes.
    damping: Value
    kl_clip: Value
    factor_update_interval: Value
    inverse_update_interval: Value
    solver: str
    factor_decay: float
    weight_sharing: str
    factor_batch_fraction: float | None
    fisher: str | None
    max_factor_dim: int | None
    factor_rank: int
    step: str
    quadratic_batch_fraction: float | None

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
        factor_batch_fraction: float | None = None,
        fisher: str | None = None,
        distribution: str = "comm_opt",
        gradient_worker_fraction: float | None = None,
        assignment: str | None = None,
        symmetric_communication: bool = False,
        factor_dtype: str | None = None,
        inverse_dtype: str | None = None,
        max_factor_dim: int | None = 640,
        factor_rank: int = 64,
        skip_layers: Iterable[Any] = (),
        gradient_accumulation_steps: int | None = None,
        step: str = "inner",
        quadratic_batch_fraction: float | None = None,
        max_skipped_steps: int | None = None,
        learning_rate: Any = None,
        momentum: float | None = None,
        name: str = "kfac",
        **unknown: Never,
    ) -> None:
        refuse_unknown("KFAC", unknown, keras.optimizers.SGD)
        if momentum is not None:
            momentum = check_range("momentum", momentum, 0, 1)
        inner = check_inner(
            choose_inner(
                inner_optimizer,
                keras.optimizers.SGD,
                {"learning_rate": 1.0, "momentum": 0.0}
                if step == "quadratic"
                else {"learning_rate": 0.1, "momentum": 0.5},
                {"learning_rate": learning_rate, "momentum": momentum},
            )
        )
        accumulation = take_over_accumulation(
            inner, gradient_accumulation_steps
        )
        method = KFACMethod(
            damping=damping,
            kl_clip=kl_clip,
            factor_update_interval=factor_update_interval,
            inverse_update_interval=inverse_update_interval,
            solver=check_choice("solver", solver, tuple(SOLVERS)),
            factor_decay=check_decay(factor_decay),
            weight_sharing=check_choice(
                "weight_sharing",
                weight_sharing,
                ("expand", "reduce", "average"),
            ),
            factor_batch_fraction=check_batch_fraction(
                "factor_batch_fraction", factor_batch_fraction
            ),
            fisher=None
            if fisher is None
            else check_choice("fisher", fisher, TYPES),
            settings=make_settings(
                distribution,
                gradient_worker_fraction,
                assignment,
                symmetric_communication,
                factor_dtype,
                inverse_dtype,
            ),
            max_factor_dim=None
            if max_factor_dim is None
            else check_count("max_factor_dim", max_factor_dim, 1),
            factor_rank=check_count("factor_rank", factor_rank, 1),
            skip_layers=check_skip_layers(skip_layers),
            gradient_accumulation_steps=accumulation,
            step=check_step(step, inner, damping, accumulation),
            quadratic_batch_fraction=check_batch_fraction(
                "quadratic_batch_fraction", quadratic_batch_fraction
            ),
        )
        super().__init__(inner, method, name, max_skipped_steps)

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Number of micro-batches of a step, None for 1."""
        if self._is_building:  # Keras would make sums of its own
            return None
        return self._method.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: None) -> None:
        """Keras' constructor sets it, to None."""
        if value is not None:
            raise AttributeError(
                "Argument `gradient_accumulation_steps` cannot be changed: "
                "create another optimizer. Received: "
                f"gradient_accumulation_steps={value!r}"
            )

    @property
    def last_step(self) -> dict[str, float]:
        """What the last step did; empty before the first.

        "clip_factor" is what `kl_clip` has multiplied the step by, at most 1;
        "length" is the squared length of the step in the Fisher metric, after
        the clip and before the momentum; "damping" is that of the next
        decomposition.

        With `step="quadratic"` there are in place of the first two "alpha" and
        "mu", "alpha_plain" where weights have no block, and
        "predicted_reduction", how much smaller the model says that the step
        makes the loss of the batch. Where `LevenbergMarquardt` has looked at
        it, "actual_reduction" is how much smaller it does; "damping" is that
        of the step.
        """
        if not self.built:
            return {}
        return self._method.states[0].report.values()

    @property
    def factor_updates(self) -> tf.Variable:
        """Number of factor updates so far."""
        return self._method.states[0].factor_updates

    @property
    def inverse_updates(self) -> tf.Variable:
        """Number of steps so far that have renewed decompositions."""
        return self._method.states[0].inverse_updates

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the bias-corrected averages of the factors.

        Returns:
            For each layer path its "A" and "G" as arrays, those that this
            process keeps, on all of its replicas; zeros before the first
            update. A diagonal is a vector; of a factor with more than
            `max_factor_dim` rows it is the approximation, written out as a
            matrix. A block without one of the two leaves it out.

        Raises:
            ValueError: If the optimizer has not been built by a first step.
        """
        if not self.built:
            raise ValueError(
                f"Optimizer '{self.name}' has no factors yet. Train a step, "
                "or call `optimizer.build(model.trainable_variables)`."
            )
        return self._method.factors()

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of this worker's curvature state.

        Known before training, for a built model.

        Returns:
            The bytes of "factors", "decompositions" and their "total", of the
            sums for "accumulation" if there is any, and of the
            "previous_update" with `step="quadratic"`.
        """
        return super().state_bytes()

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that this worker receives in a step.

        Known before training, for a built model.

        Returns:
            For a "plain" step, one that also updates the "factor"s and one
            that also renews all "inverse"s, the bytes of "gradients",
            "factors", "decompositions" and "preconditioned_gradients". Two
            more numbers for each dense layer that is preconditioned by its
            rows, the few of a quadratic model, and what synchronised layers
            add up for drawn labels are not counted.
        """
        return super().communication_bytes()

    def _arguments(self) -> dict[str, Any]:
        """The arguments of the constructor but the inner optimizer."""
        method = self._method
        return {
            **super()._arguments(),
            **settings_config(method.settings),
            "skip_layers": [serialize_skip_rule(r) for r in method.skip_layers],
            "gradient_accumulation_steps": method.gradient_accumulation_steps,
        }
