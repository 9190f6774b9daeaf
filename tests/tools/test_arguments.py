"""Command lines that the tools refuse, and the words of the errors."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

import benchmark
import plan
import time_to_target

CLUSTER = "--flops 1T --bandwidth 10Gbit --latency 5us"
REFUSED: list[tuple[Callable[[list[str]], Any], str, str]] = [
    *(
        (benchmark.parse_arguments, words, message)
        for words, message in (
            ("--models M9", "unknown model 'M9'"),
            ("--variants fosi-lion", "unknown variant 'fosi-lion'"),
            ("--variants sgd@/no/such/folder", "'/no/such/folder' is no"),
            ("--variants sgd:=1", "'=1' is not KEY=VALUE"),
            ("--mixes 10", "'10' is not FACTOR,INVERSE"),
        )
    ),
    *(
        (plan.main, words, message)
        for words, message in (
            ("", "either MODEL, --model or --papers"),
            ("ResNet50 --papers", "either MODEL"),
            ("ResNet50 --max-factor-dim 0", "must be a whole number above 0"),
            (f"--model plan:no_model {CLUSTER}", "no attribute 'no_model'"),
            ("ResNet50", "--flops is needed"),
            ("ResNet50 --flops 1T --workers 2", "--bandwidth is"),
            ("ResNet50 --flops lots", "received 'lots'"),
            ("ResNet50 --intervals 10", "not FACTOR,INVERSE"),
            (f"Sequential {CLUSTER}", "MODEL must be of"),
        )
    ),
    *(
        (time_to_target.parse_arguments, words, message)
        for words, message in (
            ("--problem gan", "--problem must be of autoencoder, mlp"),
            ("--size tiny --problem resnet20", "received resnet20"),
            ("--method lion", "'lion' is none of sgd, adam"),
            ("--rates -1", "must be a number of at least 0; received '-1'"),
            ("--data kmnist=/tmp", "must be mnist or fashion_mnist, = and"),
            ("--data mnist=/no/such", "= and a directory; received"),
            ("--optimizer lion.py:make", "must be FILE.py:FUNCTION"),
            ("--size tiny --search-size small", "are not searched"),
        )
    ),
]


@pytest.mark.parametrize(("parse", "words", "message"), REFUSED)
def test_refused(
    parse: Callable[[list[str]], Any], words: str, message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        parse(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "parse", "want"),
    [
        ("2.5e3Gflop/s", plan.flops, 2.5e12),
        ("100Gbit", plan.bandwidth, 12.5e9),
        ("12.5 GB/s", plan.bandwidth, 12.5e9),
        ("5us", plan.latency, 5e-6),
        *((text, plan.flops, None) for text in ("-1", "nan", "0")),
        ("100G", plan.bandwidth, None),
        ("5 apples", plan.latency, None),
    ],
)
def test_units(text: str, parse: Any, want: float | None) -> None:
    if want is not None:
        assert parse(text) == pytest.approx(want)
        return
    with pytest.raises(argparse.ArgumentTypeError, match="received"):
        parse(text)
