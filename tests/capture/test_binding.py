"""How K-FAC meets its model: `compile`, `attach`, and every way to train."""

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import Array, append_one, factors
from tests.support.small import (
    CLASSES,
    FEATURES,
    ROWS,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    is_tapped,
    kfac_of,
    loss,
    mlp,
)

X, Y = data()
STEPS = 3


# -------------------------------------------------- every way to take steps
class OwnTrainStep(keras.Model):
    """A train step as in Keras' guides."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(value, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": value}


def by_fit(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss())
    model.fit(X, Y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    return model


def by_fit_on_a_dataset(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss())
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(STEPS)
    model.fit(batches, shuffle=False, verbose=0)
    return model


def by_train_on_batch(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss())
    for _ in range(STEPS):
        model.train_on_batch(X, Y)
    return model


def by_eager_fit(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.fit(X, Y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    return model


def by_steps_per_execution(model: Any) -> Any:
    model.compile(tfkfac.KFAC(), loss(), steps_per_execution=2)
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(STEPS)
    model.fit(batches, shuffle=False, verbose=0)
    return model


def by_own_train_step(model: Any) -> Any:
    return by_fit(OwnTrainStep(model.inputs, model.outputs))


def by_eager_loop(model: Any) -> Any:
    optimizer = tfkfac.KFAC().attach(model)
    for _ in range(STEPS):
        gradients = gradients_of(model, X, Y)
        optimizer.apply(gradients, model.trainable_variables)
    model.optimizer = optimizer
    return model


def by_function_loop(model: Any) -> Any:
    optimizer = tfkfac.KFAC().attach(model)

    @tf.function
    def step(x: Any, y: Any) -> None:
        gradients = gradients_of(model, x, y)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)

    for _ in range(STEPS):
        step(X, Y)
    model.optimizer = optimizer
    return model


def by_loop_with_loss_scale(model: Any) -> Any:
    scaler = keras.optimizers.LossScaleOptimizer(tfkfac.KFAC())
    scaler.inner_optimizer.attach(model, loss_scaler=scaler)
    for _ in range(STEPS):
        gradients = gradients_of(
            model, X, Y, lambda y, p: scaler.scale_loss(loss()(y, p))
        )
        scaler.apply(gradients, model.trainable_variables)
    model.optimizer = scaler
    return model


@pytest.fixture(scope="module")
def run_by_fit() -> dict[str, Array]:
    return trained(by_fit(mlp()))


def trained(model: Any) -> dict[str, Array]:
    weights = {str(i): w for i, w in enumerate(model.get_weights())}
    return {**weights, **curvature(kfac_of(model))}


@pytest.mark.parametrize(
    "train",
    [
        by_fit_on_a_dataset,
        by_train_on_batch,
        by_eager_fit,
        by_steps_per_execution,
        by_own_train_step,
        by_eager_loop,
        by_function_loop,
        by_loop_with_loss_scale,
    ],
)
def test_every_way_of_training_is_the_same(
    train: Callable[[Any], Any], run_by_fit: dict[str, Array]
) -> None:
    """Weights, factors, decompositions and counters, after three steps."""
    model = train(mlp())
    got = trained(model)
    # Factors and inverses of both layers, and the counters.
    assert len(got) == 4 + 3 + 2 * 7
    assert list(got) == list(run_by_fit)
    assert int(kfac_of(model).iterations) == STEPS
    for name, want in run_by_fit.items():
        np.testing.assert_allclose(
            got[name], want, rtol=2e-4, atol=2e-5, err_msg=name
        )


def test_steps_were_not_all_the_same(run_by_fit: dict[str, Array]) -> None:
    """The comparison above would notice a model that did not train."""
    for before, name in zip(mlp().get_weights(), run_by_fit, strict=False):
        assert np.abs(run_by_fit[name] - before).max() > 1e-3
    assert any(value.any() for value in run_by_fit.values())


def test_several_inputs_and_outputs() -> None:
    """Dictionaries, losses and sample weights per output, in a dataset."""
    keras.utils.set_random_seed(0)
    one = keras.Input((FEATURES,), name="one")
    two = keras.Input((2,), name="two")
    x = layers.Concatenate()([one, two])
    x = layers.Dense(5, activation="tanh", name="trunk")(x)
    outputs = {
        "label": layers.Dense(CLASSES, name="label")(x),
        "value": layers.Dense(1, name="value")(x),
    }
    model = keras.Model({"one": one, "two": two}, outputs)
    model.compile(
        tfkfac.KFAC(), {"label": loss(), "value": "mse"}, run_eagerly=True
    )
    inputs = {"one": X, "two": X[:, :2]}
    targets = {"label": Y, "value": X[:, :1]}
    weights = {"label": np.ones(ROWS), "value": np.zeros(ROWS)}
    batches = tf.data.Dataset.from_tensors((inputs, targets, weights))
    model.fit(batches, shuffle=False, verbose=0)
    blocks = kfac_of(model).factors()
    assert set(blocks) == {"trunk", "label", "value"}
    assert blocks["label"]["G"].any()
    assert not blocks["value"]["G"].any()
    a = append_one(np.concatenate([X, X[:, :2]], axis=1))
    assert_close(blocks["trunk"]["A"], a.T @ a / ROWS, 1e-5, "A")


# ------------------------------------------------- models of several shapes
class Subclassed(keras.Model):
    """Layers made in the constructor, built by the first call."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = layers.Dense(5, activation="tanh", name="hidden")
        self.logits = layers.Dense(CLASSES, name="logits")

    def call(self, x: Any) -> Any:
        return self.logits(self.hidden(x))


