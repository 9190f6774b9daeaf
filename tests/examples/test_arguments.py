import pytest

from common import arguments

DEFAULTS = arguments.Defaults(epochs=7, batch_size=32, rates={"sgd": 0.2})


def parse(text: str):
    parser = arguments.parser(None, DEFAULTS)
    return arguments.parse(parser, text.split())


def test_settings_of_an_optimizer():
    text = "kfac:damping=0.1:kl_clip=null:distribution=dp_kfac:learning_rate=2"
    [choice] = parse(f"--optimizer {text}").optimizer
    assert choice.text == text
    optimizer = choice.make(10, DEFAULTS.rates)
    assert optimizer.damping == pytest.approx(0.1)
    config = optimizer.get_config()
    assert config["kl_clip"] is None
    assert config["distribution"] == "dp_kfac"
    assert float(optimizer.learning_rate) == pytest.approx(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--optimizer lbfgs", "'lbfgs' is none of kfac, sgd"),
        ("--optimizer sgd sgd", "once"),
        ("--optimizer kfac:damping", "'damping' is not KEY=VALUE"),
        ("--batch-size 0", "above 0; received '0'"),
        ("--target nan", "received 'nan'"),
    ],
)
def test_wrong_argument(text, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(text)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
