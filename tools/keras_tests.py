"""Runs Keras' own tests of callbacks with K-FAC as the optimizer.

    python tools/keras_tests.py [--source ARCHIVE] [PYTEST OPTIONS]

The tests come from the source distribution of the installed version of Keras,
which pip downloads unless `--source` names it: wheels have none. Every
`Model.compile` in them gets `tfkfac.KFAC()` in place of its optimizer. An
optimizer that averages the weights (`use_ema`) or has a schedule, which such
tests are about, becomes the inner optimizer. The exit status is 1 if a test
fails that is not in `CANNOT_PASS`.
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import pytest

import tfkfac

FILES = (
    "backup_and_restore",
    "csv_logger",
    "early_stopping",
    "model_checkpoint",
    "reduce_lr_on_plateau",
    "swap_ema_weights",
    "terminate_on_nan",
)
# Tests that are about the optimizer that is replaced, and why they fail.
CANNOT_PASS: dict[str, str] = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests and prints their outcomes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=pathlib.Path, help="a .tar.gz file")
    options, others = parser.parse_known_args(arguments)
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        tests = extract_tests(options.source or download(place), place)
        with kfac_in_compile():
            pytest.main(
                [*map(str, tests), f"--rootdir={place}", "-c", "/dev/null",
                 "--import-mode=importlib", "-p", "no:cacheprovider", *others],
                plugins=[outcomes],
            )  # fmt: skip
    for name, outcome in sorted(outcomes.of_tests.items()):
        print(f"{outcome:8}{name}")
    failed = {n for n, state in outcomes.of_tests.items() if state == "failed"}
    for name in sorted(failed & set(CANNOT_PASS)):
        print(f"{name} cannot pass: {CANNOT_PASS[name]}")
    return int(not outcomes.of_tests or bool(failed - set(CANNOT_PASS)))


class Outcomes:
    """A pytest plugin that keeps the outcome of each test."""

    def __init__(self) -> None:
        self.of_tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps an outcome; a failure of set-up or tear-down is a failure."""
        name = report.nodeid.split("/")[-1]
        if report.when == "call" or report.outcome != "passed":
            self.of_tests[name] = report.outcome


def download(folder: pathlib.Path) -> pathlib.Path:
    """Downloads the source distribution of the installed Keras."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
         "--no-binary", "keras", f"keras=={keras.__version__}"],
        cwd=folder, check=True,
    )  # fmt: skip
    return next(folder.glob("keras-*.tar.gz"))


def extract_tests(
    source: pathlib.Path, folder: pathlib.Path
) -> list[pathlib.Path]:
    """Extracts the tests of callbacks from a source distribution."""
    wanted = {f"{name}_test.py" for name in FILES}
    tests = []
    with tarfile.open(source) as archive:
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if path.name in wanted and path.parent.name == "callbacks":
                archive.extract(member, folder, filter="data")
                tests.append(folder / path)
    return sorted(tests)


@contextlib.contextmanager
def kfac_in_compile() -> Iterator[None]:
    """Replaces the optimizer of each `Model.compile` by K-FAC."""
    # `load_model` compares a model's `compile` with that of this class.
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    below = owner.compile

    def compile(
        self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any
    ) -> None:
        below(self, in_place_of(optimizer), *args, **kwargs)

    owner.compile = compile
    try:
        yield
    finally:
        owner.compile = below


def in_place_of(optimizer: Any) -> Any:
    """Return the optimizer that replaces the given optimizer."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = in_place_of(optimizer.inner_optimizer)
        return keras.optimizers.LossScaleOptimizer(inner)
    if isinstance(optimizer, tfkfac.KFAC):  # of a loaded model
        return optimizer
    if isinstance(optimizer, str):
        return tfkfac.KFAC()
    config = optimizer.get_config()
    stays = config["use_ema"] or isinstance(config["learning_rate"], dict)
    return tfkfac.KFAC(optimizer) if stays else tfkfac.KFAC()


if __name__ == "__main__":
    sys.exit(main())
