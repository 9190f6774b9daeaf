"""Hessian-vector products of Keras models, and the Lanczos iteration."""

import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.checks import check_count
from tfkfac.compat.models import compiled_loss, loss_takes_training
from tfkfac.curvature.hessian import flat_space, hessian_operator
from tfkfac.linalg.lanczos import Lanczos, Product, random_vector, ritz_pairs
from tfkfac.linalg.vectors import padded_size
from tfkfac.loss.batch import LossTap, training_call

__all__ = ["hessian_vector_product", "lanczos"]


def lanczos(
    matvec: Product,
    size: int,
    steps: int,
    start_vector: Any = None,
    seed: int = 0,
    num_largest: int | None = None,
    num_smallest: int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute extreme eigenpairs of a symmetric operator.

    Runs `steps` Lanczos iterations (FOSI, Sivan et al., 2023, algorithm 1 and
    appendix). Each product is orthogonalised against the last two vectors and
    then against the whole basis, in float32. The tridiagonal matrix is
    float64.

    If the Krylov space is exhausted early (an operator of low rank or with
    repeated eigenvalues), the iteration continues from a random vector, which
    takes one of the steps.

    >>> H = tf.linalg.diag([3.0, 1.0, -2.0])
    >>> values, vectors = tfkfac.curvature.lanczos(
    ...     lambda v: tf.linalg.matvec(H, v), 3, 3,
    ...     num_largest=1, num_smallest=1)

    Works eagerly and inside a `tf.function`, where `matvec` is traced once.

    Args:
        matvec: Function from a float32 tensor `(size,)` to the product of the
            operator with it.
        size: Size of the operator.
        steps: Number of products.
        start_vector: Start vector `(size,)`. A float64 tensor makes the whole
            iteration float64. Defaults to None, for a random vector.
        seed: Seed of the random vectors. Defaults to 0.
        num_largest: Number of pairs from the upper end. Defaults to None, for
            10, or fewer if `steps` or `size` is smaller.
        num_smallest: Number of pairs from the lower end. Defaults to 0.

    Returns:
        Ritz values `(num_smallest + num_largest,)`, ascending, and Ritz
        vectors `(size, num_smallest + num_largest)` as columns. Pairs that
        were not found are zero.

    Raises:
        TypeError: If `matvec` is not a function.
        ValueError: If another argument is invalid.
    """
    check_count("size", size, 1)
    check_count("steps", steps, 1)
    check_count("num_smallest", num_smallest, 0)
    max_pairs = min(steps, size)
    if num_largest is None:
        num_largest = max(min(10, max_pairs - num_smallest), 0)
    check_count("num_largest", num_largest, 0)
    if not 0 < num_largest + num_smallest <= max_pairs:
        raise ValueError(
            "Arguments `num_largest` and `num_smallest` must add up to "
            "between 1 and the smaller of `steps` and `size`. Received: "
            f"num_largest={num_largest}, num_smallest={num_smallest}, "
            f"steps={steps}, size={size}"
        )
    if not callable(matvec):
        raise TypeError(
            f"Argument `matvec` must be a function. Received: matvec={matvec!r}"
        )
    check_count("seed", seed, 0)
    if start_vector is None:
        start = random_vector(size, seed, 0)
    else:
        is_tensor = tf.is_tensor(start_vector)
        is_float64 = is_tensor and start_vector.dtype == tf.float64
        dtype = tf.float64 if is_float64 else tf.float32
        start = as_numbers("start_vector", start_vector, dtype)
        if start.shape != (size,):
            raise ValueError(
                f"Argument `start_vector` must have shape ({size},). "
                f"Received: start_vector of shape {start.shape}"
            )
        # Normalise: squares of very small or large elements overflow float32.
        start = tf.math.divide_no_nan(start, tf.reduce_max(tf.abs(start)))
    padding = [[0, padded_size(size) - size]]

    def product(vector: tf.Tensor) -> tf.Tensor:
        image = tf.convert_to_tensor(matvec(vector[:size]))
        return tf.pad(tf.reshape(tf.cast(image, vector.dtype), [size]), padding)

    def draw(index: tf.Tensor) -> tf.Tensor:
        vector = random_vector(size, seed, index + 1)
        return tf.pad(tf.cast(vector, start.dtype), padding)

    state = Lanczos(product, size, draw).run(tf.pad(start, padding), steps)
    pairs = ritz_pairs(state.tridiagonal, num_largest, num_smallest)
    values, weights = (tf.cast(x, start.dtype) for x in pairs)
    return values, tf.transpose(tf.matmul(weights, state.basis)[:, :size])


def hessian_vector_product(
    model: keras.Model, x: Any, y: Any, vectors: Any, sample_weight: Any = None
) -> Any:
    """Multiply the Hessian of a model's compiled loss by vectors.

    The loss equals the loss of `fit` on this batch: all outputs with their
    weights, regularizers and added losses, in training mode. The call does not
    change the model's state (moving averages, random seeds, metrics). All
    vectors have the same dropout mask. Second derivatives of normalisation
    layers are exact; TensorFlow's own second derivatives are not.

    >>> n = model.count_params()
    >>> values, vectors = tfkfac.curvature.lanczos(
    ...     lambda v: tfkfac.curvature.hessian_vector_product(model, x, y, v),
    ...     size=n, steps=20, num_largest=1)

    Args:
        model: A built and compiled model. The Hessian is taken with respect to
            its trainable variables.
        x: Inputs, as for `fit`.
        y: Targets, as for `fit`.
        vectors: A vector `(n,)`, or vectors as the columns of a matrix
            `(n, k)`, where `n` is the number of trainable weights. Weights
            have the order of `model.trainable_variables`, each flattened in
            row-major order. Or a list of arrays with the variables' shapes.
        sample_weight: Weights of the examples. Defaults to None.

    Returns:
        The products, in the form of `vectors`.

    Raises:
        TypeError: If `model` is not a `keras.Model`, or `vectors` not numbers.
        ValueError: If the model is not built and compiled, if shapes do not
            match, or in the scope of a strategy of several replicas.
        NotImplementedError: If an operation of the model has no second
            derivative. The message names the layer.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Argument `model` must be a `keras.Model`. "
            f"Received: model={model} (of type {type(model)})"
        )
    if not model.compiled or not model.built:
        state = "compiled" if model.built else "built"
        raise ValueError(
            "Argument `model` must be a built and compiled model. Received: "
            f"model '{model.name}', which is not {state}."
        )
    variables = model.trainable_variables
    space = flat_space(variables)
    if not variables:
        raise ValueError(
            "Argument `model` must have trainable weights. "
            f"Received: model '{model.name}' without trainable weights."
        )
    as_list = isinstance(vectors, (list, tuple))
    if as_list:
        variable_shapes = [tuple(v.shape) for v in variables]
        vector_shapes = [tuple(np.shape(v)) for v in vectors]
        if variable_shapes != vector_shapes:
            raise ValueError(
                "Argument `vectors` as a list must have the shapes of the "
                f"model's trainable variables, {variable_shapes}. "
                f"Received: shapes {vector_shapes}"
            )
        vectors = space.join([tf.convert_to_tensor(v) for v in vectors])
    columns = as_numbers("vectors", vectors, space.dtype)
    if columns.shape.rank not in (1, 2) or columns.shape[0] != space.size:
        raise ValueError(
            "Argument `vectors` must have shape (n,) or (n, k), where n is the "
            f"number of trainable weights, {space.size}. "
            f"Received: vectors of shape {columns.shape}"
        )
    batch = keras.tree.map_structure(as_batch_tensor, (x, y, sample_weight))
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            "`hessian_vector_product` must be called outside of "
            "`strategy.scope()`, where Keras divides losses by the number of "
            "replicas."
        )
    is_vector = columns.shape.rank == 1
    rows = columns[None] if is_vector else tf.transpose(columns)
    images = _compiled_product(model)(batch, rows)
    if as_list:
        return space.split(images[0])
    return images[0] if is_vector else tf.transpose(images)


