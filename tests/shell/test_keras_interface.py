"""Public members of Keras' optimizers work, or an error names the way.

`WORKING`, `TESTED` and `REFUSED` have each public method, attribute and
argument of `keras.optimizers.Optimizer`; a new one without a row fails.
"""

import functools
import inspect
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.small import data, loss, mlp

SGD = keras.optimizers.SGD
X, Y = data(64)
CLASSES = [tfkfac.KFAC, tfkfac.FOSI, tfkfac.GaussNewton]
every_class = pytest.mark.parametrize("make", CLASSES)


@pytest.fixture(autouse=True)
def eager_functions(run_eagerly: Any) -> None:
    run_eagerly(True)


def compiled(optimizer: Any) -> Any:
    model = mlp()
    model.compile(optimizer, loss(), run_eagerly=True)
    return model


def train(model: Any, first: int, count: int) -> list[float]:
    """Train on `count` of four batches, from batch `first` on."""
    rows = [slice(i % 4 * 16, i % 4 * 16 + 16) for i in range(first + count)]
    return [float(model.train_on_batch(X[r], Y[r])) for r in rows[first:]]


# ---------------------------------------------------------- members that work
def check_assignments(make: Any) -> None:
    optimizer, variable = make(), keras.Variable([1.0, 2.0])
    optimizer.assign(variable, [4.0, 8.0])
    optimizer.assign_add(variable, [1.0, 1.0])
    optimizer.assign_sub(variable, [2.0, 0.0])
    np.testing.assert_array_equal(variable.numpy(), [3.0, 9.0])


def check_config(make: Any) -> None:
    values = make().get_config()
    assert make.from_config(values).get_config() == values
    assert make(name="other").get_config()["name"] == "other"


def check_build(make: Any) -> None:
    optimizer = make()
    model = compiled(optimizer)  # builds the optimizer of a built model
    assert optimizer.built
    optimizer.build(model.trainable_variables)
    wrapped = [optimizer.inner_optimizer, optimizer.rest_optimizer]
    want = [v.path for x in wrapped if x is not None for v in x.variables]
    assert [v.path for v in optimizer.variables] == want
    before = model.get_weights()
    optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_equal(model.get_weights(), before)  # no averages


def check_steps(make: Any) -> None:
    """`apply` and `apply_gradients` make the step of `train_on_batch`."""
    model = compiled(make())
    optimizer, weights = model.optimizer, model.trainable_variables
    before, state, ends = model.get_weights(), {}, []
    optimizer.save_own_variables(state)
    for call in ("train_on_batch", "apply", "apply_gradients"):
        model.set_weights(before)
        optimizer.load_own_variables(state)
        with tf.GradientTape() as tape:
            outputs = model(X, training=True)
            value = model.compute_loss(x=X, y=Y, y_pred=outputs)
            value = optimizer.scale_loss(value)
        gradients = tape.gradient(value, weights)
        if call == "train_on_batch":
            model.train_on_batch(X, Y)
        elif call == "apply":
            optimizer.apply(gradients, weights)
        else:
            pairs = zip(gradients, weights, strict=True)
            assert int(optimizer.apply_gradients(pairs).numpy()) == 1
        ends.append(np.concatenate([np.ravel(w) for w in weights]))
        assert int(optimizer.iterations.numpy()) == 1
    np.testing.assert_allclose(ends[1:], [ends[0]] * 2, rtol=1e-4, atol=1e-6)
    before = model.get_weights()
    model.optimizer.learning_rate = 0.0
    assert float(model.optimizer.learning_rate) == 0.0
    model.train_on_batch(X, Y)
    np.testing.assert_equal(model.get_weights(), before)


@every_class
def test_arguments_of_apply(make: Any) -> None:
    model, optimizer = mlp(), make()
    model.compile("sgd", loss())
    weights = model.trainable_variables
    before = [w.numpy() for w in weights]
    optimizer.attach(model)
    with tf.GradientTape() as tape:
        value = model.compute_loss(x=X, y=Y, y_pred=model(X, training=True))
    gradients = tape.gradient(value, weights)
    optimizer.apply(gradients)  # of all weights of the model
    assert not any(map(np.array_equal, before, weights))
    with pytest.raises(ValueError, match="Received: 3 elements"):
        optimizer.apply(gradients[:3])
    others = [*weights[:3], keras.Variable(weights[3], name="other")]
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(gradients, others)


