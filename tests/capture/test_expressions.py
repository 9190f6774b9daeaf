"""Expressions of `skip_layers` that would take for ever."""

import time

import pytest

import tfkfac
from tests.support.small import compiled_mlp, kfac_of
from tfkfac.capture.expressions import check_expression, matches_whole

LONG = "a" * 5000 + "!"


@pytest.mark.parametrize(
    "expression", ["(a+)+$", "(a|a)*b", "(a*)*(a*)*c", "a*a*a*a*a*a*a*b"]
)
def test_time_is_linear(expression: str) -> None:
    """Python needs more than the age of the universe for each of these."""
    check_expression(expression)
    start = time.process_time()
    assert not matches_whole(expression, [LONG, "x"])
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("dense", ["dense"]),
        ("dense.1", ["dense_1"]),
        (r"dense(_\d+)?", ["dense", "dense_1"]),
        ("(?i)DENSE", ["dense"]),
        (".*/dense", ["block/dense"]),
        ("(?!dense).*", ["block/dense", "conv(1)"]),
        ("(?x) den  se  # a comment", ["dense"]),
        ("conv[(]1.", ["conv(1)"]),
    ],
)
def test_what_matches(expression: str, names: list[str]) -> None:
    every = ["dense", "dense_1", "block/dense", "conv(1)"]
    check_expression(expression)
    assert [n for n in every if matches_whole(expression, [n])] == names


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("(a", "unterminated"),
        ("(?=)(a+)+$", "no repeated group"),
        ("(?x)(a|a) *b", "no repeated group"),
        ("(?=)a*a*a*a*b", "at most 3 repeats"),
    ],
)
def test_what_may_take_for_ever_is_refused(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tfkfac.KFAC(skip_layers=[expression])


def test_a_hostile_config() -> None:
    """It loads, and matches nothing or something at once."""
    config = tfkfac.KFAC(skip_layers=["(hid+)+en|(a+)+$"]).get_config()
    copy = tfkfac.KFAC.from_config(config)
    model = compiled_mlp(skip_layers=list(copy.get_config()["skip_layers"]))
    assert list(kfac_of(model).factors()) == ["logits"]
