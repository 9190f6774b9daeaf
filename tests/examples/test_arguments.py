import pytest

import arguments


def parse(text: str):
    return arguments.parse(text.split())


def test_defaults_compare_everything_on_digits():
    options = parse("")
    assert options.dataset == "digits"
    assert list(options.learning_rate) == ["kfac", "sgd", "adam"]
    assert options.learning_rate["kfac"] == 0.1
    assert options.target == 0.98
    assert options.kfac_options == {}


def test_only_given_options_reach_kfac():
    options = parse("--damping 0.1 --inverse-interval 7 --kl-clip none")
    assert options.kfac_options == {
        "damping": 0.1,
        "inverse_update_interval": 7,
        "kl_clip": None,
    }


def test_learning_rates():
    options = parse("--optimizer kfac adam --learning-rate adam=0.5")
    assert options.learning_rate == {"kfac": 0.1, "adam": 0.5}
    options = parse("--optimizer kfac adam --learning-rate 0.3")
    assert options.learning_rate == {"kfac": 0.3, "adam": 0.3}


def test_unknown_data_set_has_no_target():
    assert parse("--dataset eurosat").target is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--optimizer lbfgs", "invalid choice: 'lbfgs'"),
        ("--optimizer sgd sgd", "once"),
        ("--optimizer sgd --damping 1", "go with --optimizer kfac"),
        ("--learning-rate x", "received 'x'"),
        ("--learning-rate 0", "above 0; received '0'"),
        ("--learning-rate sgd=1 2", "NAME=VALUE"),
        ("--optimizer sgd --learning-rate adam=1", "'adam' is not among"),
        ("--batch-size 0", "above 0; received '0'"),
        ("--epochs two", "received 'two'"),
        ("--seed -1", "received '-1'"),
        ("--target 1.5", "received '1.5'"),
        ("--damping nan", "received 'nan'"),
        ("--kl-clip inf", "received 'inf'"),
        ("--plot x.txt", "received 'x.txt'"),
    ],
)
def test_wrong_argument(text, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(text)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