class LateBuilt(keras.Model):
    """Layers that do not exist before the model is built."""

    def build(self, shape: Any) -> None:
        self.hidden = layers.Dense(5, activation="tanh", name="hidden")
        self.hidden.build(shape)
        self.logits = layers.Dense(CLASSES, name="logits")
        self.logits.build((None, 5))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.logits(self.hidden(x))


class LateBlock(layers.Layer):
    """A container layer of the same kind."""

    def build(self, shape: Any) -> None:
        self.hidden = layers.Dense(5, activation="tanh", name="hidden")
        self.hidden.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.hidden(x)


def unbuilt_sequential() -> Any:
    hidden = layers.Dense(5, activation="tanh", name="hidden")
    return keras.Sequential([hidden, layers.Dense(CLASSES, name="logits")])


def nested_unbuilt() -> Any:
    inner = keras.Sequential([LateBlock(name="block")], name="inner")
    return keras.Sequential([inner, layers.Dense(CLASSES, name="logits")])


MODELS: dict[str, Callable[[], Any]] = {
    "unbuilt sequential": unbuilt_sequential,
    "subclassed": Subclassed,
    "built in build": LateBuilt,
    "nested, built in build": nested_unbuilt,
}


@pytest.mark.parametrize(
    ("kind", "eager"),
    [*((kind, True) for kind in MODELS), ("nested, built in build", False)],
)
def test_unbuilt_models(kind: str, eager: bool) -> None:
    """Taps are in time for layers that come with the first step."""
    keras.utils.set_random_seed(0)
    model = MODELS[kind]()
    optimizer = tfkfac.KFAC(1e-3, factor_update_interval=1)
    model.compile(optimizer, loss(), run_eagerly=eager)
    model.train_on_batch(X, Y)
    twin = compiled_mlp(1e-3, factor_update_interval=1, eager=True)
    twin.set_weights(model.get_weights())
    state = curvature(optimizer)
    optimizer.load_own_variables({k: 0 * v for k, v in state.items()})
    model.train_on_batch(X, Y)
    twin.train_on_batch(X, Y)
    got, want = optimizer.factors(), kfac_of(twin).factors()
    assert [p.rsplit("/")[-1] for p in got] == ["hidden", "logits"]
    for mine, his in zip(got.values(), want.values(), strict=True):
        for name in ("A", "G"):
            assert his[name].any()
            assert_close(mine[name], his[name], 1e-5, name)


