"""Time training steps of optimizers against each other.

    python tools/studies/benchmark.py            # M1 to M4, 100 dense layers
    python tools/studies/benchmark.py --variants sgd kfac-inverse@../old
    python tools/studies/benchmark.py --first-step 3 --models M3 MobileNetV2

A variant is NAME[@FOLDER][:KEY=VALUE...]: an optimizer, the folder from which
its library is imported (default: this tree), and arguments of its constructor.
Each variant is a process. The processes alternate every few steps, so that all
see the same load of the machine: trust the ratios more than the milliseconds.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import command  # isort: skip, sets the module path
from common.arguments import make_parser_of, parse_variant, positive
from common.tables import table

# Names of the variants and of the classes in Keras.
FIRST_ORDER = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "muon": "Muon"}
BASES = ("sgd", "adam")  # baselines of the ratios
SHAPES = {
    "M1": (784,),
    "M2": (28, 28, 1),
    "M3": (32, 32, 3),
    "M4": (784,),
    "MobileNetV2": (64, 64, 3),
}
USUAL_MODELS = ("M1", "M2", "M3", "M4", "mlp-64x100")
USUAL_VARIANTS = (
    "sgd",
    "adam",
    "kfac-inverse",
    "kfac-inverse:step=spectral",
    "fosi-adam",
)

CLASSES = 10
RATE = 1e-4  # small: the loss stays finite for any number of steps
FOSI_ESTIMATION = 2  # step in which FOSI estimates its directions, once
WARM_UP = 5  # steps that are not timed, including the first step
SLICE = 10  # steps of a variant before the next variant runs
THREADS = 2  # threads of each process
MIN_STEPS = 20  # per round, which repeats short intervals
GRACE_S = 20.0  # time for a process to end by itself

Row = dict[str, Any]  # results of a variant on a model, as in the JSON file
Times = list[tuple[float, float]]  # wall and processor seconds of each step
Intervals = tuple[int, int]  # steps between updates of factors and of inverses


# ------------------------------------------------------------------ the worker
def work(model: str, name: str, arguments: dict[str, Any], batch: int) -> None:
    """Train one batch repeatedly, as many steps as the parent process requests.

    A request is a line of JSON on the standard input, `{"steps": n,
    "intervals": [factor, inverse]}`. An answer is a line of JSON with the wall
    and processor seconds of each step, and the bytes of the optimizer's state.
    The first step is answered without a request. Other output goes to the
    standard error.

    `model` and `name` are the names of the model and of the optimizer, and
    `arguments` are arguments of its constructor; `batch` is a number of rows.
    """
    import keras
    import tensorflow as tf

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    keras.utils.set_random_seed(0)
    network, optimizer = build(model), make_optimizer(name, arguments)
    loss, arrays = make_loss(model), make_batch(model, batch)
    last, steps = _now(), 1
    network.compile(optimizer, loss)
    # Create variables now: if the first trace creates them, Keras' optimizers,
    # but not those of tfkfac, need a second trace.
    optimizer.build(network.trainable_variables)

    @tf.function(autograph=False)
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = network(x, training=True)
            loss = network.compute_loss(x=x, y=y, y_pred=outputs)
        variables = network.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    data = [tf.constant(array) for array in arrays]
    while True:
        times: Times = []
        for _ in range(steps):
            train(*data).numpy()
            now = _now()
            times.append((now[0] - last[0], now[1] - last[1]))
            last = now
        answer: Row = {"times": times}
        if hasattr(optimizer, "state_bytes"):
            answer["state_bytes"] = optimizer.state_bytes()["total"]
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        steps = request["steps"]
        if hasattr(optimizer, "factor_update_interval"):
            factor, inverse = request["intervals"]
            optimizer.factor_update_interval = factor
            optimizer.inverse_update_interval = inverse
        last = _now()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def mlp_size(model: str) -> tuple[int, int] | None:
    """Return (width, depth) of "mlp-WIDTHxDEPTH"; None for other models."""
    match = re.fullmatch(r"mlp-([1-9]\d*)x([1-9]\d*)", model)
    return (int(match[1]), int(match[2])) if match else None


def build(model: str) -> Any:
    """Return a model that ends in logits."""
    import keras
    from keras import layers

    from common import networks

    if size := mlp_size(model):
        width, depth = size
        hidden = [layers.Dense(width, "relu") for _ in range(depth - 1)]
        return keras.Sequential(
            [keras.Input((width,)), *hidden, layers.Dense(width)]
        )
    shape = SHAPES[model]
    if model == "M4":
        return networks.autoencoder()
    names = {"M1": "mlp", "M2": "cnn", "M3": "resnet20"}
    return networks.CLASSIFIERS[names.get(model, model)](shape, CLASSES)


def make_batch(model: str, rows: int) -> tuple[Any, Any]:
    """Return random inputs and targets."""
    import numpy as np

    size = mlp_size(model)
    shape = (size[0],) if size else SHAPES[model]
    rng = np.random.RandomState(0)
    x = rng.rand(rows, *shape).astype("float32")
    if model == "M4":
        return x, x
    return x, rng.randint(0, size[0] if size else CLASSES, rows)


def make_loss(model: str) -> Any:
    """Return the loss of a model."""
    import keras
    import tensorflow as tf

    def pixels_cross_entropy(y: Any, logits: Any) -> Any:
        losses = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
        return tf.reduce_sum(losses, -1)

    if model == "M4":
        return pixels_cross_entropy
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_optimizer(name: str, arguments: dict[str, Any]) -> Any:
    """Return an optimizer by name."""
    import keras

    def first_order(name: str, **arguments: Any) -> Any:
        momentum = {"momentum": 0.9} if name == "sgd" else {}
        optimizer = getattr(keras.optimizers, FIRST_ORDER[name])
        return optimizer(RATE, **(momentum | arguments))

    if name in FIRST_ORDER:
        return first_order(name, **arguments)
    import tfkfac

    family, _, detail = name.partition("-")
    if family == "kfac":
        inner = None if "step" in arguments else first_order("sgd")
        return tfkfac.KFAC(
            inner,
            solver=detail,
            factor_update_interval=10,  # a number, so that it can be changed
            inverse_update_interval=100,
            **arguments,
        )
    once = {"warmup_steps": FOSI_ESTIMATION, "update_interval": 10**6}
    return tfkfac.FOSI(first_order(detail), **(once | arguments))


# --------------------------------------------------------------- the processes
class DiedError(Exception):
    """A process has ended too early."""


class Job:
    """The process of a variant, after its first step.

    Attributes:
        first_step: Wall and processor seconds of the first step, from
            `compile` on, with tracing.
        steps: Number of steps so far.
        facts: "state_bytes" of optimizers with curvature state.

    Raises:
        DiedError: If the process fails.
    """

    def __init__(
        self, model: str, variant: str, options: argparse.Namespace
    ) -> None:
        name, folder, arguments = split_variant(variant)
        task = {"model": model, "name": name, "arguments": arguments}
        task |= {"batch": options.batch}
        self._variant = variant
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, close() does
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(task)],
            env=command.process_environment(THREADS, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.steps = 0
        try:
            [self.first_step] = self._answer()
        except DiedError:
            self.close()
            raise

    def run(self, steps: int, intervals: Intervals) -> Times:
        """Train; return wall and processor seconds of each step."""
        assert self._process.stdin is not None
        request = json.dumps({"steps": steps, "intervals": intervals})
        with contextlib.suppress(BrokenPipeError):  # _answer() raises
            print(request, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Times:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            end = self._log.read().decode(errors="replace")[-2000:]
            raise DiedError(f"{self._variant} died:\n{end}")
        self.facts = json.loads(line)
        times: Times = self.facts.pop("times")
        self.steps += len(times)
        return times

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def phases(period: int, first: int, times: Sequence[float]) -> Sequence[float]:
    """Return median step times by the position of a step in its interval.

    A step of K-FAC takes longer where factors or inverses are due. The mean of
    the phases is the mean time of a step, without single disturbed steps.
    `period` is the length of an interval, `first` the number of the first step.
    """
    starts = [(phase - first) % period for phase in range(period)]
    return [statistics.median(times[start::period]) for start in starts]


# ------------------------------------------------------------- the measurement
def measure(model: str, options: argparse.Namespace) -> list[Row]:
    """Time the first step and the later steps of all variants on a model."""
    with contextlib.ExitStack() as stack:
        rows, jobs = [], []
        for variant in options.variants:
            row, job = start(model, variant, options)
            rows.append(row)
            if job is not None:
                stack.callback(job.close)
                job.run(WARM_UP - job.steps, options.mixes[0])
                jobs.append((row, job))
        for mix in options.mixes:
            run(jobs, mix, options)
    return compare(rows)


def measure_first_steps(model: str, options: argparse.Namespace) -> list[Row]:
    """Return the median time of the first step over several processes."""
    runs: list[list[Row]] = [[] for _ in options.variants]
    for _ in range(options.first_step):
        for rows, variant in zip(runs, options.variants, strict=True):
            row, job = start(model, variant, options)
            rows.append(row)
            if job is not None:
                job.close()
    for first, *others in runs:
        for key, value in first.get("first_step", {}).items():
            times = [r["first_step"][key] for r in others if "first_step" in r]
            first["first_step"][key] = statistics.median([value, *times])
    return compare([rows[0] for rows in runs])


def start(
    model: str, variant: str, options: argparse.Namespace
) -> tuple[Row, Job | None]:
    """Return the row and the job after its first step; None if it died."""
    row: Row = {"model": model, "variant": variant}
    try:
        job = Job(model, variant, options)
    except DiedError as error:
        row["error"] = str(error)
        print(f"{model} {error}", file=sys.stderr, flush=True)
        return row, None
    keys = "seconds", "cpu_seconds"
    row["first_step"] = dict(zip(keys, job.first_step, strict=True))
    return row | job.facts, job


def run(
    jobs: Sequence[tuple[Row, Job]],
    mix: Intervals,
    options: argparse.Namespace,
) -> None:
    """Run whole intervals of all jobs alternately; add times to the rows."""
    period = math.lcm(*mix)
    steps = options.rounds * period * max(1, -(-MIN_STEPS // period))
    firsts = [job.steps for _, job in jobs]
    times: list[Times] = [[] for _ in jobs]
    order = list(zip(times, jobs, strict=True))
    for begin in range(0, steps, SLICE):
        for record, (_, job) in order:
            record += job.run(min(SLICE, steps - begin), mix)
        order.reverse()  # so that each job follows different jobs
    for (row, _), first, pairs in zip(jobs, firsts, times, strict=True):
        wall, processor = (
            phases(period, first, [1e3 * seconds for seconds in column])
            for column in zip(*pairs, strict=True)
        )
        row.setdefault("mixes", {})[f"({mix[0]},{mix[1]})"] = {
            "steps": len(pairs),
            "mean_ms": statistics.fmean(wall),
            "median_ms": statistics.median(wall),
            "longest_ms": max(wall),
            "cpu_mean_ms": statistics.fmean(processor),
        }


def compare(rows: list[Row]) -> list[Row]:
    """Add the ratios of times to SGD and Adam, if SGD and Adam were run."""
    for name in BASES:
        base = next((row for row in rows if row["variant"] == name), {})
        for row in rows:
            for mix, cost in row.get("mixes", {}).items():
                _add_ratio(cost, base.get("mixes", {}).get(mix), name)
            if "first_step" in row:
                _add_ratio(row["first_step"], base.get("first_step"), name)
    return rows


def _add_ratio(cost: Row, base: Row | None, name: str) -> None:
    """Add the ratio of wall and processor times to those of a baseline."""
    for key in ("mean_ms", "cpu_mean_ms", "seconds", "cpu_seconds"):
        if base and key in cost:
            cost[f"{key} / {name}"] = cost[key] / base[key]


# ------------------------------------------------------------------ the tables
def text_table(rows: Sequence[Row]) -> str:
    """Return a line for each variant on each model."""
    mixes = dict.fromkeys(mix for row in rows for mix in row.get("mixes", {}))
    heading = ["model and variant"]
    for mix in mixes:
        heading += [f"{mix} ms", "/ sgd", "/ adam", "CPU / sgd", "max/med"]
    heading += ["first CPU s", "/ sgd", "/ adam", "state MB"]
    lines = []
    for row in rows:
        line = [f"{row['model']} {row['variant']}"]
        for mix in mixes:
            cost = row.get("mixes", {}).get(mix, {})
            keys = ("mean_ms", "mean_ms / sgd", "mean_ms / adam")
            line += [_cell(cost, key) for key in (*keys, "cpu_mean_ms / sgd")]
            longest = cost and cost["longest_ms"] / cost["median_ms"]
            line.append(f"{longest:.1f}" if cost else "-")
        for key in ("cpu_seconds", "cpu_seconds / sgd", "cpu_seconds / adam"):
            line.append(_cell(row.get("first_step", {}), key))
        line.append(_cell(row, "state_bytes", 1e-6))
        lines.append(line)
    return table(heading, lines)


def _cell(values: Mapping[str, float], key: str, scale: float = 1.0) -> str:
    return f"{values[key] * scale:.2f}" if key in values else "-"


# ------------------------------------------------------------ the command line
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a variant has died, else 0."""
    options = parse_arguments(arguments)
    if options.worker:
        work(**options.worker)
        return 0
    rows: list[Row] = []
    for model in options.models:
        try:
            if options.first_step:
                new = measure_first_steps(model, options)
            else:
                new = measure(model, options)
        except DiedError as error:
            sys.exit(f"{model}: {error}")
        print(text_table(new), flush=True)
        rows += new
        if options.json:
            facts = {"machine": command.machine(), "command": sys.argv[1:]}
            options.json.write_text(
                json.dumps(facts | {"rows": rows}, indent=1)
            )
    return int(any("error" in row for row in rows))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    fosi = [f"fosi-{name}" for name in FIRST_ORDER]
    parser = make_parser_of(
        __doc__,
        f"Variants: {', '.join((*FIRST_ORDER, 'kfac-SOLVER', *fosi))}. "
        f"Models: {', '.join((*SHAPES, 'mlp-WIDTHxDEPTH'))}.",
    )
    add = parser.add_argument
    add("--models", nargs="+", default=USUAL_MODELS, metavar="MODEL")
    add("--variants", nargs="+", default=USUAL_VARIANTS, metavar="VARIANT")
    add(
        "--mixes",
        nargs="+",
        type=command.intervals,
        default=[(10, 100), (1, 10)],
        metavar="FACTOR,INVERSE",
        help="update intervals of K-FAC (default: 10,100 1,10)",
    )
    for name, default, text in (
        ("first-step", None, "measure the first step only, of N processes"),
        ("rounds", 5, "intervals of each mix (default: 5)"),
        ("batch", 128, "rows of a batch (default: 128)"),
    ):
        add(f"--{name}", type=positive, default=default, metavar="N", help=text)
    add("--json", type=pathlib.Path, metavar="FILE", help="keeps all results")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for model in options.models:
        if model not in SHAPES and mlp_size(model) is None:
            parser.error(f"argument --models: unknown model {model!r}")
    for variant in options.variants:
        try:
            name, folder, _ = split_variant(variant)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --variants: {error}")
        known = (*FIRST_ORDER, *fosi)
        if name not in known and not name.startswith("kfac-"):
            parser.error(f"argument --variants: unknown variant {variant!r}")
        if folder and not folder.is_dir():
            parser.error(f"argument --variants: {str(folder)!r} is no folder")
    return options


def split_variant(
    text: str,
) -> tuple[str, pathlib.Path | None, dict[str, Any]]:
    """Return name, folder and arguments of NAME[@FOLDER][:KEY=VALUE...]."""
    _, name, arguments = parse_variant(text)
    name, _, folder = name.partition("@")
    return name, pathlib.Path(folder).resolve() if folder else None, arguments


if __name__ == "__main__":
    sys.exit(main())
