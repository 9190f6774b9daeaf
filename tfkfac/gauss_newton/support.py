"""Models and batches that no exact step can be made for, with reasons.

What has no residuals of single examples is refused by name, what is too large
by its bytes.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.capture.walk import walk
from tfkfac.compat.losses import loss_function
from tfkfac.fisher.distributions import output_of
from tfkfac.gauss_newton.jacobian import block_examples
from tfkfac.loss.batch import changed_layers
from tfkfac.loss.terms import LossTerms
from tfkfac.shell.model import uses_xla
from tfkfac.shell.tables import bytes_text, unit_of
from tfkfac.training.guards import refuse

_INSTEAD = "Leave it out, or use `tfkfac.KFAC` or another optimizer."


def check_model(model: keras.Model) -> None:
    """Refuses what can be seen before the first step.

    Raises:
        ValueError: If the loss is not compiled losses of the outputs and L2
            penalties alone, or computed in half precision.
    """
    if type(model).compute_loss is not keras.Model.compute_loss:
        raise ValueError(
            f"Model '{model.name}' has a `compute_loss` of its own. "
            "`GaussNewton` needs the residuals: let the model return what the "
            "equations say, the labels be their right-hand sides, and use "
            'loss="mse".'
        )
    for node in walk(model):
        dtype = tf.as_dtype(node.layer.compute_dtype)
        if dtype.is_floating and dtype.size < 4:
            raise ValueError(
                f"Layer '{node.layer.name}' computes in {dtype.name}. "
                "`GaussNewton` needs float32 or float64: residuals in half "
                "precision have no digits that its steps could lower."
            )
    for variable in model.trainable_variables:
        l2_of(variable)
        if variable.constraint is not None:
            raise ValueError(
                f"Variable '{variable.path}' has a constraint, which "
                f"`GaussNewton` does not know in its steps. {_INSTEAD}"
            )


def train_without_xla(model: keras.Model) -> None:
    """Turns XLA off, which Keras turns on where there is a GPU, and says so."""
    if not uses_xla(model):
        return
    warnings.warn(
        "XLA compiles neither the rows of a Jacobian of second derivatives "
        "nor TensorFlow's least squares, which `GaussNewton` needs. Model "
        f"'{model.name}' trains with jit_compile=False.",
        stacklevel=2,
    )
    model.jit_compile = False


def l2_of(variable: keras.Variable) -> float:
    """The factor of a variable's L2 penalty, 0 if there is none.

    Raises:
        ValueError: If it has another regulariser.
    """
    own = variable.regularizer
    if own is None:
        return 0.0
    is_l2 = type(own) is keras.regularizers.L2
    if not is_l2 and (type(own) is not keras.regularizers.L1L2 or own.l1 > 0):
        raise ValueError(
            f"Variable '{variable.path}' has the regulariser "
            f"{type(own).__name__}. `GaussNewton` knows "
            "`keras.regularizers.L2` alone, which is a sum of squares."
        )
    return float(own.l2)


def check_call(
    model: keras.Model, call: ForwardCall, terms: Sequence[LossTerms]
) -> None:
    """Refuses what shows when the model is called.

    Raises:
        ValueError: If examples are not treated each by itself and the same
            in every call, or a loss is not a sum of squares to second order.
    """
    for leaf in keras.tree.flatten((call.args, call.kwargs)):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise ValueError(
                f"Model '{model.name}' has an input that is sparse or ragged, "
                "of which `GaussNewton` cannot take single examples. "
                f"Received: {leaf}"
            )
    changed_by_training, losing = changed_layers(model, call)
    for name in losing:
        raise ValueError(
            f"Layer '{name}' of model '{model.name}' adds a loss, whose "
            "residuals `GaussNewton` does not see. Let the model return "
            "them as another output, with a loss of its own."
        )
    for changed in changed_by_training:
        raise ValueError(
            f"Layer '{changed}' of model '{model.name}' changes its state in "
            "training, as batch statistics and dropout do: its outputs are "
            "not those of single examples. `GaussNewton` needs residuals "
            f"that are. {_INSTEAD}"
        )
    returned = {id(t): t for t in keras.tree.flatten(call.outputs)}
    for one in terms:
        output = output_of(one)
        if isinstance(output, str):
            raise ValueError(
                f"`GaussNewton` needs a loss that is a sum of squares, or a "
                f"negative log-likelihood, but {output}. Absolute and Huber "
                'errors have no curvature to step by. Use loss="mse" or a '
                "cross-entropy, or declare the distribution of your own by "
                "`tfkfac.register_distribution`."
            )
        predictions = output.predictions
        if id(predictions) not in returned:
            raise ValueError(
                f"A loss of model '{model.name}' is not of what a call of the "
                "model returned. Compute it with `model.compute_loss(x=x, "
                "y=y, y_pred=model(x, training=True))`, as Keras' "
                "`train_step` does."
            )
        assert one.call is not None
        exact = any(v.dtype == "float64" for v in model.trainable_variables)
        if exact and (loss := one.call.loss).dtype != "float64":
            warnings.warn(
                f"Loss '{loss.name}' of model '{model.name}' is computed in "
                f"{loss.dtype}, whose rounding ends the steps, though weights "
                "are float64. Call `keras.config.set_floatx('float64')` first, "
                'or compile with a loss of `dtype="float64"`.',
                stacklevel=2,
            )
        if not predictions.shape[1:].is_fully_defined():
            raise ValueError(
                "`GaussNewton` needs a fixed number of outputs for each "
                f"example. Received: outputs of shape {predictions.shape} of "
                f"model '{model.name}'."
            )


def why_only_parameters(
    model: keras.Model, replicas: int, terms: Sequence[LossTerms] = ()
) -> str | None:
    """Why a step cannot be solved in the space of residuals, or None."""
    if replicas > 1:
        return (
            "with several replicas, each of which has residuals of its own. "
            "Their squares of Jacobians are what can be added up"
        )
    for variable in model.trainable_variables:
        if variable.regularizer is not None:
            return (
                "where weights have a regulariser, which is a residual for "
                f"each of them, as that of '{variable.path}'"
            )
    for one in terms:
        divergence = keras.losses.kl_divergence
        if one.call and loss_function(one.call.loss) is divergence:
            return (
                "where a loss is a Kullback-Leibler divergence. Use "
                '"categorical_crossentropy", which differs by a constant'
            )
    return None


PARAMETERS, RESIDUALS, AUTO = "parameters", "residuals", "auto"
SPACES = (AUTO, PARAMETERS, RESIDUALS)
# Most bytes of a step where the user says nothing.
MOST_BYTES = 2**31
# Matrices of the smaller size: the sum, its damped copy, the factor.
_MATRICES = 3
# Copies of a row: its parts, and joined; all rows at once are scaled, too.
_COPIES = {PARAMETERS: 2, RESIDUALS: 3}
# Numbers that a backward pass may keep: 64 MiB in float64.
KEPT = 2**23
# Where a text has the bytes that only a run knows.
_NEED = "{}"


class Limits(NamedTuple):
    """Sizes of a step."""

    weights: int  # number, n
    dtype: tf.DType  # of the matrices
    most: int  # bytes
    outputs: int = 1  # of an example
    activations: int = 0  # of an example, once for each output

    def bytes(self, space: str, residuals: int) -> int:
        """Bytes of a step at work, the model's passes for its rows included."""
        n, m = self.weights, residuals
        size, rows = (n, min(m, self.block)) if space == PARAMETERS else (m, m)
        numbers = _MATRICES * size * size + rows * self._row(space)
        return int(numbers * self.dtype.size)

    @property
    def block(self) -> int:
        """Rows that are made at once in the space of parameters."""
        examples = block_examples(self.weights, self.outputs, self.activations)
        return examples * self.outputs

    @property
    def pass_examples(self) -> int:
        """Examples of one backward pass, so that it keeps few numbers."""
        return max(KEPT // max(self.activations, 1), 1)

    def space(self, solve: str, residuals: int) -> str:
        """The space for a number of residuals: the smaller that is allowed."""
        if solve != AUTO:
            return solve
        few = residuals < self.weights
        first, second = (RESIDUALS, PARAMETERS)[:: 1 if few else -1]
        if self.allows(second, residuals) and not self.allows(first, residuals):
            return second
        return first

    def allows(self, space: str, residuals: int) -> bool:
        """True if a step has the bytes that it needs."""
        return self.bytes(space, residuals) <= self.most

    def most_residuals(self) -> int:
        """The largest number m that can be solved for in their own space.

        It is the largest with `a m^2 + b m <= c`.
        """
        a, b = _MATRICES, self._row(RESIDUALS)
        c = self.most // self.dtype.size
        return (math.isqrt(b * b + 4 * a * c) - b) // (2 * a)

    def check_residuals(self, residuals: tf.Tensor) -> tf.Operation:
        """Refuses a number of residuals in their own space when it is known."""
        m = tf.cast(residuals, tf.int64)
        numbers = _MATRICES * m * m + m * self._row(RESIDUALS)
        size, unit = unit_of(self.most)
        need = tf.cast(self.dtype.size * numbers, tf.float64) / size
        before, after = self.refusal(RESIDUALS, _NEED).split(_NEED)
        text = [before, tf.strings.as_string(need, 2), f" {unit}", after]
        return refuse(m > self.most_residuals(), tf.strings.join(text))

    def _row(self, space: str) -> int:
        """Numbers of a row while it is made."""
        return _COPIES[space] * self.weights + self.activations

    def refusal(self, space: str, need: str) -> str:
        """Why a step is too large, and what to do."""
        smaller = (
            "`batch_size` (a step on fewer residuals than weights is solved "
            "for these)"
            if space == PARAMETERS
            else "`batch_size`"
        )
        return (
            f"A step of `GaussNewton` in the space of {space} takes {need} "
            f"for {self.weights:,} weights, more than `max_bytes`, "
            f"{bytes_text(self.most)}. Use a smaller {smaller} or model, "
            'another `max_bytes`, or `tfkfac.KFAC(step="quadratic")`, which '
            "makes no matrix of all weights."
        )


def choose_spaces(
    limits: Limits, solve: str, residuals: int | None, only: str | None
) -> tuple[str, ...]:
    """The space of a step, or both if its batch decides when it runs.

    Raises:
        ValueError: If none will do.
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
        return (RESIDUALS,)  # the number is checked when it is known
    space = limits.space(solve, residuals or 0)
    if residuals is None and space == PARAMETERS:
        residuals = limits.block
    if residuals is not None and not limits.allows(space, residuals):
        need = bytes_text(limits.bytes(space, residuals))
        raise ValueError(limits.refusal(space, need))
    return (space,)