def test_unbuilt_attention_is_found() -> None:
    """Attention makes its projections when it is built."""

    class Attentive(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.MultiHeadAttention(2, 3, name="attention")
            self.logits = layers.Dense(CLASSES, name="logits")

        def call(self, x: Any) -> Any:
            return self.logits(self.attention(x, x))

    model = Attentive()
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    x = np.random.default_rng(0).normal(size=(4, 5, 2)).astype("float32")
    model.train_on_batch(x, np.zeros((4, 5), "int32"))
    blocks = kfac_of(model).factors()
    assert list(blocks) == [
        f"attention/{name}"
        for name in ("query", "key", "value", "attention_output")
    ] + ["logits"]
    assert all(block["A"].any() for block in blocks.values())


def test_model_whose_call_is_never_used() -> None:
    """An autoencoder's train step may call its parts and nothing else."""

    class Parts(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = unbuilt_sequential()
            self.decoder = keras.Sequential([layers.Dense(FEATURES)])

        def train_step(self, x: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                error = self.decoder(self.encoder(x)) - x
                value = tf.reduce_mean(tf.square(error))
            weights = self.trainable_weights
            gradients = tape.gradient(value, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"error": value}

    model = Parts()
    model.compile(tfkfac.KFAC(0.02), run_eagerly=True)
    history = model.fit(X, epochs=8, batch_size=ROWS, verbose=0).history
    blocks = kfac_of(model).factors()
    assert len(blocks) == 3
    for block in blocks.values():
        assert block["A"].any()
        assert block["G"].any()
    assert history["error"][-1] < 0.9 * history["error"][0]


# --------------------------------------------------- compile and re-compile
def test_import_and_compile_are_all_it_takes() -> None:
    model = mlp()
    assert not is_tapped(model)
    model.compile(tfkfac.KFAC(), loss())
    assert is_tapped(model)


def test_recompile_with_the_same_optimizer_keeps_its_state() -> None:
    model = compiled_mlp(eager=True)
    model.train_on_batch(X, Y)
    before = everything(model)
    model.compile(model.optimizer, loss(), run_eagerly=True)
    assert_same(everything(model), before)
    model.train_on_batch(X, Y)
    assert int(kfac_of(model).factor_updates) == 2


def test_recompile_with_another_kfac() -> None:
    """The new one starts anew and gets every record, the old one none."""
    model = compiled_mlp(eager=True)
    old = model.optimizer
    model.train_on_batch(X, Y)
    before = curvature(old)
    new = tfkfac.KFAC(solver="eigen")
    model.compile(new, loss(), run_eagerly=True)
    assert int(new.factor_updates) == 0
    model.train_on_batch(X, Y)
    assert int(new.factor_updates) == 1
    assert all(block["G"].any() for block in new.factors().values())
    assert_same(curvature(old), before)


@pytest.mark.parametrize("train_between", [True, False])
def test_recompile_with_another_optimizer_removes_all_taps(
    train_between: bool,
) -> None:
    normalized = [layers.BatchNormalization(), *mlp().layers]
    model = keras.Sequential([keras.Input((FEATURES,)), *normalized])
    names = [set(vars(layer)) for layer in model._flatten_layers()]
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    if train_between:
        model.train_on_batch(X, Y)
    model.compile("adam", loss(), run_eagerly=True)
    assert not is_tapped(model)
    now = [set(vars(layer)) for layer in model._flatten_layers()]
    assert now[1:] == names[1:]
    model.train_on_batch(X, Y)


def test_recompile_after_the_optimizer_is_gone() -> None:
    """No reference of the user's keeps it, its taps still go."""
    model = compiled_mlp(eager=True)
    model.optimizer = None
    gc.collect()
    model.compile("sgd", loss())
    assert not is_tapped(model)


def test_recompile_before_the_model_is_built_leaves_no_taps() -> None:
    model = LateBuilt()
    model.compile(tfkfac.KFAC(), loss())
    model.compile("sgd", loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert not is_tapped(model)


def test_deleted_model_and_optimizer_are_freed() -> None:
    """Taps and records keep nothing alive."""
    model = compiled_mlp(eager=True)
    model.train_on_batch(X, Y)
    gradients_of(model, X, Y)
    ends = [weakref.ref(model.optimizer), weakref.ref(model.layers[0])]
    del model
    gc.collect()
    assert [end() for end in ends] == [None, None]


# ------------------------------------------------------------- fine-tuning
def test_freezing_takes_a_layer_out() -> None:
    """The same optimizer goes on with what is left, state included."""
    model = compiled_mlp(eager=True)
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    kept = optimizer.factors()["logits"]
    frozen = model.layers[0].get_weights()
    model.layers[0].trainable = False
    model.compile(optimizer, loss(), run_eagerly=True)
    assert list(optimizer.factors()) == ["logits"]
    np.testing.assert_array_equal(optimizer.factors()["logits"]["A"], kept["A"])
    head = model.layers[1].get_weights()
    model.train_on_batch(X, Y)
    for value, want in zip(model.layers[0].get_weights(), frozen, strict=True):
        np.testing.assert_array_equal(value, want)
    assert not np.array_equal(model.layers[1].get_weights()[0], head[0])
    assert "call" not in vars(model.layers[0])


def test_freezing_and_thawing_again() -> None:
    """A layer that comes back starts with factors of the next batch."""
    model = compiled_mlp(eager=True)
    optimizer = kfac_of(model)
    for trainable, count in ((False, 1), (True, 2)):
        model.train_on_batch(X, Y)
        model.layers[0].trainable = trainable
        model.compile(optimizer, loss(), run_eagerly=True)
        assert len(optimizer.factors()) == count
    assert not optimizer.factors()["hidden"]["A"].any()
    # Between two updates of the schedule, yet it must not wait.
    optimizer.iterations.assign(101)
    model.train_on_batch(X, Y)
    a = append_one(X.astype(np.float64))
    assert_close(optimizer.factors()["hidden"]["A"], a.T @ a / ROWS, 1e-5)


def test_thawing_what_the_optimizer_was_built_without() -> None:
    model = mlp()
    model.layers[0].trainable = False
    optimizer = tfkfac.KFAC()
    model.compile(optimizer, loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert list(optimizer.factors()) == ["logits"]
    model.layers[0].trainable = True
    with pytest.raises(ValueError, match=r"hidden/kernel.*new optimizer"):
        model.compile(optimizer, loss())
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert list(kfac_of(model).factors()) == ["hidden", "logits"]


def test_fine_tuning_a_pretrained_part() -> None:
    """A trained model inside a new one: frozen, then free."""
    base = compiled_mlp(eager=True)
    base.train_on_batch(X, Y)
    base.trainable = False
    head = layers.Dense(CLASSES, name="head")
    model = keras.Sequential([keras.Input((FEATURES,)), base, head])
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert list(kfac_of(model).factors()) == ["head"]
    base.trainable = True
    model.compile(tfkfac.KFAC(1e-3), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    blocks = kfac_of(model).factors()
    assert list(blocks) == ["mlp/hidden", "mlp/logits", "head"]
    assert all(block["G"].any() for block in blocks.values())


# ------------------------------------------------ several models, optimizers
def test_second_model_is_refused() -> None:
    model = compiled_mlp(eager=True)
    other = mlp()
    other.name = "other"
    with pytest.raises(ValueError, match=r"'mlp'.*model 'other'"):
        other.compile(model.optimizer, loss())
    with pytest.raises(ValueError, match="already belongs to model 'mlp'"):
        model.optimizer.attach(other)
    # The first model is none the worse.
    model.train_on_batch(X, Y)


def test_model_of_the_optimizer_is_gone() -> None:
    model = compiled_mlp()
    optimizer = model.optimizer
    del model
    gc.collect()
    with pytest.raises(ValueError, match="belongs to a deleted model"):
        mlp().compile(optimizer, loss())


def test_attach_wants_a_model() -> None:
    with pytest.raises(TypeError, match=r"Argument `model`.*Received"):
        tfkfac.KFAC().attach(layers.Dense(2))  # type: ignore[arg-type]


def test_never_attached() -> None:
    """The error says what to call, before anything has changed."""
    model = mlp()
    optimizer = tfkfac.KFAC()
    before = model.get_weights()
    gradients = gradients_of(model, X, Y)
    with pytest.raises(ValueError, match=r"`optimizer\.attach\(model\)`"):
        optimizer.apply(gradients, model.trainable_variables)
    for value, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, want)
    with pytest.raises(ValueError, match="does not know its model"):
        optimizer.summary()


@pytest.mark.parametrize("eager", [True, False])
def test_attached_too_late(eager: bool) -> None:
    """After the forward pass there is nothing left to record."""
    model = mlp()
    optimizer = tfkfac.KFAC()

    def step() -> None:
        gradients = gradients_of(model, X, Y)
        optimizer.attach(model)
        optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(ValueError, match=r"'hidden'.*after the forward pass"):
        (step if eager else tf.function(step))()


def test_two_models_share_a_trunk() -> None:
    """Each optimizer takes the records of its own model's steps."""
    keras.utils.set_random_seed(0)
    trunk = layers.Dense(4, activation="tanh", name="trunk")
    inputs = keras.Input((FEATURES,))
    shared = trunk(inputs)
    models = [
        keras.Model(inputs, layers.Dense(CLASSES, name=name)(shared))
        for name in ("left", "right")
    ]
    for model in models:
        model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    batches = [data(5, seed=1), data(9, seed=2)]
    for model, (x, y) in zip(models, batches, strict=True):
        model.train_on_batch(x, y)
    for model, (x, _) in zip(models, batches, strict=True):
        a = append_one(x.astype(np.float64))
        got = kfac_of(model).factors()["trunk"]["A"]
        assert_close(got, a.T @ a / len(x), 1e-5, "A")
    # The trunk stays tapped for the other one.
    models[0].compile("sgd", loss())
    models[1].train_on_batch(*batches[1])
    models[1].compile("sgd", loss())
    assert not is_tapped(models[0])
    assert not is_tapped(models[1])


# -------------------------------------------------------- adversarial models
BCE = keras.losses.BinaryCrossentropy(from_logits=True)
NOISE = np.random.default_rng(3).normal(size=(ROWS, 2)).astype("float32")


class Gan:
    """A generator and a discriminator, one dense layer each."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        maker = layers.Dense(FEATURES, name="maker")
        judge = layers.Dense(1, name="judge")
        self.generator = keras.Sequential([keras.Input((2,)), maker])
        self.critic = keras.Sequential([keras.Input((FEATURES,)), judge])
        self.of_generator = tfkfac.KFAC().attach(self.generator)
        self.of_critic = tfkfac.KFAC().attach(self.critic)
        weights = self.generator.get_weights()
        kernel, bias = (w.astype(np.float64) for w in weights)
        v, c = (w.astype(np.float64) for w in self.critic.get_weights())
        fake = NOISE @ kernel + bias
        real_score = 1 / (1 + np.exp(-(X @ v + c)))
        fake_score = 1 / (1 + np.exp(-(fake @ v + c)))
        # The critic sees two calls of the same size; theirs are pooled.
        rows = append_one(np.concatenate([X, fake]))
        g = np.concatenate([real_score - 1, fake_score])
        self.critic_a = rows.T @ rows / (2 * ROWS)
        self.critic_g = g.T @ g / ROWS
        _, self.generator_g = factors(
            append_one(NOISE)[:, None], ((fake_score - 1) @ v.T)[:, None]
        )

    def critic_loss(self, x: Any) -> Any:
        real, fake = self.critic(x), self.critic(self.generator(NOISE))
        ones, zeros = tf.ones_like(real), tf.zeros_like(fake)
        return BCE(ones, real) + BCE(zeros, fake)

    def generator_loss(self) -> Any:
        fake = self.critic(self.generator(NOISE))
        return BCE(tf.ones_like(fake), fake)

    def train_critic(self, x: Any) -> None:
        with tf.GradientTape() as tape:
            value = self.critic_loss(x)
        weights = self.critic.trainable_weights
        self.of_critic.apply(tape.gradient(value, weights), weights)

    def train_generator(self) -> None:
        with tf.GradientTape() as tape:
            value = self.generator_loss()
        weights = self.generator.trainable_weights
        self.of_generator.apply(tape.gradient(value, weights), weights)

    def check_critic(self) -> None:
        block = self.of_critic.factors()["judge"]
        assert_close(block["A"], self.critic_a, 1e-5, "A of the critic")
        assert_close(block["G"], self.critic_g, 1e-5, "G of the critic")

    def check_generator(self) -> None:
        block = self.of_generator.factors()["maker"]
        assert_close(block["G"], self.generator_g, 1e-5, "G of the generator")


@pytest.mark.parametrize("eager", [True, False])
def test_critic_learns_from_its_own_loss(eager: bool) -> None:
    """The generator's step runs through the critic and leaves no trace."""
    gan = Gan()
    initial = gan.critic.get_weights()

    def step() -> None:
        # The generator goes first: what it leaves on the critic is stale.
        gan.train_generator()
        gan.train_critic(X)

    # Learning rate zero, so that the closed form holds for both.
    gan.of_generator.learning_rate = 0.0
    gan.of_critic.learning_rate = 0.0
    (step if eager else tf.function(step))()
    gan.check_generator()
    gan.check_critic()
    for value, want in zip(gan.critic.get_weights(), initial, strict=True):
        np.testing.assert_array_equal(value, want)


@pytest.mark.xfail(
    reason="a record is of the last backward pass, whatever was asked of it"
)
@pytest.mark.parametrize(
    ("eager", "generator_first"), [(True, True), (True, False), (False, True)]
)
def test_two_tapes_over_one_forward_pass(
    eager: bool, generator_first: bool
) -> None:
    """TensorFlow's own example of a GAN: both gradients, then both steps."""
    gan = Gan()

    def step() -> None:
        fakes, critics = (
            model.trainable_weights for model in (gan.generator, gan.critic)
        )
        with tf.GradientTape() as one, tf.GradientTape() as other:
            fake = gan.critic(gan.generator(NOISE))
            real = gan.critic(X)
            for_generator = BCE(tf.ones_like(fake), fake)
            for_critic = BCE(tf.ones_like(real), real)
            for_critic += BCE(tf.zeros_like(fake), fake)
        if generator_first:
            first = one.gradient(for_generator, fakes)
            second = other.gradient(for_critic, critics)
        else:
            second = other.gradient(for_critic, critics)
            first = one.gradient(for_generator, fakes)
        gan.of_generator.apply(first, fakes)
        gan.of_critic.apply(second, critics)

    (step if eager else tf.function(step))()
    gan.check_critic()
    gan.check_generator()


def test_gan_as_a_keras_model() -> None:
    """Two optimizers of parts of a model, none of the model's own."""

    class Model(keras.Model):
        def __init__(self, gan: Gan) -> None:
            super().__init__()
            self.gan = gan
            self.parts = [gan.generator, gan.critic]

        def train_step(self, x: Any) -> dict[str, Any]:
            self.gan.train_critic(x)
            self.gan.train_generator()
            return {"loss": self.gan.generator_loss()}

    gan = Gan()
    model = Model(gan)
    model.compile(run_eagerly=True)
    history = model.fit(X, batch_size=ROWS, epochs=3, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    for optimizer in (gan.of_generator, gan.of_critic):
        assert int(optimizer.iterations) == 3
        assert int(optimizer.factor_updates) == 3


# -------------------------------------------------------------- records
def test_a_saliency_map_leaves_nothing_behind() -> None:
    """A gradient that is never applied does not reach the next step."""
    models = [compiled_mlp(eager=True) for _ in range(2)]
    for model, saliency in zip(models, (False, True), strict=True):
        for _ in range(2):
            if saliency:
                x = tf.constant(X[:3] + 5.0)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    score = tf.reduce_sum(model(x)[:, 0])
                assert np.asarray(tape.gradient(score, x)).any()
            model.train_on_batch(X, Y)
    assert_same(everything(models[1]), everything(models[0]))


def test_unused_records_do_not_pile_up() -> None:
    """Ten saliency maps hold no more tensors than one."""
    model = compiled_mlp(eager=True)

    def held() -> int:
        gc.collect()
        records = [o for o in gc.get_objects() if type(o).__name__ == "Record"]
        return len(records)

    gradients_of(model, X, Y)
    one = held()
    for _ in range(9):
        gradients_of(model, X, Y)
    assert held() <= one
    model.train_on_batch(X, Y)
    assert held() <= one - 2


def test_another_tape_between_backward_pass_and_step() -> None:
    model = mlp()
    optimizer = tfkfac.KFAC().attach(model)
    gradients = gradients_of(model, X, Y)
    with tf.GradientTape():
        model(X[:2])
    optimizer.apply(gradients, model.trainable_variables)


# ------------------------------------------------------------- derivatives
def gradient_penalty(model: Any) -> list[Any]:
    """Weights' gradients of a gradient with respect to the inputs."""
    x = tf.constant(X)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            score = tf.reduce_sum(model(x)[:, 0])
        slope = inner.gradient(score, x)
        penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1))
        value = penalty + tf.reduce_mean(model(x)[:, 1])
    return list(outer.gradient(value, model.trainable_variables))


def forward_mode(model: Any) -> list[Any]:
    values = [v.value for v in model.trainable_variables]
    ones = [tf.ones_like(v) for v in values]
    with tf.autodiff.ForwardAccumulator(values, ones) as accumulator:
        outputs = model(X)
    return [accumulator.jvp(outputs)]


def hessian_product(model: Any) -> list[Any]:
    values = [v.value for v in model.trainable_variables]
    ones = [tf.ones_like(v) for v in values]
    with tf.autodiff.ForwardAccumulator(values, ones) as accumulator:
        with tf.GradientTape() as tape:
            value = loss()(Y, model(X))
        gradients = tape.gradient(value, values)
    return [accumulator.jvp(g) for g in gradients]


def jacobians(model: Any) -> list[Any]:
    with tf.GradientTape(persistent=True) as tape:
        outputs = model(X)
    values = [v.value for v in model.trainable_variables]
    return list(tape.jacobian(outputs, values))


@pytest.mark.parametrize(
    "derivative",
    [
        gradient_penalty,
        jacobians,
        forward_mode,
        hessian_product,
    ],
)
def test_taps_are_transparent_to_derivatives(
    derivative: Callable[[Any], list[Any]],
) -> None:
    """Equal to the last bit, with and without taps."""
    got, want = derivative(compiled_mlp(eager=True)), derivative(mlp())
    assert len(want) in (1, 4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.asarray(b).any()


def test_gradient_penalty_trains() -> None:
    """Nested tapes leave one record for each call of a layer."""
    model = mlp()
    optimizer = tfkfac.KFAC().attach(model)
    for _ in range(2):
        optimizer.apply(gradient_penalty(model), model.trainable_variables)
    a = append_one(X.astype(np.float64))
    # The inputs are seen twice, which leaves their mean as it is.
    got = optimizer.factors()["hidden"]["A"]
    assert_close(got, a.T @ a / ROWS, 1e-5)


# ---------------------------------------------- the model stays what it is
def test_compile_changes_nothing_of_the_model() -> None:
    """Config, weights, outputs, clones, copies and exports."""
    model = mlp()
    config = model.get_config()
    names = [v.path for v in model.weights]
    want = model.predict(X, verbose=0)
    model.compile(tfkfac.KFAC(), loss())
    assert model.get_config() == config
    np.testing.assert_array_equal(model.predict(X, verbose=0), want)
    model.train_on_batch(X, Y)
    assert model.get_config() == config
    assert [v.path for v in model.weights] == names
    clone = keras.models.clone_model(model)
    assert clone.get_config() == config
    # Keras compiles the clone of a compiled model, with a new optimizer.
    assert kfac_of(clone) is not kfac_of(model)
    before = everything(model)
    clone.train_on_batch(X, Y)
    assert_same(everything(model), before)


def test_deepcopy_trains_on_by_itself() -> None:
    model = compiled_mlp(eager=True)
    model.train_on_batch(X, Y)
    before = everything(model)
    twin = copy.deepcopy(model)
    assert kfac_of(twin) is not kfac_of(model)
    twin.train_on_batch(X, Y)
    assert_same(everything(model), before)
    model.train_on_batch(X, Y)
    assert_same(everything(twin), everything(model))


def test_export_is_untouched(tmp_path: Path) -> None:
    model = compiled_mlp()
    model.train_on_batch(X, Y)
    model.export(tmp_path / "model", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "model"))
    want = model.predict(X, verbose=0)
    np.testing.assert_allclose(exported.serve(X), want, rtol=1e-6, atol=1e-6)


def test_load_model_is_bound_without_custom_objects(tmp_path: Path) -> None:
    """`load_model` compiles, so the loaded model trains at once."""
    model = compiled_mlp(solver="eigen", damping=0.3, eager=True)
    model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    optimizer = kfac_of(loaded)
    assert (optimizer.solver, optimizer.damping) == ("eigen", 0.3)
    assert is_tapped(loaded)
    loaded.train_on_batch(X, Y)
    assert int(optimizer.factor_updates) == 2


def test_activation_is_itself_after_a_call() -> None:
    """Also when the activation, or the layer, raises."""
    broken = False

    def activation(x: Any) -> Any:
        if broken:
            raise RuntimeError("broken")
        return tf.tanh(x)

    layer = layers.Dense(CLASSES, activation=activation, name="block")
    model = keras.Sequential([keras.Input((FEATURES,)), layer])
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert layer.activation is activation
    broken = True
    with pytest.raises(RuntimeError, match="broken"):
        model.train_on_batch(X, Y)
    assert layer.activation is activation
    broken = False
    model.train_on_batch(X, Y)
    assert int(kfac_of(model).factor_updates) == 2


def test_call_overridden_on_the_instance_comes_back() -> None:
    """Ours goes over somebody else's `call`, and leaves it in place."""
    model = mlp()
    layer = model.layers[0]
    original, calls = layer.call, []

    def call(x: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(x, **kwargs)

    object.__setattr__(layer, "call", call)
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert calls == [1]
    model.compile("sgd", loss())
    assert layer.call is call


def test_compute_loss_of_the_instance_comes_back() -> None:
    model = mlp()

    def compute_loss(**arguments: Any) -> Any:
        return tf.reduce_mean(tf.square(arguments["y_pred"]))

    object.__setattr__(model, "compute_loss", compute_loss)
    model.compile(tfkfac.KFAC(), loss())
    model.compile("sgd", loss())
    assert model.compute_loss is compute_loss


@pytest.mark.parametrize(
    "order",
    [
        "input first",
        "flag first",
    ],
)
def test_input_as_a_keyword(order: str) -> None:
    class Keywords(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layers.BatchNormalization(name="norm")
            self.logits = layers.Dense(CLASSES, name="logits")

        def call(self, x: Any, training: bool = False) -> Any:
            if order == "input first":
                x = self.norm(inputs=x, training=training)
            else:
                x = self.norm(training=training, inputs=x)
            return self.logits(inputs=x)

    model = Keywords()
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    blocks = kfac_of(model).factors()
    x = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-3)
    a = append_one(x)
    assert_close(blocks["logits"]["A"], a.T @ a / ROWS, 1e-4, "A")


# ------------------------------------------------------------------ traces
class Counter(layers.Layer):
    """Counts how often it is called by Python: once per trace."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x


def counting_mlp(optimizer: Any) -> tuple[Any, Counter]:
    counter = Counter()
    model = keras.Sequential([*mlp().layers, counter])
    model.build((None, FEATURES))
    model.compile(optimizer, loss())
    counter.calls = 0
    return model, counter


def traces_of(model: Any) -> int:
    """Traces of the function that `fit` runs."""
    (function,) = (
        cell.cell_contents
        for cell in model.train_function.__closure__
        if hasattr(cell.cell_contents, "experimental_get_tracing_count")
    )
    return int(function.experimental_get_tracing_count())


def slower(iteration: Any) -> Any:
    return 1 if iteration < 2 else 3


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"factor_update_interval": 2, "inverse_update_interval": 3},
        {
            "factor_update_interval": slower,
            "inverse_update_interval": ExponentialDecay(2.0, 2, 1.5),
            "damping": ExponentialDecay(0.1, 2, 0.5),
        },
    ],
    ids=["defaults", "integers", "functions"],
)
def test_one_trace_whatever_the_intervals(arguments: dict[str, Any]) -> None:
    """Two fits and validation between, 21 steps and all kinds of them."""
    model, counter = counting_mlp(tfkfac.KFAC(**arguments))
    x, y = data(12)
    model.fit(x, y, batch_size=4, epochs=4, verbose=0)
    assert (counter.calls, traces_of(model)) == (1, 1)
    model.fit(x, y, batch_size=4, epochs=3, verbose=0)
    assert (counter.calls, traces_of(model)) == (1, 1)
    optimizer = kfac_of(model)
    assert int(optimizer.iterations) == 21
    assert 0 < int(optimizer.inverse_updates) <= 21


def test_one_more_trace_for_a_partial_batch() -> None:
    """Batches of two sizes, as many traces."""
    model, counter = counting_mlp(tfkfac.KFAC())
    for rows in (4, 4, 2, 4, 2, 4):
        model.train_on_batch(X[:rows], Y[:rows])
    assert counter.calls == 2
    assert int(kfac_of(model).iterations) == 6


def test_one_trace_of_a_custom_step() -> None:
    """An optimizer that is not built yet costs no further trace."""
    model = mlp()
    optimizer = tfkfac.KFAC().attach(model)
    optimizer.build(model.trainable_variables)
    traces = 0

    @tf.function
    def step(x: Any, y: Any) -> None:
        nonlocal traces
        traces += 1
        gradients = gradients_of(model, x, y)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(4):
        step(X, Y)
    assert traces == 1
    assert int(optimizer.iterations) == 4


def test_unbuilt_model_costs_no_more_traces_than_plain_sgd() -> None:
    """Its variables come with the first trace, the last batch is partial."""
    counts = []
    for optimizer in (keras.optimizers.SGD(), tfkfac.KFAC()):
        counter = Counter()
        model = keras.Sequential([*unbuilt_sequential().layers, counter])
        model.compile(optimizer, loss())
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
        counts.append((counter.calls, traces_of(model)))
    assert counts[1] == counts[0]


# ------------------------------------------------------- refused settings
def test_jit_compile_is_refused() -> None:
    """On a CPU; the message says what to do."""
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("XLA on a GPU is allowed")
    with pytest.raises(ValueError, match=r"Received: jit_compile=True.*False"):
        mlp().compile(tfkfac.KFAC(), loss(), jit_compile=True)
    for jit in (False, "auto"):
        model = mlp()
        model.compile(tfkfac.KFAC(), loss(), jit_compile=jit)
        assert is_tapped(model)


REPLICAS = """
import keras, tensorflow as tf, tfkfac
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    scaled = keras.optimizers.LossScaleOptimizer(tfkfac.KFAC())
    for optimizer, steps in ((tfkfac.KFAC(), 2), (scaled, 1)):
        try:
            model.compile(optimizer, "mse", steps_per_execution=steps)
        except ValueError as error:
            print("refused:", error)
"""


def test_settings_refused_with_several_replicas() -> None:
    """In a process of its own: logical devices must come first."""
    done = subprocess.run(
        [sys.executable, "-c", REPLICAS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.split("refused: ") if line]
    assert len(refused) == 2
    assert "steps_per_execution=2" in refused[0]
    assert "LossScaleOptimizer" in refused[1]