# Members that work, and the check of each.
WORKING: dict[str, Callable[[Any], None]] = {
    "apply": check_steps, "apply_gradients": check_steps,
    "assign": check_assignments, "assign_add": check_assignments,
    "assign_sub": check_assignments, "build": check_build,
    "built": check_build, "finalize_variable_values": check_build,
    "from_config": check_config, "get_config": check_config,
    "iterations": check_steps, "learning_rate": check_steps,
    "name": check_config, "scale_loss": check_steps,
    "variables": check_build,
}  # fmt: skip
# Members with tests of their own below.
TESTED = {
    "exclude_from_weight_decay", "load_own_variables", "save_own_variables",
}  # fmt: skip
# Members that an error refuses; for attributes a value.
REFUSED: dict[str, Any] = {
    "add_optimizer_variables": None, "add_variable": None,
    "add_variable_from_reference": None, "set_weights": None,
    "stateless_apply": None, "update_step": None,
    "clipnorm": 1e-9, "clipvalue": 1e-9, "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3, "global_clipnorm": 1e-9,
    "gradient_accumulation_steps": 4, "loss_scale_factor": 2.0,
    "use_ema": True, "weight_decay": 0.5,
}  # fmt: skip


def test_each_member_of_keras_optimizers_has_a_row() -> None:
    keras_class = keras.optimizers.Optimizer
    names = {*dir(keras_class), *vars(keras_class(0.1))}
    signatures = [inspect.signature(c.__init__) for c in keras_class.__mro__]
    names |= {name for signature in signatures for name in signature.parameters}
    names -= {"self", "args", "kwargs"}
    public = {name for name in names if not name.startswith("_")}
    assert public == WORKING.keys() | TESTED | REFUSED.keys()


@every_class
def test_working_members(make: Any) -> None:
    for check in dict.fromkeys(WORKING.values()):
        check(make)


@every_class
@pytest.mark.parametrize("name", REFUSED)
def test_refused_members(name: str, make: Any) -> None:
    """The error comes with the way that works, and nothing changes."""
    optimizer, value = make(), REFUSED[name]
    errors = AttributeError, NotImplementedError, ValueError
    ways = r"inner_optimizer|damping|another optimizer|LossScaleOptimizer|Call"
    ways += "|inner optimizer|save_own_variables"
    with pytest.raises(errors, match=ways) as caught:
        if value is None:
            getattr(optimizer, name)([np.ones(3)])
        else:
            setattr(optimizer, name, value)
    assert name in str(caught.value)
    if value is not None:
        assert getattr(optimizer, name) != value
        shown = re.search(r"`inner_optimizer=(.+?)`\.", str(caught.value))
        if shown is not None:  # the code in the message works
            inner = eval(shown[1], {"keras": keras})
            changed = type(optimizer)(inner_optimizer=inner)
            assert getattr(changed.inner_optimizer, name) == value


# --------------------------------------------------------------- weight decay
DECAY, RATE, STEPS = 0.5, 0.1, 2


def inner_sgd() -> Any:
    return SGD(RATE, weight_decay=DECAY)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: tfkfac.KFAC(inner_sgd(), only_layers="logits"),
        lambda: tfkfac.KFAC(inner_sgd(), step="spectral", only_layers="logits"),
        lambda: tfkfac.KFAC(rest_optimizer=inner_sgd(), skip_layers="logits"),
        lambda: tfkfac.FOSI(inner_sgd(), warmup_steps=1),
    ],
)
def test_weight_decay(wrap: Any) -> None:
    """Without gradients a decayed weight is `(1 - rate decay)^steps` of it."""
    model, optimizer = mlp(), wrap()
    layer = model.get_layer("logits")
    layer.bias.assign([1.0, 2.0, 3.0])
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    before = layer.get_weights()
    # No gradient: the loss does not depend on the outputs.
    model.compile(optimizer, lambda y, outputs: 0.0 * outputs, run_eagerly=True)
    for _ in range(STEPS):
        model.train_on_batch(X, Y)
    kernel, bias = layer.get_weights()
    np.testing.assert_array_equal(bias, before[1])
    remaining = (1 - RATE * DECAY) ** STEPS
    np.testing.assert_allclose(kernel, before[0] * remaining, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, None),
        ({"inner_optimizer": SGD(RATE, momentum=0.9)}, RATE),
        ({"skip_layers": "logits"}, None),
    ],
)
def test_weight_decay_argument(options: Any, rate: float | None) -> None:
    """Kernels decay, also after loading; biases and excluded kernels do not."""
    optimizer = tfkfac.KFAC(weight_decay=DECAY, **options)
    optimizer = tfkfac.KFAC.from_config(optimizer.get_config())
    model = mlp()
    hidden, logits = model.layers
    optimizer.exclude_from_weight_decay([hidden.kernel])
    logits.bias.assign([1.0, 2.0, 3.0])
    before, remaining = model.get_weights(), 1.0
    model.compile(optimizer, lambda y, outputs: 0.0 * outputs, run_eagerly=True)
    for _ in range(STEPS):
        model.train_on_batch(X, Y)
        # Spectral steps: the factor r of their length.
        length = rate or optimizer.last_step["clip_factor"]
        if "skip_layers" in options:  # the rate of the rest optimizer
            length = min(length, 0.1)
        remaining *= 1 - length * DECAY
    assert optimizer.weight_decay == DECAY
    assert remaining < 0.995
    before[2] *= remaining
    for value, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5)


