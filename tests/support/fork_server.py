"""Server that forks Python programs, which need not import TensorFlow.

It reads requests, a line of JSON each, and prints lines of the number of a
request and its process identifier, and later of the number and the exit code.
A program ends like any Python program, with exit handlers and `sys.excepthook`.
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import runpy
import select
import sys
from collections.abc import Sequence
from typing import Any

from tests.support.attributes import import_tfkfac

INTERVAL_S = 0.02  # between two looks for programs that have ended


def serve() -> dict[str, Any]:
    """Fork for each request; return the request in the new process."""
    requests = sys.stdin.buffer.raw  # type: ignore[attr-defined]
    numbers: dict[int, int] = {}  # of requests by process
    while True:
        if select.select([requests], [], [], INTERVAL_S)[0]:
            line = requests.readline()
            if not line:  # the process of the tests has ended
                os._exit(0)
            request: dict[str, Any] = json.loads(line)
            if request["dry"] is not None:  # imported by many scripts
                with contextlib.suppress(ImportError):
                    importlib.import_module("sklearn.model_selection")
            # A lock of another thread would stay locked in the fork.
            assert len(os.listdir("/proc/self/task")) == 1
            if (process := os.fork()) == 0:
                return request
            numbers[process] = request["number"]
            print("started", request["number"], process, flush=True)
        with contextlib.suppress(ChildProcessError):
            process, status = os.waitpid(-1, os.WNOHANG)
            if process:
                code = os.waitstatus_to_exitcode(status)
                print("ended", numbers.pop(process), code, flush=True)


def prepare(request: dict[str, Any]) -> list[str]:
    """Set up the process of a program; return the words after `python`."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request["dry"] is not None:
        end_early(request["dry"])
    words: list[str] = request["words"]
    return words


def end_early(others: Sequence[Sequence[str]]) -> None:
    """End this process where a script would begin with its work.

    The script also parses other arguments. The interpreter is not shut down,
    which takes half a second.
    """
    import keras

    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(self: Any, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        for words in others:
            parse(self, words)
        self.print_help()
        sys.stdout.flush()
        os._exit(0)

    def end(_: Any, status: int = 0, message: str | None = None) -> None:
        print(message or "", file=sys.stderr, flush=True)
        os._exit(status)

    argparse.ArgumentParser.parse_args = parse_and_end  # type: ignore
    argparse.ArgumentParser.exit = end  # type: ignore
    keras.layers.Layer.__init__ = lambda *_, **__: os._exit(0)


if __name__ == "__main__":
    changes = import_tfkfac()  # programs can print it
    first, *rest = prepare(serve())
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        exec(code, {"__name__": "__main__"})
    elif first == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(pathlib.Path(first).parent))
        runpy.run_path(first, run_name="__main__")
