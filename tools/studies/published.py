"""Train two published benchmarks by their protocols.

    python tools/studies/published.py nanogpt --text FILE
    python tools/studies/published.py engd

`nanogpt` is the CPU example of nanoGPT's README, on a local copy of tiny
Shakespeare. AdamW has nanoGPT's settings, in all steps; `KFAC()`, which has no
setting, and Muon train in half of the steps, too. Muon's learning rate is
searched with seed 0 and the validation loss, and falls linearly to 0.

`engd` solves two equations of energy natural gradients (Müller & Zeinhofer,
ICML 2023) with `GaussNewton().minimize` in 10 processor seconds.

Each training is a process with one thread. `--json FILE` keeps the records;
trainings with a record are not repeated.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import command  # isort: skip, sets the module path
import tfkfac
from common.arguments import make_parser_of, positive

WINDOW, BATCH, WIDTH, HEADS, LAYERS = 64, 12, 128, 4, 4
RATES = (2.5e-4, 5e-4, 0.001, 0.002, 0.004, 0.008, 0.016)  # of Muon
FIRST_RATE = 2  # index of the rate that the search begins with
CPU_SECONDS = 9.8  # of `minimize`, with the trace; the last step ends later
HIDDEN = {"poisson": 32, "heat": 64}  # units of the network of an equation
Record = dict[str, Any]


# -------------------------------------------------------------------- nanoGPT
def gpt(characters: int) -> keras.Model:
    """Return nanoGPT's model without dropout and biases."""

    def normal(deviation: float = 0.02) -> Any:
        return keras.initializers.RandomNormal(0.0, deviation)

    def dense(units: int, activation: str | None, deviation: float) -> Any:
        options = {"kernel_initializer": normal(deviation), "use_bias": False}
        return layers.Dense(units, activation, **options)

    def normalize(x: Any) -> Any:
        return layers.LayerNormalization(epsilon=1e-5, center=False)(x)

    tokens = keras.Input((WINDOW,), dtype="int32")
    embedding = layers.ReversibleEmbedding(
        characters, WIDTH, embeddings_initializer=normal()
    )
    place = keras.ops.zeros_like(tokens) + keras.ops.arange(WINDOW)
    places = layers.Embedding(WINDOW, WIDTH, embeddings_initializer=normal())
    x = embedding(tokens) + places(place)
    for _ in range(LAYERS):
        h = normalize(x)
        x += layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, use_bias=False, kernel_initializer=normal()
        )(h, h, use_causal_mask=True)
        h = dense(4 * WIDTH, "gelu", 0.02)(normalize(x))
        x += dense(WIDTH, None, 0.02 / np.sqrt(2 * LAYERS))(h)
    return keras.Model(tokens, embedding(normalize(x), reverse=True))


def make_optimizer(name: str, rate: float | None, steps: int) -> Any:
    """Return an optimizer for a training of `steps` steps."""
    if name == "kfac":
        return tfkfac.KFAC()
    schedules = keras.optimizers.schedules
    if name == "muon":
        falling = schedules.PolynomialDecay(rate, steps, 0.0)
        return keras.optimizers.Muon(falling)
    warmup = min(100, steps // 2)
    length = steps - warmup
    rates = schedules.CosineDecay(0.0, length, 0.1, "", 1e-3, warmup)
    options = {"beta_2": 0.99, "epsilon": 1e-8, "global_clipnorm": 1.0}
    adamw = keras.optimizers.AdamW(rates, weight_decay=0.1, **options)
    adamw.exclude_from_weight_decay(var_names=["gamma"])
    return adamw


def train_gpt(
    text: bytes, name: str, rate: float | None, steps: int, seed: int
) -> Record:
    """Train on 90 % of the text; return the loss on all windows of the rest."""
    keras.utils.set_random_seed(seed)
    alphabet, codes = np.unique(list(text), return_inverse=True)
    train, rest = np.split(codes.astype("int32"), [int(0.9 * len(codes))])

    def windows(part: np.ndarray, starts: np.ndarray) -> Any:
        rows = starts[:, None] + np.arange(WINDOW)
        return part[rows], part[rows + 1]

    model = gpt(len(alphabet))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(name, rate, steps), loss)
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(train) - WINDOW, size=steps * BATCH)
    begin = time.process_time()
    model.fit(*windows(train, starts), BATCH, shuffle=False, verbose=0)
    seconds = time.process_time() - begin
    held_out = windows(rest, np.arange(0, len(rest) - WINDOW, WINDOW))
    result = model.evaluate(*held_out, batch_size=BATCH, verbose=0)
    return {"result": result, "cpu_seconds": seconds, "steps": steps}


def nanogpt(study: "Study", options: argparse.Namespace) -> None:
    """Train with each optimizer, number of steps and seed."""
    text, half = options.text.read_bytes(), options.steps // 2

    def loss(name: str, rate: float | None, steps: int, seed: int) -> float:
        key = {"benchmark": "nanogpt", "optimizer": name, "rate": rate}
        key |= {"steps": steps, "seed": seed}
        return study.run(key, train_gpt, text, name, rate, steps, seed)

    def search(steps: int) -> float:
        """Return the rate of Muon that is best, with those beside it."""
        best, before = FIRST_RATE, -1
        while best != before:
            before = best
            near = range(max(best - 1, 0), min(best + 2, len(RATES)))
            best = min(near, key=lambda i: loss("muon", RATES[i], steps, 0))
        return RATES[best]

    for name, steps in (
        ("adamw", options.steps),
        ("kfac", half),
        ("muon", half),
        ("muon", options.steps),
        ("kfac", options.steps),
    ):
        rate = search(steps) if name == "muon" else None
        for seed in options.seeds:
            loss(name, rate, steps, seed)


