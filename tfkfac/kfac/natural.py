"""Natural-gradient steps: precondition and clip the gradients.

A gradient is preconditioned as a matrix, or as rows (a, g) with `W = a^T g`.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.blocks import Block, LayerGradient, MatrixGradient, RowGradient
from tfkfac.blocks.embedding import EmbeddingBlock, PositionEmbeddingBlock
from tfkfac.blocks.registry import Registry
from tfkfac.compat.functions import shared_call, when
from tfkfac.compat.models import replica_variable
from tfkfac.compat.optimizers import is_decayed, knows_variable
from tfkfac.factors import Limit
from tfkfac.kfac.active import ActiveBlock
from tfkfac.kfac.length import Batch
from tfkfac.kfac.placement import Exchange, Placement
from tfkfac.kfac.scales import Moments
from tfkfac.kfac.state import (
    HINT_STEP,
    LOW_FACTOR,
    LOW_SCALED_FACTOR,
    MIN_CLIPPED,
    Clip,
    Counters,
    State,
    StepReport,
)
from tfkfac.linalg.tensors import stack_scalars
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.training.guards import count_each
from tfkfac.training.step import Gradients, Step

# Embedding blocks: no spectral steps, no hint at the scale of the inputs.
TABLES = (EmbeddingBlock, PositionEmbeddingBlock)


class Preconditioned(NamedTuple):
    """Preconditioned gradient P of a block, before the clip."""

    layer: ActiveBlock
    gradient: LayerGradient
    """P; in spectral steps the direction D."""
    product: tf.Tensor
    """`<P, W>`; in spectral steps `|Q|^2`. The squared Fisher length of P."""
    valid: tf.Tensor
    """Scalar bool, False if P was invalid and is replaced by W."""


class Natural:
    """Steps along the preconditioned gradient, bounded by `kl_clip`.

    Attributes:
        title: Suffix of the title of the summary.
        summed_scalars: Number of scalars that `scalars` returns.
        without_loss: Sentence of the warning where the loss is unknown.
        has_product: True if `<P, W>` of row gradients is computed.
        extra_scalars: Number of scalars sent with each direction.
        dense_limit: Limit of the factors of dense layers at the default
            `max_factor_dim`. None for that of other layers.
    """

    title = ""
    summed_scalars = 0
    without_loss = (
        "If it is a sum, or a mean over tokens or pixels, steps are far too "
        "short or too long."
    )
    has_momenta = False
    has_product = True
    extra_scalars = 0
    excluded_blocks: tuple[type[Block], ...] = ()
    dense_limit: Limit | None = None

    def __init__(
        self,
        damping: Hyperparameter,
        clip: Hyperparameter,
        momentum: float | None,
        weight_decay: float | None,
    ) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.damping = damping
        self._clip = clip

    def plain_matrices(
        self, registry: Registry
    ) -> list[tuple[str, keras.Variable]]:
        """Path and variable of each uncovered matrix that this rule trains."""
        return []

    # ------------------------------------------------------------ the step
    def read(
        self, step: Step, advise: Callable[[str, str], None], micro_batches: int
    ) -> Batch | None:
        """Return the batch values that `gradients` needs; None by default."""
        return None

    def moments(
        self, step: Step, layers: Sequence[ActiveBlock]
    ) -> Moments | None:
        """Return the sums from which the unit of the loss follows, or None."""
        return None

    def scalars(self, step: Step, batch: Batch | None) -> list[tf.Tensor]:
        """Return scalars to sum over the workers; `gradients` gets the sums."""
        return []

    def takes_rows(self, workers: int) -> bool:
        """True if gradients may be kept as rows with this number of workers."""
        return True

    def directions(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        exchange: Exchange,
        damping: tf.Tensor,
    ) -> list[Preconditioned]:
        """Compute the directions of the blocks, before scaling."""
        row_layers = [layer for layer in layers if layer.rows is not None]
        dense_layers = [layer for layer in layers if layer.rows is None]
        return [
            *precondition_rows(row_layers, step, damping),
            *precondition_matrices(dense_layers, step, exchange, damping),
        ]

    def gradients(
        self,
        directions: Sequence[Preconditioned],
        step: Step,
        state: State,
        damping: tf.Tensor,
        batch: Batch | None,
        sums: Sequence[tf.Tensor],
    ) -> Gradients:
        """Return the gradients for the inner optimizer.

        `sums` are the sums of `scalars` over the workers.
        """
        gradients = self._clipped(directions, step, state, damping)
        if self.weight_decay:
            rate = step.job.inner_optimizer.learning_rate
            for i in decayed(gradients, step):
                w = replica_variable(step.variables[i])
                w.assign_sub(tf.cast(rate * self.weight_decay, w.dtype) * w)
        return gradients

    def _clipped(
        self,
        directions: Sequence[Preconditioned],
        step: Step,
        state: State,
        damping: tf.Tensor,
    ) -> Gradients:
        """Return the gradients with the clipped directions."""
        if not directions:
            return step.gradients
        products = [direction.product for direction in directions]
        rate = step.job.inner_optimizer.learning_rate
        limit = None
        if self._clip.get() is not None:
            limit = self._clip.at(step.job.clock)
        clip = clip_step(products, limit, rate)
        optimizer, hint_rate = step.job.inner_optimizer, None
        if limit is not None and isinstance(optimizer, keras.optimizers.SGD):
            hint_rate = rate
        hint_due = state.report.record(clip, damping, hint_rate)
        layers, limit = [x.layer for x in directions], self._clip.get()
        when(hint_due, lambda: hint_at_clip(layers, step, state.report, limit))
        return replace_gradients(directions, clip.factor, step.gradients)

    # --------------------------------------------------- binding and state
    def bytes(self, placement: Placement, rank: int) -> dict[str, int]:
        """Return the bytes of the state that this rule adds, by name."""
        return {}


def is_vector(variable: keras.Variable) -> bool:
    """True for biases, norm scales and offsets, which do not decay.

    Biases of attention and of `GRU`s have two axes.
    """
    name = variable.name
    is_named = "bias" in name or name in ("gamma", "beta", "scale")
    return is_named or len(variable.shape) < 2


def decayed(gradients: Gradients, step: Step) -> list[int]:
    """Return the indices of the weights that `weight_decay` reduces."""
    inner = step.job.inner_optimizer
    return [
        i
        for i, (g, v) in enumerate(zip(gradients, step.variables, strict=True))
        if g is not None and knows_variable(inner, v) and not is_vector(v)
        if is_decayed(inner, v)
    ]


# Loss in nats per term above which no hint is printed, because many clipped
# steps are normal: of 14 healthy runs, only an autoencoder had clipped steps.
_HIGH_LOSS = 20.0
_MAX_INPUT_RMS = 3.0  # RMS of inputs above which a hint is printed


def hint_at_clip(
    layers: Sequence[ActiveBlock], step: Step, report: StepReport, limit: Any
) -> None:
    """Print the likely cause if the clip shortens most of the first steps."""
    head = "kl_clip has left less than {:.0%} of most of the first {} steps. "
    names = [step.job.name]
    path, is_far = far_inputs(layers)
    message = (
        f"{head.format(LOW_SCALED_FACTOR, HINT_STEP)}The inputs of layer "
        f"'{path}' are far from unit scale: normalise the inputs of the model, "
        'or try KFAC(fisher="monte_carlo").'
    )
    count_each(is_far, report.hints, names, message)
    loss = tf.math.divide_no_nan(step.weighted_loss(), step.loss.unit)
    is_low = step.group.size * loss < _HIGH_LOSS
    hint = f", KFAC(kl_clip={limit / 4:g})," if isinstance(limit, float) else ""
    message = (
        f"{head.format(LOW_FACTOR, HINT_STEP)}Try a smaller one{hint} or a "
        "larger damping; see `optimizer.last_step`."
    )
    is_limited = (report.clipped >= MIN_CLIPPED) & is_low & ~is_far
    count_each(is_limited, report.hints, names, message)


def far_inputs(layers: Sequence[ActiveBlock]) -> tuple[str, tf.Tensor]:
    """Return the path of the first layer, and True if its inputs are large."""
    # `order` is largest for the first layer, where the backward pass ends.
    first = max(layers, key=lambda layer: max(r.order for r in layer.records))
    inputs, block = first.records[-1].inputs, first.block
    has_scale = "A" in block.factors and not isinstance(block, TABLES)
    is_far = tf.constant(False)
    # Skip sparse tensors, which have no elementwise square.
    if has_scale and isinstance(inputs, tf.Tensor) and inputs.dtype.is_floating:
        squares = tf.square(tf.cast(inputs, tf.float32))
        is_far = tf.sqrt(tf.reduce_mean(squares)) > _MAX_INPUT_RMS
    return block.path, is_far


def clip_step(
    products: Sequence[tf.Tensor], kl_clip: tf.Tensor | None, learning_rate: Any
) -> Clip:
    """Return the clip `nu = min(1, sqrt(kl_clip / (lr^2 |sum <P, W>|)))`.

    `lr^2 <P, W>` is the squared length of a step in the Fisher metric, about
    twice the change of the model's predictions in nats (Distributed K-FAC,
    eq. 16). `products` has `<P, W>` per block. The clip is 1 if the length is 0
    or `kl_clip` is None.
    """
    total = tf.abs(tf.reduce_sum(stack_scalars(products)))
    length = tf.square(tf.cast(learning_rate, tf.float64)) * total
    if kl_clip is None:
        return Clip(tf.ones_like(length), length)
    ratio = tf.sqrt(tf.math.divide_no_nan(tf.cast(kl_clip, tf.float64), length))
    factor = tf.where(length > 0, tf.minimum(ratio, 1.0), 1.0)
    return Clip(factor, length)


def precondition_matrices(
    layers: Sequence[ActiveBlock],
    step: Step,
    exchange: Exchange,
    damping: tf.Tensor,
) -> list[Preconditioned]:
    """Precondition dense gradients; P is bitwise equal on all workers.

    All workers have the reduced W. Workers with the decomposition of a block
    compute its P and send it to the others.
    """
    plain, preconditioned = matrix_pairs(layers, step)
    positions = [layer.position for layer in layers]
    pairs = zip(positions, preconditioned, strict=True)
    local = {i: [P] for i, P in pairs if P is not None}
    received = exchange.share_gradients(step.group, local, positions)
    results = []
    for layer, W in zip(layers, plain, strict=True):
        P, product, valid = shared_call(
            "check",
            _check_matrices,
            W,
            received[layer.position][0],
            damping,
            any_size=True,
        )
        P.set_shape(layer.block.gradient_shape)
        results.append(Preconditioned(layer, MatrixGradient(P), product, valid))
    return results


def matrix_pairs(
    layers: Sequence[ActiveBlock], step: Step
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Return W and P of each block; P is None without a local decomposition."""
    scales = _cast(_reciprocal(step.loss.unit), layers)
    plain: list[tf.Tensor] = []
    preconditioned: list[tf.Tensor | None] = []
    for layer, scale in zip(layers, scales, strict=True):
        block, decomposition = layer.block, layer.state.decomposition
        gradients = [step.gradients[i] for i in layer.indices]
        matrix = shared_call(
            _form_key("matrix", block), block.to_matrix, gradients
        )
        if decomposition is None:
            W, P = matrix * scale, None
        else:
            W, P = decomposition.precondition(matrix, scale)
            P.set_shape(block.gradient_shape)
        W.set_shape(block.gradient_shape)
        plain.append(W)
        preconditioned.append(P)
    return plain, preconditioned


