"""Run Keras' own tests of callbacks with K-FAC as the optimizer.

    python tools/keras_tests.py [--source ARCHIVE] [PYTEST OPTIONS]

pip downloads the source distribution of the installed version of Keras (wheels
have no tests), unless `--source` names a file. Every `Model.compile` in the
tests gets `tfkfac.KFAC()` in place of its optimizer. An optimizer that averages
weights (`use_ema`) or has a schedule becomes the inner optimizer. The exit
status is that of pytest.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; return pytest's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=pathlib.Path, help="a .tar.gz file")
    options, pytest_arguments = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        tests = extract_tests(options.source or download(root), root)
        with kfac_in_compile():
            return pytest.main(
                [*map(str, tests), f"--rootdir={root}", "-c", "/dev/null",
                 "--import-mode=importlib", "-p", "no:cacheprovider", "-rA",
                 *pytest_arguments],
            )  # fmt: skip


def download(folder: pathlib.Path) -> pathlib.Path:
    """Download the source distribution of the installed Keras."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
         "--no-binary", "keras", f"keras=={keras.__version__}"],
        cwd=folder, check=True,
    )  # fmt: skip
    return next(folder.glob("keras-*.tar.gz"))


def extract_tests(
    source: pathlib.Path, folder: pathlib.Path
) -> list[pathlib.Path]:
    """Extract the tests of callbacks from a source distribution."""
    file_names = {f"{name}_test.py" for name in FILES}
    tests = []
    with tarfile.open(source) as archive:
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if path.name in file_names and path.parent.name == "callbacks":
                archive.extract(member, folder, filter="data")
                tests.append(folder / path)
    return sorted(tests)


@contextlib.contextmanager
def kfac_in_compile() -> Iterator[None]:
    """Replace the optimizer of each `Model.compile` by K-FAC."""
    # Patch the class whose `compile` method `load_model` compares.
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    original = owner.compile

    def compile(
        self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any
    ) -> None:
        original(self, in_place_of(optimizer), *args, **kwargs)

    owner.compile = compile
    try:
        yield
    finally:
        owner.compile = original


def in_place_of(optimizer: Any) -> Any:
    """Return the optimizer that replaces the given optimizer."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = in_place_of(optimizer.inner_optimizer)
        return keras.optimizers.LossScaleOptimizer(inner)
    if isinstance(optimizer, tfkfac.KFAC):  # from a loaded model
        return optimizer
    if isinstance(optimizer, str):
        return tfkfac.KFAC()
    config = optimizer.get_config()
    is_tested = config["use_ema"] or isinstance(config["learning_rate"], dict)
    return tfkfac.KFAC(optimizer) if is_tested else tfkfac.KFAC()


if __name__ == "__main__":
    sys.exit(main())