_products: weakref.WeakKeyDictionary[
    keras.Model, tuple[tuple[Any, ...], Callable[..., tf.Tensor]]
] = weakref.WeakKeyDictionary()


def _compiled_product(model: keras.Model) -> Callable[..., tf.Tensor]:
    """Return the traced Hessian product; trace again if the model changed."""
    LossTap.open(model)  # before the key is made of `compute_loss`
    variables = tuple(id(v) for v in model.trainable_variables)
    # Cache ids only: references would keep the model alive.
    loss = getattr(model.compute_loss, "__func__", model.compute_loss)
    key = (id(compiled_loss(model)), id(loss), variables)
    cached = _products.get(model)
    if cached is not None and cached[0] == key:
        return cached[1]
    reference = weakref.ref(model)

    @tf.function(autograph=False, reduce_retracing=True)
    def products(batch: Any, rows: tf.Tensor) -> tf.Tensor:
        model = reference()
        assert model is not None
        x, y, weight = batch
        arguments = {"x": x, "y": y, "sample_weight": weight}
        if loss_takes_training(model):
            arguments["training"] = True
        product = hessian_operator(
            model,
            training_call(model, x),
            arguments,
            [tf.identity(v.value) for v in model.trainable_variables],
        )
        if rows.shape[0] == 1:
            return product(rows[0])[None]
        # While tracing, `tf.map_fn` sets a caching device on the default
        # variable scope, and does not reset it after an exception. A strategy
        # could then no longer enter that scope.
        scope = tf.compat.v1.get_variable_scope()
        before = scope.caching_device
        try:
            return tf.map_fn(product, rows)
        finally:
            scope.set_caching_device(before)

    _products[model] = (key, products)
    return products


def as_numbers(name: str, value: Any, dtype: tf.DType) -> tf.Tensor:
    """Convert an argument to a tensor of a floating point dtype."""
    try:
        return tf.cast(value, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Argument `{name}` must be an array of numbers. "
            f"Received: {name} of type {type(value)}"
        ) from error


def as_batch_tensor(leaf: Any) -> tf.Tensor | None:
    """Convert an array of a batch; NumPy's float64 becomes `floatx()`."""
    if leaf is None:
        return None
    if not tf.is_tensor(leaf) and np.asarray(leaf).dtype == np.float64:
        return tf.cast(leaf, keras.config.floatx())
    return tf.convert_to_tensor(leaf)