# ----------------------------------------------------------------------- ENGD
def conditions_of(name: str, network: Any) -> dict[str, tuple[Any, Any, float]]:
    """Return residuals, points and length of the conditions of an equation.

    A row of the points is (x, y), or (t, x) of the heat equation.
    """

    def second(x: tf.Tensor, column: int) -> tf.Tensor:
        """Return the second derivative by one of the variables."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            slopes = first(x)[:, column]
        return tape.gradient(slopes, x)[:, column]

    def first(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            u = network(x)
        return tape.gradient(u, x)

    def poisson(x: tf.Tensor) -> tf.Tensor:
        right = 2 * np.pi**2 * tf.reduce_prod(tf.sin(np.pi * x), 1)
        return second(x, 0) + second(x, 1) + right

    def heat(x: tf.Tensor) -> tf.Tensor:
        return first(x)[:, 0] - second(x, 1) / 4

    def start(x: tf.Tensor) -> tf.Tensor:
        return network(x) - tf.sin(np.pi * x[:, 1:])

    side = np.linspace(0, 1, 30)[:-1, None]
    low, high = np.zeros_like(side), np.ones_like(side)
    walls = np.r_[np.c_[side, low], np.c_[1 - side, high]]
    left, right = np.c_[low, 1 - side], np.c_[high, side]
    if name == "poisson":
        edge = np.r_[walls, left, right]
        return {
            "inside": (poisson, grid(30), 1.0),
            "edge": (network, edge, 4.0),
        }
    return {
        "inside": (heat, grid(30), 1.0),
        "edge": (network, walls, 2.0),
        "start": (start, left, 1.0),
    }


def solution(name: str, x: np.ndarray) -> np.ndarray:
    """Return the exact solution."""
    first, second = x[:, :1], np.sin(np.pi * x[:, 1:])
    if name == "poisson":
        return np.sin(np.pi * first) * second
    return np.exp(-(np.pi**2) / 4 * first) * second


def grid(count: int) -> np.ndarray:
    """Return the inner points of a grid on the unit square."""
    places = np.linspace(0, 1, count)[1:-1]
    return np.stack(np.meshgrid(places, places), -1).reshape(-1, 2)


def solve(name: str, seed: int, limit: float) -> Record:
    """Solve an equation in `limit` CPU s; return the relative L2 error."""

    class Limit(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = time.process_time() - begin > limit

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(seed)
    normal = keras.initializers.RandomNormal(0.0, 0.1)
    options = {"kernel_initializer": normal, "bias_initializer": normal}
    hidden = layers.Dense(HIDDEN[name], "tanh", **options)
    ends = keras.Input((2,)), hidden, layers.Dense(1, **options)
    network, optimizer = keras.Sequential(ends), tfkfac.GaussNewton()
    conditions = conditions_of(name, network)
    parts: list[dict[str, Any]] = [
        {key: condition[i] for key, condition in conditions.items()}
        for i in range(3)
    ]
    residuals, points, weights = parts
    begin = time.process_time()
    optimizer.minimize(
        residuals,
        network.trainable_variables,
        points,
        weights=weights,
        steps=10_000,
        callbacks=[Limit()],
    )
    seconds = time.process_time() - begin
    exact = solution(name, new := grid(200))
    error = network.predict(new, batch_size=len(new), verbose=0) - exact
    return {
        "result": np.linalg.norm(error) / np.linalg.norm(exact),
        "cpu_seconds": seconds,
        "steps": int(optimizer.iterations.numpy()),
    }


def engd(study: "Study", options: argparse.Namespace) -> None:
    """Solve both equations with each seed."""
    for name in HIDDEN:
        for seed in options.seeds:
            key = {"benchmark": name, "optimizer": "gauss_newton", "seed": seed}
            study.run(key, solve, name, seed, options.cpu_seconds)


# -------------------------------------------------------------------- records
class Study:
    """The records of a file; None keeps no records."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self._path, self._records = path, command.read_records(path)

    def run(
        self, key: Record, train: Callable[..., Record], *arguments: Any
    ) -> float:
        """Return the result of the training `key`, once trained."""
        for record in self._records:
            if key.items() <= record.items():
                return float(record["result"])
        # The times include the trace: no training shares a process.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            record = key | pool.apply(train, arguments)
        print(json.dumps(record), flush=True)
        self._records.append(record)
        if self._path:
            command.write_records(self._path, self._records)
        return float(record["result"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser_of(__doc__)
    benchmarks = parser.add_subparsers(required=True)
    language = benchmarks.add_parser("nanogpt")
    language.add_argument("--text", type=pathlib.Path, required=True)
    language.add_argument("--steps", type=positive, default=2000)
    equations = benchmarks.add_parser("engd")
    equations.add_argument("--cpu-seconds", type=float, default=CPU_SECONDS)
    for sub, run, seeds in ((language, nanogpt, 3), (equations, engd, 10)):
        sub.set_defaults(run=run)
        sub.add_argument("--seeds", nargs="+", type=int, default=range(seeds))
        sub.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args(arguments)
    os.environ.update(command.process_environment(1))
    options.run(Study(options.json), options)


if __name__ == "__main__":
    main()
