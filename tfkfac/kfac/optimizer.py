"""The optimizer `KFAC`: spectral steps and natural-gradient steps."""

from collections.abc import Iterable
from typing import Any, Self, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.saving import serialize_keras_object
from typing_extensions import override

from tfkfac.capture.walk import LayerRule
from tfkfac.checks import check_choice, check_count, check_range, if_given
from tfkfac.compat.optimizers import exclude_from_decay, rate_of
from tfkfac.fisher.types import TYPES
from tfkfac.kfac.method import KFACMethod
from tfkfac.kfac.natural import is_vector
from tfkfac.kfac.settings import (
    AUTO,
    DEFAULT_KL_CLIP,
    WEIGHT_SHARING,
    Distribution,
    KFACSettings,
    check_batch_fraction,
    check_distribution,
    check_factor_dim,
    check_layer_rules,
    choose_optimizers,
    choose_step,
    serialize_layer_rule,
)
from tfkfac.shell.arguments import (
    Hyperparameter,
    Schedule,
    interval,
    take_over_accumulation,
)
from tfkfac.shell.optimizer import SecondOrderOptimizer
from tfkfac.shell.rest import INNER, ProportionalRate
from tfkfac.shell.small_rates import RateCheck, restoring
from tfkfac.solvers import SOLVERS

Inner: TypeAlias = keras.optimizers.Optimizer | str | dict[str, Any]


