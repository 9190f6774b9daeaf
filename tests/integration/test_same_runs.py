"""All ways to train, save and load end with the same weights."""

import pathlib

import pytest

from tests.support.same_run import pairs, same_run

# The optimizer of each way in the default tests; all other pairs are slow.
DEFAULT = {
    ".keras": "our scale",
    ".h5": "FOSI in columns",
    ".weights.h5": "subclassed",
    "state tree": "eigen",
    "checkpoint": "spectral sums",
    "train step": "inverse",
    "batch": "drawn",
    "steps": "FOSI",
    "eager": "GaussNewton",
    "loop": "Keras' scale",
    "attach": "inverse",
    "loss scale": "inverse",
    "one worker": "inverse",
    "one replica": "FOSI",
}
PAIRS = [(name, way) for name, way, _ in pairs()]
assert {(name, way) for way, name in DEFAULT.items()} <= {*PAIRS}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name,
            way,
            marks=[] if DEFAULT.get(way) == name else [pytest.mark.slow],
        )
        for name, way in PAIRS
    ],
)
def test_same_run(name: str, way: str, tmp_path: pathlib.Path) -> None:
    same_run(name, way, tmp_path)
