"""Command lines that the tools refuse, and the words of the errors."""

from collections.abc import Callable
from typing import Any

import pytest

import benchmark
import launch
import plan
import time_to_target

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
        (launch.parse, words, message)
        for words, message in (
            ("0 -- ls", "N must be at least 1; received 0"),
            ("2 --", "`-- COMMAND` must follow"),
            ("2 ls -l", "must follow the number of workers and the options"),
            ("two -- ls", "argument N: invalid int value: 'two'"),
            ("2 --min-workers 3 -- ls", "must be between 1 and 2"),
            ("2 --restarts -1 -- ls", "--restarts must be at least 0"),
        )
    ),
    *(
        (plan.main, words, message)
        for words, message in (
            ("", "either MODEL or --model"),
            ("ResNet50 --model plan:build", "either MODEL"),
            ("ResNet50 --max-factor-dim 0", "must be a whole number above 0"),
            ("--model plan:no_model", "no attribute 'no_model'"),
            ("Sequential", "MODEL must be of"),
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