def _form_key(target: str, block: Block) -> Hashable:
    """Return the cache key for conversions of gradients to `target`."""
    return None if block.form is None else (target, block.form)


def precondition_rows(
    layers: Sequence[ActiveBlock], step: Step, damping: tf.Tensor
) -> list[Preconditioned]:
    """Precondition row gradients; every worker is a gradient worker.

    P is linear in the gradient: each worker preconditions and checks its local
    gradient, and the results are summed.
    """

    def compute(layer: ActiveBlock, W: LayerGradient) -> tuple[Any, ...]:
        return check(W, layer.precondition(W), damping)

    rows = [scale_rows(layer, step) for layer in layers]
    results = [
        Preconditioned(layer, *result)
        for layer, result in zip(
            layers, apply_cheaper(compute, layers, rows), strict=True
        )
    ]
    if step.group.size == 1 or not layers:
        return results
    sums = step.group.all_reduce([x.gradient.matrix for x in results])
    gradients = [MatrixGradient(total) for total in sums]
    pairs = zip(rows, gradients, strict=True)
    products = step.group.all_reduce([W.inner(P) for W, P in pairs])
    return [
        x._replace(gradient=P, product=product)
        for x, P, product in zip(results, gradients, products, strict=True)
    ]


def apply_cheaper(
    compute: Callable[[ActiveBlock, LayerGradient], tuple[Any, ...]],
    layers: Sequence[ActiveBlock],
    rows: Sequence[RowGradient],
) -> list[tuple[Any, ...]]:
    """Call `compute` with the cheaper form of each gradient: rows or matrix.

    `compute` returns a gradient, followed by tensors.
    """
    results: dict[int, tuple[Any, ...]] = {}
    undecided: dict[int, list[int]] = {}
    for i, (layer, W) in enumerate(zip(layers, rows, strict=True)):
        num_rows = W.a.shape[0]
        if num_rows is None:
            # Round down to a power of two: similar blocks share a branch.
            limit = 1 << (layer.row_limit.bit_length() - 1)
            undecided.setdefault(limit, []).append(i)
        elif num_rows <= layer.row_limit:
            results[i] = compute(layer, W)
        else:
            results[i] = compute(layer, MatrixGradient(W.matrix))
    for limit, group in undecided.items():
        pairs = [(layers[i], rows[i]) for i in group]
        results.update(
            zip(group, _apply_at_runtime(compute, pairs, limit), strict=True)
        )
    return [results[i] for i in range(len(layers))]


