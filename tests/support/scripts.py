"""Run scripts of tools/ and examples/ in forks of one process.

The process imports TensorFlow once, so that a script starts in milliseconds.
It has the module path that `python SCRIPT` has. A dry run ends with exit status
0 after the arguments are parsed, or at the first layer of a script without
arguments.
"""

import argparse
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
MODULES = ("tfkfac", "sklearn.model_selection")
LIMIT_S = 300  # of one script


class Done(NamedTuple):
    """The exit status of a script, and what it printed."""

    code: int
    output: str


class Job(NamedTuple):
    """A script with its arguments, and True to end before its work."""

    words: Sequence[str]
    dry: bool = True


def run_all(jobs: Sequence[Job], folder: pathlib.Path) -> list[Done]:
    """Run scripts in a folder, one after the other."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(jobs),
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "HOME": str(folder), "MPLBACKEND": "agg"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]


def fork(words: Sequence[str], dry: bool) -> Done:
    """Run one script in a fork of this process."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os._exit(execute(words, dry))
        _, status = os.waitpid(child, 0)
        file.seek(0)
        output = file.read().decode(errors="replace")
    return Done(os.waitstatus_to_exitcode(status), output)


def execute(words: Sequence[str], dry: bool) -> int:
    """Run one script in this process; return its exit status."""
    signal.alarm(LIMIT_S)
    sys.argv = [*words]
    sys.path[0] = str(pathlib.Path(words[0]).parent)
    if dry:
        end_early()
    code: Any = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def end_early() -> None:
    """End this process where the script would begin with its work."""
    import keras

    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        end()

    def end(*_: Any, **__: Any) -> None:
        sys.stdout.flush()
        os._exit(0)

    argparse.ArgumentParser.parse_args = parse_and_end  # type: ignore
    keras.layers.Layer.__init__ = end


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    for job in json.load(sys.stdin):
        print(json.dumps(fork(*job)), flush=True)
