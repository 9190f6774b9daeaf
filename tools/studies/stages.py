"""Measure the stages of a step of `KFAC`, in processor milliseconds.

    python tools/studies/stages.py --optimizer step=natural
    python tools/launch.py 2 -- python tools/studies/stages.py --model M2

A stage costs the difference to steps without it; intervals switch it off.
Times are medians of --rounds epochs of 20 steps; --rows are of all workers.
"""

import contextlib
import os
import statistics
import time

import keras

import command  # noqa: F401, isort: skip, sets the module path
import benchmark
import tfkfac
from common.arguments import key_value, make_parser_of, positive

STEPS = 20
NEVER = 10**6  # an interval: only the first step is an update

parser = make_parser_of(__doc__)
parser.add_argument("--model", default="M1", help="of benchmark.py")
parser.add_argument("--optimizer", nargs="*", default=[], type=key_value)
parser.add_argument("--rows", type=positive, default=128)
parser.add_argument("--rounds", type=positive, default=7)
options = parser.parse_args()
is_job = "TF_CONFIG" in os.environ
strategy = tfkfac.MultiWorkerMirroredStrategy() if is_job else None
settings, last = dict(options.optimizer), 0.0
x, y = benchmark.make_batch(options.model, options.rows * STEPS)
ends: list[float] = []
clock = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: ends.append(time.process_time())
)
for stage, factors, inverses in (
    ("gradients, SGD", 0, 0),
    ("preconditioning", NEVER, NEVER),
    ("factors", 1, NEVER),
    ("inverses", 1, 1),
):
    with strategy.scope() if strategy else contextlib.nullcontext():
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        if factors:
            settings["factor_update_interval"] = factors
            settings["inverse_update_interval"] = inverses
            optimizer = tfkfac.KFAC(**settings)
        model = benchmark.build(options.model)
        model.compile(optimizer, benchmark.make_loss(options.model))
    costs = []
    for _ in range(options.rounds + 1):  # the first round traces
        ends.clear()
        model.fit(x, y, options.rows, callbacks=[clock], verbose=0)
        costs.append(1e3 * (ends[-1] - ends[0]) / (STEPS - 1))
    total = statistics.median(costs[1:])
    print(f"{stage:16} {total - last:7.2f} ms, in total {total:7.2f} ms")
    last = total
