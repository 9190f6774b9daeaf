import keras
import numpy as np
import pytest

import arguments
import report
import tfkfac
import train_classifier
from optimizers import FOSI_NAMES, NAMES
from preparation import make_model
from recording import Recorder
from tests.support import tiny


def build(text, name):
    """A tiny model with an optimizer of the command line."""
    text = f"--optimizer {name} --batch-size 20 {text}"
    options = arguments.parse(text.split())
    keras.utils.set_random_seed(0)
    return make_model(name, tiny.data(), options)


def fit(model, epochs):
    """Two steps for each epoch."""
    recorder, data = Recorder(), tiny.data()
    model.fit(
        data.train_batches(20, 0),
        epochs=epochs,
        shuffle=False,
        validation_data=data.test_batches(),
        callbacks=[recorder],
        verbose=0,
    )
    return recorder


@pytest.fixture(autouse=True)
def tiny_only(monkeypatch):
    tiny.install(monkeypatch)


FOSI_SETTINGS = "--fosi-warmup 2 --fosi-interval 2 --fosi-directions 2"
COMPARED = ("fosi", "sgdm")  # in a test of their own


@pytest.mark.parametrize("name", [n for n in NAMES if n not in COMPARED])
def test_trains(name):
    text, kinds = "", ["plain"] * 3  # without the first step
    if name in FOSI_NAMES:
        text, kinds = FOSI_SETTINGS, ["warmup", "estimation", "plain"]
    if name == "kfac":
        text = "--factor-interval 2 --inverse-interval 3"
        kinds = ["plain", "factor", "inverse"]
    model = build(f"--epochs 2 --learning-rate 0.1 {text}", name)
    start = model.get_weights()
    recorder = fit(model, epochs=2)
    assert np.isfinite(recorder.losses).all()
    for before, after in zip(start, model.get_weights(), strict=True):
        assert np.isfinite(after).all()
        assert (before != after).any()
    # It has decayed to 0.
    assert float(np.array(model.optimizer.learning_rate)) == 0
    seconds = recorder.seconds_by_kind
    assert list(seconds) == list(dict.fromkeys(kinds))
    assert [len(x) for x in seconds.values()] == [
        kinds.count(kind) for kind in seconds
    ]


@pytest.mark.parametrize(
    ("name", "inner", "momentum"),
    [
        ("fosi", keras.optimizers.Adam, None),
        ("fosi_adam", keras.optimizers.Adam, None),
        ("fosi_sgd", keras.optimizers.SGD, 0.9),
        ("kfac", keras.optimizers.SGD, 0.5),
    ],
)
def test_inner_optimizer(name, inner, momentum):
    optimizer = build("--learning-rate 0.3", name).optimizer
    assert type(optimizer.inner_optimizer) is inner
    assert getattr(optimizer.inner_optimizer, "momentum", None) == momentum
    assert float(np.array(optimizer.learning_rate)) == pytest.approx(0.3)


def test_sgdm_is_sgd():
    both = [build("", name) for name in ("sgd", "sgdm")]
    configs = [model.optimizer.get_config() for model in both]
    for config in configs:
        assert config["momentum"] == 0.9
        del config["learning_rate"], config["name"]
    assert configs[0] == configs[1]


def test_settings_reach_fosi():
    optimizer = build(
        "--fosi-interval 7 --fosi-warmup 0 --fosi-directions 3 "
        "--fosi-alpha 0.5 --fosi-layout columns --accelerator-fraction 0",
        "fosi_adam",
    ).optimizer
    config = optimizer.get_config()
    given = {"warmup_steps": 0, "num_largest": 3, "layout": "columns"}
    assert config.items() >= given.items()
    assert (optimizer.update_interval, optimizer.alpha) == (7, 0.5)
    defaults = tfkfac.FOSI().get_config()
    config = build("--fosi-directions 5", "fosi_adam").optimizer.get_config()
    unlike = {key for key in defaults if config[key] != defaults[key]}
    assert unlike <= {"inner_optimizer"}


@pytest.mark.parametrize("name", ["kfac", "fosi_adam"])
def test_traffic_table(name):
    optimizer = build("", name).optimizer
    lines = report.traffic_table(optimizer).split("\n")
    kinds = [line.split(" step")[0] for line in lines[1:-1]]
    assert kinds == list(optimizer.communication_bytes())
    assert f"{optimizer.state_bytes()['total']:,} bytes" in lines[-1]
    assert max(map(len, lines)) <= 80


def test_comparison(monkeypatch, capsys, tmp_path):
    plot = tmp_path / "plots" / "plot.png"
    text = f"--optimizer {' '.join(COMPARED)} --batch-size 20 --epochs 2 "
    text += f"{FOSI_SETTINGS} --accelerator-fraction 0 --plot {plot}"
    monkeypatch.setattr("sys.argv", ["train_classifier.py", *text.split()])
    train_classifier.main()
    said = capsys.readouterr().out
    assert "FOSI 'fosi' of model" in said
    assert "idle share of each worker: 0.0%" in said
    _, kinds = said.split("kind of step")
    assert [line.split()[:3] for line in kinds.split("\n")[2:6]] == [
        ["fosi", "warmup", "1"],
        ["fosi", "estimation", "1"],
        ["fosi", "plain", "1"],
        ["sgdm", "plain", "3"],
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_no_replica_to_spare(monkeypatch, capsys):
    """Said before the first optimizer has been trained."""
    text = "--optimizer sgd fosi --batch-size 20 --accelerator-fraction 0.5"
    monkeypatch.setattr("sys.argv", ["train_classifier.py", *text.split()])
    with pytest.raises(SystemExit) as exit_:
        train_classifier.main()
    assert "error: --optimizer fosi: Argument" in exit_.value.code
    assert "there would be no worker" in exit_.value.code
    assert "Training" not in capsys.readouterr().out
