"""Every way to train, save and load comes to the same."""

import pathlib

import pytest

from tests.support.same_run import pairs, same_run


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] if is_slow else [])
        for name, way, is_slow in pairs()
    ],
)
def test_same_run(name: str, way: str, tmp_path: pathlib.Path) -> None:
    same_run(name, way, tmp_path)
