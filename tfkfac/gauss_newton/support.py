"""Checks of models, losses and memory for exact Gauss-Newton steps."""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.capture.walk import walk
from tfkfac.compat.losses import loss_function
from tfkfac.fisher.distributions import Normal, output_of
from tfkfac.loss.batch import changed_layers
from tfkfac.loss.recognition import LOCATION
from tfkfac.loss.terms import LossTerms, recognized
from tfkfac.shell.tables import bytes_text, unit_of
from tfkfac.training.guards import refuse

_ADVICE = "Leave it out, or use `tfkfac.KFAC` or another optimizer."
ONE_LOSS = (
    "Call `compute_loss` once in a step, and change neither its result nor the "
    "gradients. Return the residuals of other loss terms as outputs of the "
    "model, and compile a loss for them."
)


def check_model(model: keras.Model) -> None:
    """Check a model before the first step."""
    if type(model).compute_loss is not keras.Model.compute_loss:
        raise ValueError(
            f"Model '{model.name}' overrides `compute_loss`. `GaussNewton` "
            "needs the residuals: return the left-hand sides of the equations "
            "from the model, use their right-hand sides as labels, and "
            'compile with loss="mse".'
        )
    for node in walk(model):
        dtype = tf.as_dtype(node.layer.compute_dtype)
        if dtype.is_floating and dtype.size < 4:
            raise ValueError(
                f"Layer '{node.layer.name}' computes in {dtype.name}. "
                "`GaussNewton` needs float32 or float64, because rounding in "
                "half precision exceeds the residuals."
            )
    for variable in model.trainable_variables:
        l2_of(variable)
        if variable.constraint is not None:
            raise ValueError(
                f"Variable '{variable.path}' has a constraint, which "
                f"`GaussNewton` does not support. {_ADVICE}"
            )


def l2_of(variable: keras.Variable) -> float:
    """Return the factor of a variable's L2 penalty; 0 without a penalty."""
    l2 = variable.regularizer
    if l2 is None:
        return 0.0
    is_l2 = type(l2) is keras.regularizers.L2
    if not is_l2 and (type(l2) is not keras.regularizers.L1L2 or l2.l1 > 0):
        raise ValueError(
            f"Variable '{variable.path}' has the regulariser "
            f"{type(l2).__name__}. `GaussNewton` supports only "
            "`keras.regularizers.L2`, which is a sum of squares."
        )
    return float(l2.l2)


def _warn_of_unknown(model: keras.Model, terms: Sequence[LossTerms]) -> None:
    """Warn of losses whose likelihood is unknown."""
    for name, likelihood in recognized(terms):
        if likelihood in (None, LOCATION):
            warnings.warn(
                f"Loss '{name}' of model '{model.name}' is a multiple of no "
                "known likelihood. Its Hessian is replaced by the "
                "identity. Declare its distribution with "
                "`tfkfac.register_distribution`.",
                stacklevel=3,
            )


