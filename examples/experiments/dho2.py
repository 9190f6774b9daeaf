"""Gu et al., DHO2 (arXiv 2505.00982), first version of May 2025.

The second version, "... via Model Parallelism and ADMM", has another update,
which is not implemented.
"""

from typing import Any

from experiments.running import Case, Experiment, Training

PAPER = "DHO2 (first version, 2025)"
# The optimizer, its arguments, and True if one worker trains alone.
METHODS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "DHO2": ("fosi", {}, False),
    "MR-DHO2": ("fosi", {"accelerator_fraction": 0.5}, False),
    "FOSI": ("fosi", {}, True),
    "K-FAC": ("kfac", {}, False),
    "Adam": ("adam", {}, False),
    "RMSprop": ("rmsprop", {}, False),
}
# Of 264 steps, so that most steps have directions.
QUICK_FOSI = {"warmup_steps": 20, "update_interval": 60}
ELSEWHERE = "DenseNet-201, VGG-16, larger ResNets and Swin, on 32 GPUs."


def method(case: Case, quick: bool) -> Training:
    name, arguments, alone = METHODS[case["method"]]
    if quick and name == "fosi":
        arguments = arguments | QUICK_FOSI
    return Training(
        name,
        arguments,
        model="mlp" if quick else "resnet20",
        dataset="digits" if quick else "cifar10",
        epochs=12 if quick else 20,
        target=0.97 if quick else 0.8,
        workers=1 if alone else 2 if quick else 4,
    )


def layout(case: Case, quick: bool) -> Training:
    return Training(
        "fosi",
        {"layout": case["layout"], "num_largest": 8, "lanczos_steps": 40},
        model="mlp" if quick else "resnet32",
        epochs=1,
        workers=case["devices"],
    )


EXPERIMENTS = {
    "dho2-figure-7": Experiment(
        f"{PAPER}, figure 7",
        "How long does each method take to the same accuracy?",
        {"method": tuple(METHODS)},
        {},
        method,
        ("metric", "steps to target", "CPU s to target", "seconds"),
        ELSEWHERE,
    ),
    "dho2-memory": Experiment(
        f"{PAPER}, memory over devices",
        "Does the memory of a device fall with their number?",
        {"devices": (1, 2, 4), "layout": ("rows", "columns")},
        {},
        layout,
        ("state, MB", "directions, MB"),
        ELSEWHERE,
    ),
}
