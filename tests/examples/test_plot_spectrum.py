import keras
import numpy as np
import pytest
import tensorflow as tf

import plot_spectrum
from common.optimizers import parse_optimizer
from tests.support import tiny


@pytest.fixture(autouse=True)
def tiny_only(monkeypatch):
    tiny.install(monkeypatch)


def hessian(model, images, labels):
    variables = model.trainable_variables
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as inner:
            loss = model.compute_loss(y=labels, y_pred=model(images))
        slopes = inner.gradient(loss, [v.value for v in variables])
        slope = tf.concat([tf.reshape(g, [-1]) for g in slopes], 0)
    columns = outer.jacobian(slope, [v.value for v in variables])
    size = slope.shape[0]
    return tf.concat([tf.reshape(c, [size, -1]) for c in columns], 1).numpy()


def test_values_are_those_of_the_current_weights():
    data = tiny.data()
    model = tiny.network(tiny.SHAPE, tiny.CLASSES)
    model.compile(
        parse_optimizer("adam").make(4, {}),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batch = next(iter(data.train_batches(30, 0)))
    recorder = plot_spectrum.SpectrumRecorder(batch, 3, 3, 2, lanczos_steps=19)
    wanted = [hessian(model, *batch)]
    model.fit(
        data.train_batches(10, 0),
        shuffle=False,
        callbacks=[recorder],
        verbose=0,
    )
    wanted.append(hessian(model, *batch))
    assert list(recorder.spectra) == [0, 3, 4]
    for step, matrix in zip([0, 4], wanted, strict=True):
        values = np.linalg.eigvalsh(matrix)
        np.testing.assert_allclose(
            recorder.spectra[step], [*values[:2], *values[-3:]], atol=1e-4
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--largest -1", "not below 0; received '-1'"),
        ("--largest 0 --smallest 0", "must not both be 0"),
        ("--lanczos-steps 9", "9 are too few for 10 values"),
        ("--optimizer sgd adam", "one spectrum at a time"),
    ],
)
def test_wrong_argument(text, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        plot_spectrum.parse(text.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
