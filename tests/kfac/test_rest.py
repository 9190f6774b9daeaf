"""Uncovered weights, their optimizer, and layers without a record."""

import functools
import re
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.small import (
    CLASSES,
    FEATURES,
    LateBuilt,
    Scale,
    data,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    summary_text,
)
from tests.support.summaries import leftovers_of, sequential

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
Decay = keras.optimizers.schedules.PolynomialDecay
STEPS = 4
LABELS = ["left", "right"]


def towers() -> Any:
    """Two models that share only the training step."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    outputs = [
        keras.layers.Dense(CLASSES, name=name)(
            keras.layers.Dense(4, activation="tanh", name=f"{name}_in")(inputs)
        )
        for name in LABELS
    ]
    return keras.Model(inputs, outputs)


def trained(optimizer: Any) -> dict[str, list[np.ndarray]]:
    """Weights of each tower after some steps."""
    model = towers()
    model.compile(optimizer, [loss(), loss()], run_eagerly=True)
    for step in range(STEPS):
        x, y = data(16, step)
        model.train_on_batch(x, [y, y])
    return {
        name: [
            w
            for layer in model.layers
            if layer.name.startswith(name)
            for w in layer.get_weights()
        ]
        for name in LABELS
    }


def test_each_tower_is_trained_as_if_alone() -> None:
    """Each tower trains as if alone with its optimizer."""
    lefts = []
    for make in (
        lambda: SGD(Decay(0.5, 5), 0.9, nesterov=True),
        lambda: Adam(
            0.02,
            weight_decay=0.02,
            clipnorm=0.1,
            use_ema=True,
            ema_overwrite_frequency=3,
        ),
    ):
        ours = trained(
            tfkfac.KFAC(
                step="natural", skip_layers=["right.*"], rest_optimizer=make()
            )
        )
        np.testing.assert_equal(ours["right"], trained(make())["right"])
        lefts.append(ours["left"])
    np.testing.assert_equal(*lefts)


@pytest.mark.parametrize(
    ("inner", "rate"),
    [
        (lambda: SGD(0.2), lambda _: 1e-3),
        (lambda: Decay(0.2, 5, 0.05), Decay(2e-3, 5, 5e-4)),
        (lambda: Adam(Decay(0.02, 5)), Decay(0.02, 5)),
    ],
)
def test_rate_of_the_default_rest_optimizer(inner: Any, rate: Any) -> None:
    """0.001, or 0.01 times the schedule of SGD, or another schedule.

    A constant rate follows that of the inner optimizer.
    """
    model = mlp()
    optimizer = tfkfac.KFAC(inner(), skip_layers=["hidden"])
    model.compile(optimizer, loss(), run_eagerly=True)
    assert type(optimizer.rest_optimizer) is Adam
    for step in range(3):
        got = float(optimizer.rest_optimizer.learning_rate)
        assert got == pytest.approx(float(rate(step)))
        model.train_on_batch(*data(16))
    if not isinstance(rate, Decay):
        optimizer.learning_rate = 0.05
        again = tfkfac.KFAC.from_config(optimizer.get_config())
        for candidate in (optimizer, again):
            got = float(candidate.rest_optimizer.learning_rate)
            assert got == pytest.approx(2.5e-4)


# ---------------------------------------------------------- averaged weights
def averaging(**options: Any) -> Any:
    inner = SGD(0.1, use_ema=True, ema_momentum=0.75)
    return tfkfac.KFAC(inner, skip_layers=["hidden"], **options)


def average_of(weights: list[list[np.ndarray]]) -> list[np.ndarray]:
    """a_1 = w_1 and a_t = 0.75 a_(t-1) + 0.25 w_t."""
    average, *later = weights
    for values in later:
        pairs = zip(average, values, strict=True)
        average = [0.75 * a + 0.25 * w for a, w in pairs]
    return average


def close(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_all_weights_are_averaged(is_scaled: bool) -> None:
    """All weights are averaged alike, in evaluations and at the end."""
    model, (x, y) = mlp(), data(16)
    optimizer = averaging()
    if is_scaled:
        optimizer = tfkfac.LossScaleOptimizer(optimizer)
    model.compile(optimizer, loss(), run_eagerly=True)
    batches: list[Any] = []
    epochs: list[Any] = []
    evaluated: list[Any] = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: batches.append(model.get_weights()),
        on_epoch_end=lambda *_, **__: epochs.append(model.get_weights()),
        on_test_batch_end=lambda *_, **__: evaluated.append(
            model.get_weights()
        ),
    )
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=is_scaled)
    options = {"validation_data": (x, y), "validation_batch_size": 16}
    model.fit(x, y, 8, 2, 0, callbacks=[swap, seen], **options)
    averages = [average_of(batches[:2]), average_of(batches)]
    plain = [batches[1], batches[3]]
    for got, want in zip(evaluated, averages, strict=True):
        close(got, want)
    for got, want in zip(epochs, averages if is_scaled else plain, strict=True):
        close(got, want)
    close(model.get_weights(), averages[1])


def test_the_rest_optimizer_averages_as_the_inner() -> None:
    names = "use_ema", "ema_momentum", "ema_overwrite_frequency"
    inner = functools.partial(SGD, 0.1, use_ema=True, ema_momentum=0.75)
    inner = functools.partial(inner, ema_overwrite_frequency=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rest in (None, "adam"):
            optimizer = tfkfac.KFAC(inner(), rest_optimizer=rest)
            again = tfkfac.KFAC.from_config(optimizer.get_config())
            for candidate in (optimizer, again):
                got = [
                    getattr(candidate.rest_optimizer, name) for name in names
                ]
                assert got == [True, 0.75, 3]
        tfkfac.KFAC(inner(), rest_optimizer=inner())
        # Averages that are not used may differ.
        tfkfac.KFAC(SGD(0.1, ema_momentum=0.5), rest_optimizer=Adam(0.01))
    for ours, rest in (
        (inner(), inner(ema_momentum=0.5)),
        (SGD(0.1), Adam(0.01, use_ema=True)),
    ):
        with pytest.warns(UserWarning, match=f"Received.*'{rest.name}' with"):
            tfkfac.KFAC(ours, rest_optimizer=rest)


# ---------------------------------------------------------- uncovered weights
X, Y = data()


def test_uncovered_weights_take_the_plain_step() -> None:
    """Uncovered weights take the plain step bit for bit.

    The gradient of an embedding stays sparse.
    """
    model = sequential(
        layers.Embedding(7, 2, name="tokens"),
        layers.Flatten(),
        layers.Dense(4, activation="tanh", name="dense"),
        Scale(name="scale"),
        layers.Dense(CLASSES, name="last"),
        shape=(3,),
    )
    variables = model.trainable_variables
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(0.1),
        skip_layers=["tokens", "last"],
        kl_clip=1e-6,
        rest_optimizer="inner",
    ).attach(model)
    x, y = np.array([[0, 1, 2], [2, 3, 3]]), np.array([0, 1])

    @tf.function
    def step() -> list[Any]:
        gradients = gradients_of(model, x, y)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, variables)
        return list(map(tf.convert_to_tensor, gradients))

    before = [v.numpy() for v in variables]
    steps = [np.float32(0.1) * np.asarray(g) for g in step()]
    plain = [
        np.array_equal(v.numpy(), old - moved)
        for v, old, moved in zip(variables, before, steps, strict=True)
    ]
    names = [v.path.split("/")[-2] for v in variables]
    assert names == ["tokens", "dense", "dense", "scale", "last", "last"]
    assert plain[1:] == [False, False, True, True, True]
    want = before[0] - steps[0]  # added up in another order
    np.testing.assert_allclose(variables[0].numpy(), want, rtol=1e-6)


def test_model_without_a_supported_layer() -> None:
    """Warns that no layer is supported; the inner optimizer trains."""
    model = sequential(Scale(name="scale"))
    with pytest.warns(UserWarning, match=r"has no layer that K-FAC.*Adam"):
        model.compile(tfkfac.KFAC(step="natural"), "mse", run_eagerly=True)
    optimizer = kfac_of(model)
    assert "No layer is preconditioned." in summary_text(optimizer)
    assert list(leftovers_of(optimizer)) == ["scale:gain"]
    assert optimizer.factors() == {}
    assert optimizer.state_bytes()["total"] == 0
    model.train_on_batch(X, 0 * X)
    assert (model.get_weights()[0] < 1).all()
    assert int(optimizer.iterations) == 1


# ------------------------------------------------- layers without a record
def test_weights_used_without_calling_the_layer() -> None:
    """The error names the layer; following its advice works."""

    class Shortcut(LateBuilt):
        def call(self, x: Any) -> Any:
            x = keras.ops.matmul(x, self.hidden.kernel) + self.hidden.bias
            return self.logits(x)

    model = Shortcut()
    model.compile(tfkfac.KFAC(step="natural"), loss())
    with pytest.raises(ValueError, match=r"'hidden'.*no call") as caught:
        model.train_on_batch(X, Y)
    advice = re.search(r"skip_layers=\['(\w+)'\]", str(caught.value))
    assert advice is not None
    model = Shortcut()
    model.build(X.shape)
    optimizer = tfkfac.KFAC(step="natural", skip_layers=[advice[1]])
    model.compile(optimizer, loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert list(optimizer.factors()) == ["logits"]


def test_layer_called_in_a_nested_function() -> None:
    """A call in a nested `tf.function` raises an error that names the layer."""
    model = mlp()
    model.layers[0].call = tf.function(model.layers[0].call)
    optimizer = tfkfac.KFAC(step="natural").attach(model)

    @tf.function
    def forward(x: Any) -> Any:
        return model.layers[0](x)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss()(Y, model.layers[1](forward(X)))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)

    with pytest.raises(ValueError, match=r"'hidden'.*`tf\.function`"):
        step()


@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_gradients_for_half_of_a_layer(step: str) -> None:
    """A bias without a gradient stays; the kernel is trained."""
    model = mlp()
    optimizer = tfkfac.KFAC(step=step).attach(model)
    before = model.get_weights()
    gradients = gradients_of(model, X, Y)
    gradients[1] = None
    optimizer.apply(gradients, model.trainable_variables)
    changed = [
        not np.array_equal(x, y)
        for x, y in zip(before, model.get_weights(), strict=True)
    ]
    assert changed == [True, False, True, True]


def test_layers_with_a_penalty_only() -> None:
    """A loss does not depend on them, so their weights are only multiplied."""
    penalties = {"kernel_regularizer": "l2", "bias_regularizer": "l2"}
    inputs = keras.Input(X.shape[1:])
    cut = layers.Dense(3, name="cut", bias_initializer="ones", **penalties)
    hidden = layers.Lambda(tf.stop_gradient)(cut(inputs))
    head = layers.Dense(2, name="head", kernel_regularizer="l2")
    outputs = [layers.Dense(CLASSES)(hidden), head(hidden)]
    model = keras.Model(inputs, outputs)
    model.compile(tfkfac.KFAC(), [loss(), None], run_eagerly=True)
    weights = [*cut.weights, head.kernel]
    before = [w.numpy() for w in weights]
    model.train_on_batch(X, [Y, np.zeros([len(Y), 2])])
    for old, weight in zip(before, weights, strict=True):
        ratios = weight.numpy() / old
        assert 0.9 < ratios.max() < 1
        np.testing.assert_allclose(ratios, ratios.max(), rtol=1e-5)


def test_averages_outside_of_fit() -> None:
    """Averages are used in `evaluate` and `predict`.

    Keras' callback restores the weights after `evaluate` only.
    """
    model, (x, y) = mlp(), data(16)
    model.compile(averaging(), loss(), run_eagerly=True)
    batches = []
    for _ in range(3):
        model.train_on_batch(x, y)
        batches.append(model.get_weights())
    plain, inside = model.evaluate(x, y, verbose=0), []
    swap = keras.callbacks.SwapEMAWeights()
    seen = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda *_, **__: inside.append(model.get_weights()),
        on_predict_batch_end=lambda *_, **__: inside.append(
            model.get_weights()
        ),
    )
    for _ in range(2):  # with the same callbacks
        assert model.evaluate(x, y, verbose=0, callbacks=[swap, seen]) != plain
        close(model.get_weights(), batches[-1])
    model.predict(x, verbose=0, callbacks=[swap, seen])
    assert len(inside) == 3
    for weights in inside:
        close(weights, average_of(batches))