def _apply_at_runtime(
    compute: Callable[[ActiveBlock, LayerGradient], tuple[Any, ...]],
    pairs: Sequence[tuple[ActiveBlock, RowGradient]],
    limit: int,
) -> list[tuple[Any, ...]]:
    """Choose rows or matrices at run time, by the number of rows."""

    def by_rows() -> list[tuple[Any, ...]]:
        results = [compute(layer, W) for layer, W in pairs]
        return [(P.matrix, *tensors) for P, *tensors in results]

    def by_matrices() -> list[tuple[Any, ...]]:
        results = [compute(x, MatrixGradient(W.matrix)) for x, W in pairs]
        return [(P.matrix, *tensors) for P, *tensors in results]

    counts = tf.stack([tf.shape(W.a)[0] for _, W in pairs])
    results = tf.cond(tf.reduce_max(counts) <= limit, by_rows, by_matrices)
    return [(MatrixGradient(matrix), *tensors) for matrix, *tensors in results]


def scale_rows(layer: ActiveBlock, step: Step) -> RowGradient:
    """Divide rows by the unit of the loss; weight them by `step.share`."""
    rows = layer.rows
    assert rows is not None
    scale, share = _reciprocal(step.loss.unit), step.share
    if share is None:
        return rows.scaled(scale)
    # Without terms (share 0), replace `a` and `g` by 0: they may be NaN.
    nonzero = tf.cast(share > 0, rows.a.dtype)
    return RowGradient(
        tf.math.multiply_no_nan(rows.a, nonzero),
        tf.math.multiply_no_nan(rows.g, tf.cast(share * scale, rows.g.dtype)),
    )


