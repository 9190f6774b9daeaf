import pytest

import arguments


def parse(text: str):
    return arguments.parse(text.split())


def test_defaults_compare_three_on_digits():
    options = parse("")
    assert options.dataset == "digits"
    assert list(options.learning_rate) == ["kfac", "sgd", "adam"]
    assert options.learning_rate["kfac"] == 0.1
    assert options.target == 0.98
    assert options.kfac_options == options.fosi_options == {}


def test_only_given_options_reach_kfac():
    options = parse("--damping 0.1 --inverse-interval 7 --kl-clip none")
    assert options.kfac_options == {
        "damping": 0.1,
        "inverse_update_interval": 7,
        "kl_clip": None,
    }


def test_only_given_options_reach_fosi():
    options = parse(
        "--optimizer fosi_sgd --fosi-interval 9 --fosi-warmup 0 "
        "--fosi-directions 4 --fosi-alpha 0.2 --fosi-layout columns "
        "--accelerator-fraction 0.25"
    )
    assert options.fosi_options == {
        "update_interval": 9,
        "warmup_steps": 0,
        "num_largest": 4,
        "alpha": 0.2,
        "layout": "columns",
        "accelerator_fraction": 0.25,
    }
    assert parse("--optimizer fosi").fosi_options == {}


def test_fosi_has_the_learning_rate_of_its_inner_optimizer():
    options = parse("--optimizer fosi fosi_adam fosi_sgd sgdm")
    assert options.learning_rate == {
        "fosi": 0.008,
        "fosi_adam": 0.008,
        "fosi_sgd": 0.1,
        "sgdm": 0.1,
    }
    options = parse(
        "--optimizer fosi_sgd sgdm --learning-rate fosi_sgd=0.2 sgdm=0.3"
    )
    assert options.learning_rate == {"fosi_sgd": 0.2, "sgdm": 0.3}


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
        ("--fosi-interval 5", "go with --optimizer fosi or fosi_adam"),
        ("--accelerator-fraction 0.5", "go with --optimizer fosi"),
        ("--optimizer fosi --fosi-interval 0", "above 0; received '0'"),
        ("--optimizer fosi --fosi-warmup -1", "received '-1'"),
        ("--optimizer fosi --fosi-directions 0", "received '0'"),
        ("--optimizer fosi --fosi-alpha nan", "received 'nan'"),
        ("--optimizer fosi --fosi-layout x", "invalid choice: 'x'"),
        ("--optimizer fosi --accelerator-fraction 1", "below 1; received '1'"),
        ("--optimizer fosi --damping 1", "go with --optimizer kfac"),
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
