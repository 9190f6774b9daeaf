"""Pauloski et al., Deep Neural Network Training With Distributed K-FAC."""

from typing import Any

from experiments.running import Case, Experiment, Training

PAPER = "Distributed K-FAC (IEEE TPDS 2022)"
ELSEWHERE = "ResNet-50 and deeper on ImageNet, on up to 256 GPUs."


def train(kfac: dict[str, Any], quick: bool, batch_size: int) -> Training:
    """ResNet-32 on CIFAR-10, or an MLP on moved digits."""
    return Training(
        "kfac",
        kfac,
        model="mlp" if quick else "resnet32",
        dataset="moved_digits" if quick else "cifar10",
        epochs=2 if quick else 100,
        batch_size=batch_size,
    )


def solver(case: Case, quick: bool) -> Training:
    return train({"solver": case["solver"]}, quick, case["batch"])


def intervals(case: Case, quick: bool) -> Training:
    interval = case["inverse interval"]
    kfac = {
        "inverse_update_interval": interval,
        "factor_update_interval": max(1, interval // 10),
    }
    return train(kfac, quick, batch_size=128)


EXPERIMENTS = {
    "distributed-kfac-table-1": Experiment(
        f"{PAPER}, table 1",
        "Does the explicit inverse cost accuracy in large batches, where the "
        "eigen-decomposition does not?",
        {"batch": (128, 512, 2048), "solver": ("inverse", "eigen")},
        {"batch": (128, 256, 512, 1024, 2048)},
        solver,
        ("metric", "CPU seconds"),
        ELSEWHERE,
    ),
    "distributed-kfac-table-5": Experiment(
        f"{PAPER}, table 5",
        "How rarely can inverses be updated (and factors ten times as often) "
        "without a loss of accuracy?",
        {"inverse interval": (1, 10, 100)},
        {"inverse interval": (1, 10, 50, 100, 500, 1000)},
        intervals,
        ("metric", "CPU seconds"),
        ELSEWHERE,
    ),
}