def test_weight_decay_changes_no_optimizer_of_the_user() -> None:
    """A rest optimizer keeps its own decay, also of biases."""
    model, inner, rest = mlp(), SGD(RATE), inner_sgd()
    before = inner.get_config()
    optimizer = tfkfac.KFAC(
        inner, rest_optimizer=rest, skip_layers="logits", weight_decay=0.25
    )
    model.set_weights([np.ones(w.shape) for w in model.get_weights()])
    model.compile(optimizer, lambda y, outputs: 0.0 * outputs, run_eagerly=True)
    model.train_on_batch(X, Y)
    assert inner.get_config() == before
    remaining = [w.numpy().mean() for w in model.weights]
    np.testing.assert_allclose(remaining, [0.975, 1.0, 0.95, 0.95], 1e-6)


@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_biases_and_norm_scales_of_two_axes_do_not_decay(step: str) -> None:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4, 6)),
            layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
            layers.LayerNormalization(axis=(-2, -1)),
            layers.Reshape((4, 6)),
            layers.GRU(3),
        ]
    )
    optimizer = tfkfac.KFAC(weight_decay=DECAY, step=step)
    model.compile(optimizer, lambda y, outputs: 0.0 * outputs, run_eagerly=True)
    model.set_weights([np.ones(w.shape) for w in model.get_weights()])
    model.train_on_batch(np.ones((2, 4, 6)), np.ones((2, 3)))
    changed = [v.name for v in model.weights if (v.numpy() != 1).any()]
    assert changed == ["kernel", "kernel", "recurrent_kernel"]


# ------------------------------------------------------- the state by itself
def test_state_by_itself(tmp_path: pathlib.Path) -> None:
    """A copy continues bit for bit, from a dict in a NumPy file."""
    model, copy = compiled(tfkfac.KFAC()), compiled(tfkfac.KFAC())
    train(model, 0, 3)
    train(copy, 1, 1)
    copy.set_weights(model.get_weights())
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    np.savez(tmp_path / "optimizer.npz", **store)
    copy.optimizer.load_own_variables(np.load(tmp_path / "optimizer.npz"))
    assert train(copy, 3, 1) == train(model, 3, 1)
    np.testing.assert_equal(copy.get_weights(), model.get_weights())


def test_an_earlier_state_by_variables_is_refused() -> None:
    """In a step and in `fit`, also in a loss scaler."""
    model = compiled(keras.optimizers.LossScaleOptimizer(tfkfac.KFAC(0.1)))
    train(model, 0, 2)
    for variable in model.optimizer.variables:
        variable.assign(variable.numpy())
    with pytest.raises(ValueError, match=r"curvature.*save_own_variables"):
        train(model, 2, 1)
    with pytest.raises(ValueError, match=r"iteration' of .*'kfac' was assign"):
        model.fit(X, Y, verbose=0)


def test_iterations_beside_a_rest_optimizer_can_be_assigned() -> None:
    """They are the clock of schedules."""
    model = compiled(tfkfac.KFAC())
    model.optimizer.iterations.assign(7)
    train(model, 0, 1)
    assert int(model.optimizer.iterations.numpy()) == 8


def test_state_of_another_inner_optimizer_warns() -> None:
    """The curvature is loaded, as between other settings."""
    model = compiled(tfkfac.KFAC(SGD(0.1, momentum=0.9)))
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    other = compiled(tfkfac.KFAC(SGD(0.1)))
    with pytest.warns(UserWarning, match=r"not use .*'wrapped optimizers'"):
        other.optimizer.load_own_variables(store)


# ---------------------------------------------------------- unknown arguments
@every_class
def test_unknown_arguments(make: Any) -> None:
    for name, value, words in (
        ("lr", 0.1, "`(learning_rate|inner_optimizer)`"),
        ("decay", 0.1, "keras.optimizers.schedules"),
        ("clipnorm", 1.0, r"clipnorm=1.0\)|`damping`"),
        ("use_ema", True, r"use_ema=True\)|`damping`"),
        ("loss_scale_factor", 2.0, "LossScaleOptimizer"),
        ("momentun", 0.9, "Is it `momentum`"),
        ("unheard", 1, "The arguments are: .*momentum.*name"),
    ):
        message = f"{make.__name__} got .*argument '{name}'.*({words}).*Receiv"
        with pytest.raises(TypeError, match=message):
            make(**{name: value})


