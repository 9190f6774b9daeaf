"""Train programs like the examples of keras.io with `KFAC()` and Adam.

    python tools/studies/real_examples.py --json docs/real_examples.json
    python tools/studies/real_examples.py --program gan --method kfac --seeds 0

Each program trains with Adam(0.001), with the optimizer that such an example
uses (Muon at its defaults where that is Adam(0.001)), and with `KFAC()`.
Nothing is tuned. A process trains all methods and seeds of a program, on one
thread. New records replace those of the same trainings in the file of --json.
Programs of keras-hub are left out where it is not installed.

With `:falling=yes` at the end of a method the learning rate falls linearly to 0
over the training, as for the tuned Adam and Muon of the table:

    python tools/studies/real_examples.py --program convnet mixer --seeds 0 \
        --method adam:learning_rate=0.003:falling=yes
"""

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import command  # isort: skip, sets the module path
from common.arguments import make_parser_of, parse_variant, positive

# The optimizer that an example of this kind uses, if that is not Adam(0.001).
USUAL = {
    "mixer": "adamw:learning_rate=0.005:weight_decay=0.0001",
    "vision_transformer": "adamw:learning_rate=0.001:weight_decay=0.0001",
    "segmentation": "adam:learning_rate=0.0001",
    "fine_tuning": "adam:learning_rate=0.0001",
    "gan": "adam:learning_rate=0.0003",
    "denoising_diffusion": "adamw:learning_rate=0.001:weight_decay=0.0001",
    "lstm_seq2seq": "rmsprop",
    "translation": "rmsprop",
    "graph_attention": "sgd:learning_rate=0.3:momentum=0.9",
    "lora": "adamw:learning_rate=0.00005:weight_decay=0.01",
}
PROGRAMS = {
    "images": "convnet distillation mixer vision_transformer segmentation "
    "fine_tuning anomaly_autoencoder",
    "generative": "variational_autoencoder gan denoising_diffusion",
    "sequences": "lstm_seq2seq miniature_gpt translation wide_and_deep "
    "graph_attention lora",
}
# Module of each program.
PLACES = {n: module for module, ns in PROGRAMS.items() for n in ns.split()}
KERAS_HUB = ("lora",)
ADAM, KFAC = "adam", "kfac"
FALLING = ":falling=yes"
Record = dict[str, Any]


def usual(program: str) -> str:
    """Return the method that is compared with Adam(0.001) and `KFAC()`."""
    return USUAL.get(program, "muon")


def is_here(program: str) -> bool:
    """Return True if the program can run."""
    return program not in KERAS_HUB or bool(
        importlib.util.find_spec("keras_hub")
    )


def make_optimizer(method: str) -> Any:
    """Return the optimizer NAME[:KEY=VALUE...]."""
    import keras

    import tfkfac

    variant = parse_variant(method.removesuffix(FALLING))
    if variant.name == KFAC:
        return tfkfac.KFAC(**variant.arguments)
    config = {"class_name": variant.name, "config": dict(variant.arguments)}
    return keras.optimizers.get(config)


def train(program: str, method: str, seed: int) -> Record:
    """Train a program; return its losses, times and warnings."""
    import keras

    import tfkfac  # noqa: F401, `compile` binds its optimizers

    class Timer(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.last = time.process_time()
            self.is_first = True
            self.peaks = [float(o.learning_rate) for o in optimizers]
            self.batches = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if method.endswith(FALLING):
                length = self.params["epochs"] * self.params["steps"]
                for optimizer, peak in zip(optimizers, self.peaks, strict=True):
                    fraction = 1 - self.batches / length
                    optimizer.learning_rate = peak * fraction
                self.batches += 1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.process_time()
            times = first_steps if self.is_first else later_steps
            times.append(now - self.last)
            self.last, self.is_first = now, False  # a new `fit` traces again

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.logs = logs

    first_steps: list[float] = []
    later_steps: list[float] = []
    optimizers: list[Any] = []

    def make() -> Any:
        optimizers.append(make_optimizer(method))
        return optimizers[-1]

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    module = importlib.import_module(f"real.{PLACES[program]}")
    timer = Timer()
    options = {"callbacks": [timer], "verbose": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends = getattr(module, program)(make, options)
    messages = {str(warning.message) for warning in caught}
    record = {"program": program, "method": method, "seed": seed}
    record |= zip(("loss", "validation"), ends, strict=True)
    record |= {
        # Mean training loss of the last epoch, with dropout; not of the GAN.
        "objective": timer.logs.get("loss", ends[0]),
        "steps": len(first_steps) + len(later_steps),
        "first_step": sum(first_steps),
        "step": statistics.mean(later_steps),
    }
    if method.startswith(KFAC):
        record["covered"] = covered_share(optimizers)
        messages |= {text for o in optimizers for text in o.events()}
    return record | {"warnings": sorted(messages)}


def covered_share(optimizers: Sequence[Any]) -> float:
    """Return the share of the weights that have a block."""
    registries = [o.method.placement.registry for o in optimizers]
    covered = sum(registry.covered for registry in registries)
    uncovered = sum(item.weights for r in registries for item in r.uncovered)
    return covered / (covered + uncovered)


def train_all(
    task: tuple[str, Sequence[str], Sequence[int]],
) -> list[Record]:
    """Train a program with each method and seed; record errors, too."""
    program, methods, seeds = task
    records: list[Record] = []
    for method, seed in itertools.product(methods, seeds):
        record = {"program": program, "method": method, "seed": seed}
        try:
            record = train(program, method, seed)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
        records.append(record)
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a training has failed, else 0."""
    options = parse_arguments(arguments)
    os.environ.update(command.process_environment(1))
    tasks = [
        (program, options.method or (KFAC, ADAM, usual(program)), options.seeds)
        for program in options.program
    ]
    failed = False
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=1) as pool:
        for records in pool.imap_unordered(train_all, tasks, chunksize=1):
            for record in records:
                print(json.dumps(record), flush=True)
                failed |= "error" in record
            if options.json:
                save(options.json, records)
    return int(failed)


def save(path: pathlib.Path, records: Sequence[Record]) -> None:
    """Add records to a file, in place of those of the same trainings."""

    def key(record: Record) -> tuple[Any, ...]:
        return record["program"], record["method"], record["seed"]

    known = [*command.read_records(path), *records]
    kept = {key(record): record for record in known}
    command.write_records(path, kept.values())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser_of(__doc__)
    add = parser.add_argument
    programs = [program for program in PLACES if is_here(program)]
    add("--program", nargs="+", choices=programs, default=programs)
    add("--method", nargs="+", metavar="NAME[:KEY=VALUE...]")
    add("--seeds", nargs="+", type=int, default=range(3), metavar="N")
    add("--jobs", type=positive, default=1, metavar="N", help="processes")
    add("--json", type=pathlib.Path, metavar="FILE", help="records to add to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
