"""What the demonstration says when it is asked for what it cannot do."""

import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "tools" / "demo.sh"


@pytest.mark.parametrize(
    ("arguments", "received"),
    [([], "nothing"), (["--epochs", "2"], "--epochs"), (["0"], "0")],
)
def test_workers_without_a_number(arguments: list[str], received: str) -> None:
    """Before an environment is made."""
    done = subprocess.run(
        ["bash", str(SCRIPT), "--workers", *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert not done.stdout
    said = "--workers needs a number: bash tools/demo.sh --workers 2 Received: "
    assert done.stderr == f"{said}{received}\n"
