import argparse
import pathlib

import pytest

from benchmarks.variants import parse


def test_all_parts(tmp_path: pathlib.Path) -> None:
    text = f"kfac-eigen@{tmp_path}:damping=0.1:max_factor_dim=null:name=x"
    variant = parse(text)
    assert variant.text == text
    assert variant.name == "kfac-eigen"
    assert variant.folder == tmp_path
    assert variant.arguments == {
        "damping": 0.1,
        "max_factor_dim": None,
        "name": "x",
    }


@pytest.mark.parametrize(
    "text,message",
    [
        ("sdg", "'sdg' is none of sgd"),
        ("fosi-lion", "'fosi-lion' is none of"),
        ("sgd@/no/such/folder", "'/no/such/folder' is no folder"),
        ("sgd:=1", "'=1' is not KEY=VALUE"),
        ("kfac-eigen:factor_update_interval=1", "is set by --mixes"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)
