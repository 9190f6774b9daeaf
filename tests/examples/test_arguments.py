import pytest

from common import arguments

DEFAULTS = arguments.Defaults(epochs=7, batch_size=32, rates={"sgd": 0.2})


def parse(text: str):
    parser = arguments.parser(None, DEFAULTS)
    return arguments.parse(parser, text.split())


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