@keras.saving.register_keras_serializable(package="tfkfac")
class KFAC(SecondOrderOptimizer):
    """Train by the Kronecker-factored curvature of each layer (K-FAC).

    `KFAC()` takes spectral steps: they move all singular directions of a
    layer's momentum by equal lengths, in the metric of `A (x) G`. A and G are
    the second moments of the layer's inputs and of the gradients at its
    pre-activations. The length of a step follows from the loss, so nothing
    has to be tuned. The learning rate is a factor of this length, which falls
    linearly from 1 to 0 over each `fit`.

    `KFAC(inner_optimizer)` and `KFAC(learning_rate=...)` take natural-gradient
    steps, the K-FAC of the papers (Martens & Grosse, 2015; Distributed K-FAC,
    TPDS 2022). The gradient of each layer, as a matrix `W` of inputs by
    outputs, is multiplied by the inverse of `A (x) G`, clipped in the metric
    of the Fisher matrix, and passed to the inner optimizer. These learning
    rates are about 100 times those of Adam.

    Factors and their decompositions are updated at separate intervals.

    Factors, damping and clip are in units of the negative log-likelihood of a
    term of the loss (an example, token or pixel, whatever Keras' mean is over):
    they do not depend on the batch size, and a mean, a sum and any multiple of
    one loss make the same steps. With several losses, the number of terms and
    the unit are taken from the loss with the largest unit times loss weight.
    Spectral steps do not depend on the unit of the targets of squared errors
    and other losses of residuals, nor on a factor of all class or sample
    weights.

    The rest optimizer trains uncovered weights, see `summary`. A warning lists
    them if neither blocks nor spectral steps train most of the model. Register
    a block for a custom layer class by `tfkfac.register_block`.

    >>> model.compile(optimizer=tfkfac.KFAC(), loss="mse")
    >>> model.fit(x, y, epochs=10)
    >>> model.optimizer.summary()

    Against overfitting:

    >>> model.compile(optimizer=tfkfac.KFAC(weight_decay=0.1), loss="mse")

    Args:
        inner_optimizer: A Keras optimizer, its identifier or config, or a
            float or schedule, the learning rate of `SGD(momentum=0.5)`. With
            spectral steps, SGD without momentum. None is SGD with
            `learning_rate` and `momentum`. Defaults to None.
        learning_rate: Learning rate of the default inner optimizer: a float
            or a schedule. Spectral steps know their length, and the learning
            rate multiplies it. None is `tfkfac.schedules.FitDecay(peak)`,
            which falls linearly to 0 over each `fit`, from 1.0 with spectral
            and from 0.1 with natural-gradient steps. A rate that is set
            during training, as by `ReduceLROnPlateau`, ends this decay. Rates
            below 0.03 with spectral and below 0.003 with natural-gradient
            steps cause a warning. Defaults to None.
        momentum: Momentum in [0, 1). None is 0.9 with spectral steps, and 0.5
            for the default inner optimizer with natural-gradient steps; other
            inner optimizers have their own. Defaults to None.
        rest_optimizer: A Keras optimizer, its name or config, for the weights
            without a block, which `summary` lists. "inner" leaves them to the
            inner optimizer, as the papers do; spectral steps do not allow it.
            None is Adam. With spectral steps its learning rate is
            `min(r, 0.1)` times `learning_rate`, where r is "clip_factor" of
            `last_step`. With natural-gradient steps it is 0.001 for a constant
            inner rate, 0.01 times the schedule of an SGD, or equal to the
            schedule of another inner optimizer, and follows later changes. None
            and a name use `use_ema`, `ema_momentum` and
            `ema_overwrite_frequency` of the inner optimizer. Defaults to None.
        weight_decay: Decoupled weight decay, at least 0, in the units of Muon
            and AdamW: with spectral steps `w -= weight_decay * r * s * w`,
            where s is the learning rate and r the factor of the length in
            `last_step`. With natural-gradient steps, and for the weights of
            the default `rest_optimizer`, `w -= rate * weight_decay * w`, with
            the rate of the optimizer that trains them. Biases, norm scales and
            offsets do not decay, nor do weights that
            `exclude_from_weight_decay` names. Another `rest_optimizer` keeps
            the decay and exclusions that it was created with. Must be None if
            the `inner_optimizer` has a weight decay. None is no decay.
            Defaults to None.
        step: "natural" preconditions the gradient, limits its length by
            `kl_clip` and passes it to the inner optimizer. "spectral"
            orthogonalises the momentum in the metric of the factors. None is
            "natural" if `inner_optimizer`, `learning_rate` or `kl_clip` is
            given (even as 0.02), else "spectral". Defaults to None.
        damping: Tikhonov damping of the Fisher matrix. A number or a
            `keras.optimizers.schedules.LearningRateSchedule`. Defaults to
            0.01.
        kl_clip: Largest squared length of a step in the Fisher metric, as a
            number or a schedule; None for no limit. Without effect on
            spectral steps, whose length has a formula. Defaults to 0.02.
        fisher: Gradients from which the factors G are computed, where the loss
            is computed by `model.compute_loss`, as `fit` does. "monte_carlo":
            gradients for labels sampled from the model's predictions (Martens
            & Grosse, section 5), by one more backward pass to the
            pre-activations in factor updates. "empirical": gradients for the
            labels of the batch, at no cost. "type2": all columns of a square
            root of the Hessian at the outputs, without sampling (the
            generalised Gauss-Newton matrix): a backward pass for each output
            of an example, at most 1,024. "monte_carlo" and "type2" need the
            predictive distribution whose negative log-likelihood is the loss,
            see `tfkfac.register_distribution`; example weights count once,
            not squared. None is "empirical" where all labels are classes or a
            distribution is not known, else "monte_carlo". Defaults to None.
        solver: "inverse" (Cholesky inverses with factored damping) or "eigen"
            (eigen-decompositions, exact damping), or the name of a custom
            solver, see `tfkfac.register_solver`. Defaults to "inverse".
        distribution: Mode in which the workers of a `tf.distribute` job share
            the work: "comm_opt", "mem_opt", "hybrid_opt", "dp_kfac",
            or a `tfkfac.Distribution` for more options. Without effect on a
            single device. Defaults to "comm_opt".
        gradient_worker_fraction: Fraction of the workers that are gradient
            workers of a layer, with `distribution="hybrid_opt"`; see
            `tfkfac.Distribution`. None is about half of the workers there.
            Defaults to None.
        factor_update_interval: Steps between updates of the factors: an
            integer or a schedule. None is every step at first, every 5 from
            step 20, every 20 from step 100.
        inverse_update_interval: Steps between updates of a decomposition. None
            is 5 at first, 20 from step 20, 100 from step 100. A small model
            updates all decompositions in one step. A large model has up to
            four groups that are updated in different steps, so that no step
            takes much longer than the others. The first decompositions are
            computed as soon as there are factors.
        factor_decay: Weight of the old factors in the running average, in
            [0, 1). Defaults to 0.95.
        factor_batch_fraction: Fraction of the examples of a batch in a factor
            update, in (0, 1]: at least one example, evenly spaced over the
            batch of each worker, and different examples in the next update.
            The scale of the factors does not change; their noise grows. None
            is a quarter, but at least 64 examples over all workers whose
            statistics are summed: smaller batches are used completely. A
            number has no such minimum.
        weight_sharing: "expand" or "reduce": approximation for weights used at
            several positions (Eschenhagen et al., 2023). "average" is DP-KFAC
            as printed (eq. 13): the mean of the gradients over the positions,
            where "reduce" has the sum. With S positions, G is then smaller by
            the factor S^2, and `damping` has S^2 times the effect. Defaults to
            "expand".
        max_factor_dim: Maximum number of rows of a factor that is kept as a
            dense matrix: its memory grows with the square of the width, the
            work of its decomposition with the cube. For a wider factor only
            the product with 64 fixed columns is stored, averaged and sent. Its
            Nystroem approximation has the leading directions, and a multiple
            of the identity for all others.
            `summary` shows the share of the trace in the leading directions.
            "auto" is 640, but 127 for `Dense` and `EinsumDense` layers in
            spectral steps. None is no limit. Defaults to "auto".
        skip_layers: Names, regular expressions (they match a layer's whole
            name or path) or classes of layers to leave to the rest optimizer;
            one, or several in a list or tuple. A rule that matches a layer
            includes its sublayers. The rest optimizer then trains all of
            their weights; spectral steps do not orthogonalise these matrices.
        only_layers: Layers to precondition, by the same rules; all other
            layers are left to the rest optimizer. A layer that both arguments
            match is left to it too. None is all layers. Defaults to None.
        gradient_accumulation_steps: Number of micro-batches, at least 2, that
            make one step together: gradients and statistics are added up, and
            all intervals count steps. Each micro-batch chooses its own examples
            and sampled labels for the factors. Rho of spectral steps comes from
            the last micro-batch. None is 1. The inner optimizer's setting is
            taken over.
        max_skipped_steps: Number of consecutive steps with gradients that are
            not finite after which training raises an error on all workers, at
            least 1; see `check_skipped_steps`. None is no limit. Defaults to
            100.
        name: Name of the optimizer.

    Raises:
        ValueError: If an argument is not allowed.
    """

    settings_type = KFACSettings
    inner_class = keras.optimizers.SGD
    wrapped_hint = (
        "Pass it to the inner optimizer, which gives natural-gradient steps: "
        "`inner_optimizer=keras.optimizers.SGD(0.1, momentum=0.9, {})`. The "
        "uncovered weights have a `rest_optimizer`."
    )
    method: KFACMethod

    def __init__(
        self,
        inner_optimizer: Inner | Schedule | None = None,
        *,
        learning_rate: Schedule | None = None,
        momentum: float | None = None,
        rest_optimizer: Inner | None = None,
        weight_decay: float | None = None,
        step: str | None = None,
        damping: Schedule = 0.01,
        kl_clip: Schedule | None = DEFAULT_KL_CLIP,
        fisher: str | None = None,
        solver: str = "inverse",
        distribution: str | Distribution = "comm_opt",
        gradient_worker_fraction: float | None = None,
        factor_update_interval: Schedule | None = None,
        inverse_update_interval: Schedule | None = None,
        factor_decay: float = 0.95,
        factor_batch_fraction: float | None = None,
        weight_sharing: str = "expand",
        max_factor_dim: int | str | None = AUTO,
        skip_layers: LayerRule | Iterable[LayerRule] = (),
        only_layers: LayerRule | Iterable[LayerRule] | None = None,
        gradient_accumulation_steps: int | None = None,
        max_skipped_steps: int | None = 100,
        name: str = "kfac",
    ) -> None:
        distribution = check_distribution(
            distribution, gradient_worker_fraction
        )
        step = choose_step(step, inner_optimizer, learning_rate, kl_clip)
        momentum = if_given(check_range, "momentum", momentum, 0, 1)
        weight_decay = if_given(check_range, "weight_decay", weight_decay, 0)
        inner, rest = choose_optimizers(
            step,
            inner_optimizer,
            learning_rate,
            momentum,
            rest_optimizer,
            weight_decay,
        )
        gradient_accumulation_steps = take_over_accumulation(
            inner, gradient_accumulation_steps
        )
        settings = KFACSettings(
            step=step,
            # The inner optimizer has the momentum of natural-gradient steps.
            momentum=momentum if step == "spectral" else None,
            weight_decay=weight_decay,
            damping=Hyperparameter("damping", damping),
            kl_clip=Hyperparameter(
                "kl_clip", kl_clip, positive=True, optional=True
            ),
            fisher=if_given(check_choice, "fisher", fisher, TYPES),
            solver=check_choice("solver", solver, tuple(sorted(SOLVERS))),
            distribution=distribution,
            factor_update_interval=interval(
                "factor_update_interval", factor_update_interval
            ),
            inverse_update_interval=interval(
                "inverse_update_interval", inverse_update_interval
            ),
            factor_decay=check_range("factor_decay", factor_decay, 0, 1),
            factor_batch_fraction=if_given(
                check_batch_fraction,
                "factor_batch_fraction",
                factor_batch_fraction,
            ),
            weight_sharing=check_choice(
                "weight_sharing", weight_sharing, WEIGHT_SHARING
            ),
            max_factor_dim=check_factor_dim("max_factor_dim", max_factor_dim),
            skip_layers=check_layer_rules("skip_layers", skip_layers),
            only_layers=if_given(check_layer_rules, "only_layers", only_layers),
            gradient_accumulation_steps=if_given(
                check_count,
                "gradient_accumulation_steps",
                gradient_accumulation_steps,
                2,
            ),
        )
        method = KFACMethod(settings)
        super().__init__(inner, method, name, max_skipped_steps, rest)
        # Other inner optimizers, such as Adam, have rates of their own size.
        is_sgd = isinstance(inner, keras.optimizers.SGD)
        self._rate_check = RateCheck(self.name, step) if is_sgd else None
        self.check_rate(rate_of(inner))

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Number of micro-batches of a step, None for 1."""
        if self._is_building:  # Keras would accumulate gradients itself
            return None
        return self.method.settings.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int | None) -> None:
        """Accept only None, which Keras' constructor assigns."""
        if value is not None:
            raise AttributeError(
                "Argument `gradient_accumulation_steps` cannot be changed: "
                "create another optimizer. Received: "
                f"gradient_accumulation_steps={value!r}"
            )

    @property
    def weight_decay(self) -> float | None:
        """The argument `weight_decay`; the inner optimizer's if it is None."""
        value = self.method.settings.weight_decay
        return self.inner_optimizer.weight_decay if value is None else value

    @weight_decay.setter
    def weight_decay(self, value: float | None) -> None:
        """Accept only the current value, and None of Keras' constructor."""
        if hasattr(self, "method") and value != self.weight_decay:
            raise AttributeError(
                "Argument `weight_decay` cannot be changed: create another "
                f"optimizer. It is {self.weight_decay!r}. Received: "
                f"weight_decay={value!r}"
            )

    @override
    def check_rate(self, rate: Any) -> None:
        is_chief = self._job is None or 0 in self._job.topology.local
        # In a graph, a step of the user's sets the rate.
        if not (self._rate_check and is_chief and tf.executing_eagerly()):
            return
        if rate is None:
            self._rate_check.finish()
            return
        is_in_fit = bool(self.plan.in_fit.numpy())
        epoch = int(self.plan.epoch.numpy()) if is_in_fit else None
        self._rate_check.set(rate, epoch, self.num_updates)

    @override
    def _build_wrapped(self, variables: list[keras.Variable]) -> None:
        rest = self.rest_optimizer
        # Do not change a rest optimizer that the user has created.
        if rest is not None and isinstance(rate_of(rest), ProportionalRate):
            exclude_from_decay(rest, [v for v in variables if is_vector(v)])
        super()._build_wrapped(variables)

    @property
    def last_step(self) -> dict[str, float]:
        """Metrics of the last step by name; empty before the first step.

        With natural-gradient steps "clip_factor" is the factor from `kl_clip`
        on the step, at most 1, and "length" the squared length of the step in
        the Fisher metric, after the clip and before the momentum. With spectral
        steps "clip_factor" is the factor r of their length, and "length" is
        `(s r)^2 sum |Q|^2`: the squared length in the metric of the factors,
        with the learning rate s. "damping" is the damping of the next
        decomposition.
        """
        if not self.built:
            return {}
        return self.method.states[0].report.values()

    @property
    def factor_updates(self) -> tf.Variable | int:
        """Number of factor updates so far; 0 before the first step."""
        return self.method.states[0].factor_updates if self.built else 0

    @property
    def inverse_updates(self) -> tf.Variable | int:
        """Number of steps so far that have updated decompositions."""
        return self.method.states[0].inverse_updates if self.built else 0

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the bias-corrected averages of the factors.

        Returns:
            For each layer path the arrays "A" and "G" that this process keeps,
            on all of its replicas; zeros before the first update. A diagonal
            factor is a vector. For a factor with more than `max_factor_dim`
            rows, the array is the approximation as a dense matrix. Factors
            that a block does not have are omitted.

        Raises:
            ValueError: If the optimizer has not been built by a first step.
        """
        if not self.built:
            raise ValueError(
                f"Optimizer '{self.name}' has no factors yet. Train a step, "
                "or call `optimizer.build(model.trainable_variables)`."
            )
        return self.method.factors()

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of this worker's curvature state.

        Known before training, for a built model.

        Returns:
            The bytes of "factors", "decompositions" and their "total", of the
            sums for "accumulation" if there is any, and of the "momenta" of
            spectral steps.
        """
        return super().state_bytes()

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that this worker receives in a step.

        Known before training, for a built model.

        Returns:
            For a "plain" step, a "factor" step (also updates the factors) and
            an "inverse" step (also updates all decompositions), the bytes of
            "gradients", "factors", "decompositions" and
            "preconditioned_gradients". Not counted: two scalars per dense layer
            preconditioned by its rows, sums of synchronised layers for sampled
            labels, and sums over labels and weights in spectral steps.
        """
        return super().communication_bytes()

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        arguments["weight_decay"] = self.method.settings.weight_decay
        for name in ("skip_layers", "only_layers"):
            if arguments[name] is not None:
                rules = [serialize_layer_rule(rule) for rule in arguments[name]]
                arguments[name] = rules
        return arguments

    @classmethod
    @override
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> Self:
        with restoring():
            return super().from_config(config, custom_objects)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        rest = self.rest_optimizer
        saved_rest = INNER if rest is None else serialize_keras_object(rest)
        return super().get_config() | {"rest_optimizer": saved_rest}