def _reciprocal(unit: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(tf.ones_like(unit), unit)


def _cast(scalar: tf.Tensor, layers: Sequence[ActiveBlock]) -> list[tf.Tensor]:
    """Cast a scalar to the dtype of each block; one operation per dtype."""
    dtypes = [layer.block.dtype for layer in layers]
    casts = {dtype: tf.cast(scalar, dtype) for dtype in set(dtypes)}
    return [casts[dtype] for dtype in dtypes]


def replace_gradients(
    directions: Sequence[Preconditioned],
    factor: tf.Tensor,
    gradients: Gradients,
) -> Gradients:
    """Replace the gradients of the blocks by `factor` times their direction."""
    replaced = list(gradients)
    factors = _cast(factor, [direction.layer for direction in directions])
    for direction, scale in zip(directions, factors, strict=True):
        layer, P = direction.layer, direction.gradient
        if isinstance(P, MatrixGradient):
            new = shared_call(
                _form_key("weights", layer.block),
                functools.partial(_scaled_weights, layer.block),
                P.value,
                scale,
            )
        else:
            new = layer.block.from_gradient(P.scaled(scale))
        for i, gradient in zip(layer.indices, new, strict=True):
            replaced[i] = gradient
    return replaced


def _scaled_weights(
    block: Block, matrix: tf.Tensor, factor: tf.Tensor
) -> list[tf.Tensor]:
    """Convert `factor` times a gradient matrix to gradients of the weights."""
    return block.from_gradient(MatrixGradient(matrix).scaled(factor))


# P is valid if `|P| <= _SLACK |W| / min(damping, 1)^2`. The slack allows for a
# damping that has grown since the last inverse update.
_SLACK = 1e6


def check(
    W: LayerGradient, P: LayerGradient, damping: tf.Tensor
) -> tuple[LayerGradient, tf.Tensor, tf.Tensor]:
    """Fall back to the plain gradient if the preconditioned one is invalid.

    Each eigenvalue of a damped Fisher block is at least the damping, or its
    square if both factors get the whole damping. So
    `|P| <= |W| / min(damping, 1)^2`.

    Returns:
        P if valid, else W; the product `<P, W>`; a scalar bool, True if P is
        valid.
    """
    size, plain_size = (tf.cast(x.bound(), tf.float64) for x in (P, W))
    ratio = tf.minimum(damping, 1.0) ** 4  # squared bound: `size` is |P|^2
    valid = tf.math.is_finite(size) & (size * ratio <= _SLACK**2 * plain_size)
    P = P.where(valid, W)
    return P, W.inner(P), valid


def _check_matrices(
    W: tf.Tensor, P: tf.Tensor, damping: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Apply `check` to the matrices W and P of one block."""
    gradient, product, valid = check(
        MatrixGradient(W), MatrixGradient(P), damping
    )
    return gradient.matrix, product, valid


def count_invalid(counters: Counters, blocks: Sequence[Preconditioned]) -> None:
    """Count invalid preconditioned gradients; request inverse updates."""
    valid = {x.layer.position: x.valid for x in blocks}
    invalid = tf.logical_not(counters.flags(valid))
    count_each(
        invalid,
        counters.plain,
        counters.paths,
        "the preconditioned gradient is not finite or far too long, the plain "
        "one takes its place; the next step decomposes the factors anew.",
    )
    counters.request_decomposition(invalid)