def check_call(
    model: keras.Model, call: ForwardCall, terms: Sequence[LossTerms]
) -> None:
    """Check the first call of a model and its losses."""
    for leaf in keras.tree.flatten((call.args, call.kwargs)):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise ValueError(
                f"Model '{model.name}' has a sparse or ragged input, which "
                "`GaussNewton` cannot split into examples. "
                f"Received: {leaf}"
            )
    changed_by_training, loss_adding = changed_layers(model, call)
    for name in loss_adding:
        raise ValueError(
            f"Layer '{name}' of model '{model.name}' adds a loss, whose "
            "residuals are unknown to `GaussNewton`. Return the residuals as "
            "an additional output of the model, and compile a loss for it."
        )
    for changed in changed_by_training:
        raise ValueError(
            f"Layer '{changed}' of model '{model.name}' changes its state in "
            "training, as batch normalisation and dropout do. `GaussNewton` "
            "needs outputs that depend only on the example and the weights. "
            f"{_ADVICE}"
        )
    _warn_of_unknown(model, terms)
    returned = {id(t): t for t in keras.tree.flatten(call.outputs)}
    for loss_terms in terms:
        output = output_of(loss_terms, Normal())
        if isinstance(output, str):
            raise ValueError(
                f"`GaussNewton` needs a loss that is a sum of squares or a "
                f"negative log-likelihood, but {output}. Absolute and Huber "
                'errors have no Gauss-Newton matrix. Use loss="mse" or a '
                "cross-entropy, or declare the distribution of your loss by "
                "`tfkfac.register_distribution`."
            )
        predictions = output.predictions
        if id(predictions) not in returned:
            raise ValueError(
                f"A loss of model '{model.name}' was not computed from outputs "
                "of the model. Compute it with `model.compute_loss(x=x, "
                "y=y, y_pred=model(x, training=True))`, as Keras' "
                "`train_step` does."
            )
        assert loss_terms.call is not None
        double = any(v.dtype == "float64" for v in model.trainable_variables)
        if double and (loss := loss_terms.call.loss).dtype != "float64":
            warnings.warn(
                f"Loss '{loss.name}' of model '{model.name}' is computed in "
                f"{loss.dtype}, although weights are float64. Its rounding "
                "limits the accuracy. Call "
                "`keras.config.set_floatx('float64')` first (and, after the "
                "first layer, `keras.config.set_dtype_policy('float64')`), "
                'or compile with a loss of `dtype="float64"`.',
                stacklevel=2,
            )
        if not predictions.shape[1:].is_fully_defined():
            raise ValueError(
                "`GaussNewton` needs a static number of outputs per example. "
                f"Received: outputs of shape {predictions.shape} of model "
                f"'{model.name}'."
            )


def why_only_parameters(
    model: keras.Model, replicas: int, terms: Sequence[LossTerms] = ()
) -> str | None:
    """Return why the space of residuals is not available, or None."""
    # The text continues 'Argument `solve` must be "auto" or "parameters" ...'.
    if replicas > 1:
        return (
            "with several replicas, because only the matrices J^T J of the "
            "weights can be summed over replicas"
        )
    for variable in model.trainable_variables:
        if variable.regularizer is not None:
            return (
                "with a regulariser, which adds one residual per weight, as "
                f"for '{variable.path}'"
            )
    for call in (loss_terms.call for loss_terms in terms):
        if call and loss_function(call.loss) is keras.losses.kl_divergence:
            return (
                "with a Kullback-Leibler divergence. Use "
                '"categorical_crossentropy", which differs by a constant'
            )
    return None


PARAMETERS, RESIDUALS, AUTO = "parameters", "residuals", "auto"
SPACES = (AUTO, PARAMETERS, RESIDUALS)
# Default of `max_bytes`: 2 GiB.
DEFAULT_MAX_BYTES = 2**31
# Square matrices in memory: the sum, its damped copy, the Cholesky factor.
_MATRICES = 3
# Copies of a row in memory: per variable, and concatenated; in the space of
# residuals, where all rows are in memory at once, also multiplied by B^T.
_COPIES = {PARAMETERS: 2, RESIDUALS: 3}
# Upper bound: scalars stored by a backward pass, 64 MiB in float64.
MAX_STORED = 2**23
# Placeholder in a message for a number of bytes that is known at run time.
_NEED = "{}"
_MIN_BLOCK_ROWS = 256