def test_adam_as_inner_optimizer_warns() -> None:
    with pytest.warns(UserWarning, match=r"Adam as `inner.*KFAC\(\).*`KFAC\(r"):
        tfkfac.KFAC("adam")


# ---------------------------------------------------- rates of Adam's size
KFAC, schedules = tfkfac.KFAC, keras.optimizers.schedules
SMALL_RATES: list[Any] = [
    lambda: KFAC(learning_rate=1e-3),
    lambda: KFAC(1e-3),
    lambda: KFAC(tfkfac.schedules.FitDecay(1e-3)),
    lambda: KFAC(SGD(1e-3, momentum=0.9)),
    lambda: KFAC(schedules.CosineDecay(1e-3, 100)),
    lambda: KFAC(learning_rate=0.02, step="spectral"),
]
WARM_UP = schedules.CosineDecay(0.0, 999, warmup_target=1.0, warmup_steps=500)
RATES: list[Any] = [
    lambda: KFAC(learning_rate=0.01),
    lambda: KFAC(keras.optimizers.Adam(1e-3)),
    lambda: KFAC(learning_rate=0.0),
    lambda: KFAC(WARM_UP),
    lambda: KFAC(schedules.ExponentialDecay(0.1, 1, 0.1)),
    lambda: tfkfac.FOSI(1e-3),
    lambda: KFAC.from_config(KFAC(learning_rate=1e-3).get_config()),
]
TOO_SMALL = "(?s)learning rate of 'kfac'.*divide its rates by the largest"


def rate_warnings(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    texts = [str(item.message) for item in caught]
    return [text for text in texts if re.search(TOO_SMALL, text)]


def test_small_rates_of_the_constructor_warn() -> None:
    assert [len(rate_warnings(make)) for make in SMALL_RATES] == [1] * 6
    # The last optimizer is restored from one that has warned.
    counts = [len(rate_warnings(make)) for make in RATES]
    assert counts == [0] * 6 + [1]


def fit(optimizer: Any, rate: Any = None, epochs: int = 3) -> Any:
    """Return a function that trains with a rate by epoch."""
    model = compiled(optimizer)
    schedulers = [keras.callbacks.LearningRateScheduler(rate)] if rate else []
    return lambda: model.fit(X, Y, len(X), epochs, 0, schedulers)


@pytest.mark.parametrize(
    ("rate", "epochs", "count"),
    [
        (lambda epoch: 1e-3 * 0.9**epoch, 2, 1),
        (lambda epoch: [0.0, 0.01, 1.0][epoch], 3, 0),
        (lambda epoch: [1.0, 0.1, 1e-3][epoch], 3, 0),
    ],
)
def test_small_rates_of_a_callback_warn(
    rate: Any, epochs: int, count: int
) -> None:
    """Once, if they do not rise; a later `fit` may use small rates."""
    train = fit(tfkfac.KFAC(skip_layers=keras.layers.Dense), rate, epochs)
    assert len(rate_warnings(train)) == count
    assert not rate_warnings(train)


def test_small_rates_that_are_assigned_warn() -> None:
    """Once, before the first step."""
    trained, scaler = tfkfac.KFAC(), keras.optimizers.LossScaleOptimizer
    assert not rate_warnings(fit(trained, epochs=1))
    for optimizer, count in (
        (tfkfac.KFAC(0.1), 1),
        (scaler(tfkfac.KFAC()), 1),
        (trained, 0),
    ):
        texts = []
        for rate in (1e-3, 1e-4):
            assign = functools.partial(
                setattr, optimizer, "learning_rate", rate
            )
            texts += rate_warnings(assign)
        assert len(texts) == count


def test_unknown_arguments_of_a_subclass() -> None:
    class Other(tfkfac.KFAC):
        def __init__(self, own: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    assert Other(own=2, damping=0.5).damping == 0.5
    with pytest.raises(TypeError, match=r"'clipnorm'.*`inner_optimizer=keras"):
        Other(clipnorm=1.0)


def test_settings_of_a_loss_scaler() -> None:
    scaler = tfkfac.LossScaleOptimizer(tfkfac.KFAC(inner_sgd()))
    assert scaler.weight_decay == DECAY
    with pytest.raises(AttributeError, match="`inner_optimizer=keras"):
        scaler.clipnorm = 1.0
