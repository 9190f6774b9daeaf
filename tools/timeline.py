"""Shows when the workers of a job compute and when they communicate.

    python tools/timeline.py                              # two workers
    python tools/timeline.py --workers 4 --plot step.png dp_kfac
    python tools/timeline.py --width 512 --depth 4 comm_opt hybrid_opt

A small model trains on processes of this machine. TensorFlow's profiler records
one step of each kind: a plain one, one that updates the factors, and one that
decomposes them. For each kind and worker a table has the milliseconds in which
it computes and in which messages are on their way, and the share of the latter
in which it computes, too; then the messages of layers that worker 0 sends or
receives, in the order of layers. Where workers share a processor, times are
noisy.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch import environments
from timelines.events import (
    Event,
    Interval,
    length,
    merged,
    overlap,
    sent_together,
)
from timelines.recording import KINDS, MARK, work

MODES = ("comm_opt", "mem_opt", "hybrid_opt", "dp_kfac")
# Names of what is sent of layers, see `Exchange`.
OF_LAYERS = re.compile(r"([a-z]+)(?:_\d+)?/layers_(\d+)_(\d+)/")
# What each worker has seen of a kind of step, and the paths of the layers.
Steps = Mapping[str, Sequence[Sequence[Event]]]
Found = tuple[Steps, Sequence[str]]


def run(mode: str, options: argparse.Namespace) -> Found:
    """Records a mode.

    Raises:
        RuntimeError: If a worker fails.
    """
    arguments = ["--width", str(options.width), "--depth", str(options.depth)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments, mode],
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments(options.workers)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"A worker of mode {mode!r} has failed.")
    workers = [
        json.loads(line.removeprefix(MARK))
        for output in outputs
        for line in output.splitlines()
        if line.startswith(MARK)
    ]
    steps = {
        kind: sent_together(
            [[Event(*e) for e in one["kinds"][kind]] for one in workers]
        )
        for kind in KINDS
    }
    return steps, workers[0]["layers"]


# ------------------------------------------------------------------ the tables
def rows(found: Found) -> Iterator[str]:
    """The tables of a mode, line by line."""
    steps, layers = found
    yield "| step | worker | ms | computes | messages | overlapped |"
    yield "|---|---|---|---|---|---|"
    for kind, workers in steps.items():
        for worker, events in enumerate(workers):
            own, sent = parts(events)
            whole = max(e.end for e in events) - start_of(workers)
            numbers = (whole, length(own), length(sent))
            times = (f"{1e3 * number:.0f}" for number in numbers)
            hidden = share(overlap(own, sent), length(sent))
            yield f"| {' | '.join([kind, str(worker), *times, hidden])} |"
    yield "| step | sent | layers | from ms | to ms | overlapped |"
    yield "|---|---|---|---|---|---|"
    for kind, workers in steps.items():
        own, _ = parts(workers[0])
        for (what, first, last), sent in messages(workers[0]):
            names = " to ".join(dict.fromkeys([layers[first], layers[last]]))
            ends = min(sent)[0], max(end for _, end in sent)
            times = (f"{1e3 * (t - start_of(workers)):.0f}" for t in ends)
            hidden = share(overlap(own, sent), length(sent))
            yield f"| {' | '.join([kind, what, names, *times, hidden])} |"


def parts(events: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """When a worker computes, and when messages are on their way."""
    own = [e.interval for e in events if e.message is None]
    return own, [e.interval for e in events if e.message is not None]


def messages(
    events: Sequence[Event],
) -> list[tuple[tuple[str, int, int], list[Interval]]]:
    """Those of layers: what they bring, the first and last layer, and when."""
    found: dict[tuple[str, int, int], list[Interval]] = {}
    for event in events:
        match = OF_LAYERS.search(event.name)
        if event.message is not None and match:
            key = match[1], int(match[2]), int(match[3])
            found.setdefault(key, []).append(event.interval)
    return sorted(found.items())


def start_of(workers: Sequence[Sequence[Event]]) -> float:
    """When the first worker has begun with a step."""
    return min(event.start for events in workers for event in events)


def share(part: float, whole: float) -> str:
    """A part in percent."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


# -------------------------------------------------------------------- the plot
def draw(path: pathlib.Path, found: Mapping[str, Found]) -> None:
    """Plots what all workers do, each kind of step by itself."""
    from matplotlib.figure import Figure

    places = [
        (f"{mode}, {kind} step", workers)
        for mode, (steps, _) in found.items()
        for kind, workers in steps.items()
    ]
    height = sum(1 + 0.5 * len(workers) for _, workers in places)
    figure = Figure(figsize=(12, height), layout="constrained")
    plots = figure.subplots(len(places), squeeze=False)[:, 0]
    for (title, workers), axes in zip(places, plots, strict=True):
        start = start_of(workers)
        for worker, events in enumerate(workers):
            for lane, times in enumerate(parts(events)):
                bars = [
                    (1e3 * (a - start), 1e3 * (b - a)) for a, b in merged(times)
                ]
                y = worker + 0.4 * lane
                axes.broken_barh(bars, (y, 0.4), color=f"C{lane}")
        names = [f"worker {worker}" for worker in range(len(workers))]
        axes.set_yticks([y + 0.4 for y in range(len(workers))], names)
        axes.set(title=f"{title}: computing, and messages below", xlabel="ms")
        axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    options = parse(arguments)
    if options.worker:
        (mode,) = options.modes
        work(mode, options.width, options.depth)
        return 0
    load = os.getloadavg()[0]
    found = {}
    for mode in options.modes or ("comm_opt", "dp_kfac"):
        found[mode] = run(mode, options)
        print(f"\n{mode}, {options.workers} workers, load {load:.1f}")
        print("\n".join(rows(found[mode])), flush=True)
    if options.plot:
        draw(options.plot, found)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(
        prog=pathlib.Path(__file__).name,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modes", nargs="*", metavar="MODE")
    parser.add_argument("--workers", type=int, choices=(2, 4), default=2)
    parser.add_argument("--width", type=int, default=1024, metavar="UNITS")
    parser.add_argument("--depth", type=int, default=6, metavar="LAYERS")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    unknown = set(options.modes) - set(MODES)
    if unknown:
        parser.error(f"MODE must be one of {[*MODES]}: {sorted(unknown)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs Matplotlib: pip install '.[examples]'")
    return options


if __name__ == "__main__":
    sys.exit(main())