class Limits(NamedTuple):
    """Sizes and memory limit of a step."""

    weights: int  # number of weights n
    dtype: tf.DType  # dtype of the matrices
    max_bytes: int
    outputs: int = 1  # residuals per example
    activations: int = 0  # scalars of a forward pass per example

    def peak_bytes(self, space: str, residuals: int) -> int:
        """Return the peak memory of a step in bytes, including model passes."""
        n, m = self.weights, residuals
        size, rows = (n, min(m, self.block)) if space == PARAMETERS else (m, m)
        scalars = _MATRICES * size * size + rows * self._row(space)
        return int(scalars * self.dtype.size)

    @property
    def block(self) -> int:
        """Number of rows of K per block in the space of parameters."""
        # About `max(n, 256)`: small blocks stay in the processor's cache, but
        # with fewer than n rows, adding `K^T K` to the sum takes as long as
        # computing it. Multiply by `2 n / (2 n + activations)`: activations
        # need memory and time as well. Without trainable weights, n is 0.
        scalars = max(2 * self.weights + self.activations, 1)
        fraction = 2 * self.weights / scalars
        rows = int(max(self.weights, _MIN_BLOCK_ROWS) * fraction)
        return max(rows // self.outputs, 1) * self.outputs

    def space(self, solve: str, residuals: int) -> str:
        """Return `solve`; for "auto", the smaller space that fits in memory."""
        if solve != AUTO:
            return solve
        is_small = residuals < self.weights
        first, second = (RESIDUALS, PARAMETERS)[:: 1 if is_small else -1]
        if self.allows(second, residuals) and not self.allows(first, residuals):
            return second
        return first

    def allows(self, space: str, residuals: int) -> bool:
        """True if a step is within the memory limit."""
        return self.peak_bytes(space, residuals) <= self.max_bytes

    def max_residuals(self) -> int:
        """Upper bound of m in the space of residuals: `a m^2 + b m <= c`."""
        a, b = _MATRICES, self._row(RESIDUALS)
        c = self.max_bytes // self.dtype.size
        return (math.isqrt(b * b + 4 * a * c) - b) // (2 * a)

    def check_residuals(self, residuals: tf.Tensor) -> tf.Operation:
        """Raise at run time if a step in residuals exceeds the memory limit."""
        m = tf.cast(residuals, tf.int64)
        scalars = _MATRICES * m * m + m * self._row(RESIDUALS)
        size, unit = unit_of(self.max_bytes)
        need = tf.cast(self.dtype.size * scalars, tf.float64) / size
        prefix, suffix = self.refusal(RESIDUALS, _NEED).split(_NEED)
        pieces = [prefix, tf.strings.as_string(need, 2), f" {unit}", suffix]
        return refuse(m > self.max_residuals(), tf.strings.join(pieces))

    def _row(self, space: str) -> int:
        """Return the number of scalars in memory per row of K."""
        return _COPIES[space] * self.weights + self.activations

    def refusal(self, space: str, need: str) -> str:
        """Return the error message for a step that is too large."""
        smaller = (
            "`batch_size` (with fewer residuals than weights, a step is "
            "solved in the space of residuals)"
            if space == PARAMETERS
            else "`batch_size`"
        )
        return (
            f"A step of `GaussNewton` in the space of {space} takes {need} "
            f"for {self.weights:,} weights, more than `max_bytes`, "
            f"{bytes_text(self.max_bytes)}. Use a smaller {smaller} or model, "
            "a larger `max_bytes`, or `tfkfac.KFAC`, which needs no matrix of "
            "all weights."
        )


def choose_solve_spaces(
    limits: Limits, solve: str, residuals: int | None, only: str | None
) -> tuple[str, ...]:
    """Choose the space in which a step is solved; both if chosen at run time.

    `residuals` is None if not static; `only` is from `why_only_parameters`.
    """
    if only is not None:
        if solve == RESIDUALS:
            raise ValueError(
                f'Argument `solve` must be "auto" or "parameters" {only}. '
                f"Received: solve={solve!r}"
            )
        solve = PARAMETERS
    if solve == AUTO and residuals is None:
        if limits.allows(PARAMETERS, limits.block):
            return RESIDUALS, PARAMETERS
        return (RESIDUALS,)  # memory is checked at run time
    space = limits.space(solve, residuals or 0)
    if residuals is None and space == PARAMETERS:
        residuals = limits.block
    if residuals is not None and not limits.allows(space, residuals):
        need = bytes_text(limits.peak_bytes(space, residuals))
        raise ValueError(limits.refusal(space, need))
    return (space,)
