import csv

import keras
import numpy as np
import pytest
import tensorflow as tf

import plot_spectrum
from common.optimizers import parse_optimizer
from tests.support import tiny

TINY = (
    "--batch-size 10 --epochs 1 --examples 30 --lanczos-steps 8 "
    "--largest 3 --smallest 2 "
)


@pytest.fixture(autouse=True)
def tiny_only(monkeypatch):
    tiny.install(monkeypatch)


def run(text, directory):
    """The header and the rows of the CSV file."""
    plot = directory / "new" / "plot.png"
    plot_spectrum.main([*(TINY + text).split(), "--output", str(plot)])
    assert plot.read_bytes().startswith(b"\x89PNG")
    with plot.with_suffix(".csv").open() as file:
        header, *rows = csv.reader(file)
    return header, np.array(rows, float)


def test_plot_and_values(tmp_path, capsys):
    header, rows = run("--every 3", tmp_path)
    assert header == ["step", "min_1", "min_2", "max_3", "max_2", "max_1"]
    np.testing.assert_array_equal(rows[:, 0], [0, 3, 4])  # the last, too
    values = rows[:, 1:]
    assert (np.diff(values, axis=1) > 0).all()
    assert (values[:, 0] < 0).all()
    assert (values[:, -1] > 0).all()
    said = capsys.readouterr().out
    assert "Ritz values of the Hessian: mlp on digits, adam" in said
    assert f"{values[-1, -1]:.3g}" in said


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
        ("--every 0", "above 0; received '0'"),
        ("--largest -1", "not below 0; received '-1'"),
        ("--largest 0 --smallest 0", "must not both be 0"),
        ("--lanczos-steps 9", "9 are too few for 10 values"),
        ("--output values.csv", "received 'values.csv'"),
        ("--optimizer sgd adam", "one spectrum at a time"),
    ],
)
def test_wrong_argument(text, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        plot_spectrum.parse(text.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
