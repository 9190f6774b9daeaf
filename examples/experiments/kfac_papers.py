"""Pauloski et al., Distributed K-FAC; Zhang et al., DP-KFAC."""

from typing import Any

from experiments.running import Case, Experiment, Training

DISTRIBUTED, DP = "Distributed K-FAC (IEEE TPDS 2022)", "DP-KFAC (2022)"
ELSEWHERE = "ResNet-50 and deeper on ImageNet, on up to 256 GPUs."
# In the last method the new batch has the weight xi = 0.95 of section 6.4 in
# the running average, as eq. 10 and 11 are printed.
METHODS: dict[str, dict[str, Any]] = {
    "comm_opt": {"distribution": "comm_opt"},
    "dp_kfac": {"distribution": "dp_kfac"},
    "dp_kfac, xi as printed": {"distribution": "dp_kfac", "factor_decay": 0.05},
}


def train(
    kfac: dict[str, Any], quick: bool, batch_size: int, workers: int = 1
) -> Training:
    """ResNet-32 on CIFAR-10; quick: an MLP on (moved) digits."""
    digits = "moved_digits" if workers == 1 else "digits"
    return Training(
        "kfac",
        kfac,
        model="mlp" if quick else "resnet32",
        dataset=digits if quick else "cifar10",
        epochs=(2 if workers == 1 else 3) if quick else 100,
        batch_size=batch_size,
        workers=workers,
    )


def solver(case: Case, quick: bool) -> Training:
    return train({"solver": case["solver"]}, quick, case["batch"])


def phases(case: Case, quick: bool) -> Training:
    """A small BERT, with an epoch in each phase."""
    return Training(
        "kfac" if case["first"] == "K-FAC" else "lamb",
        {"kl_clip": 0.005} if case["first"] == "K-FAC" else {},
        script="masked_language",
        examples=4_000 if quick else 16_000,
        epochs=1,
        batch_size=32,
        second="lamb",
    )


def intervals(case: Case, quick: bool) -> Training:
    interval = case["inverse interval"]
    kfac = {
        "inverse_update_interval": interval,
        "factor_update_interval": max(1, interval // 10),
    }
    return train(kfac, quick, batch_size=128)


def local_batch(case: Case, quick: bool) -> Training:
    workers = 2 if quick else 4
    batch_size = workers * case["local batch"]
    return train(METHODS[case["method"]], quick, batch_size, workers)


def workers(case: Case, quick: bool) -> Training:
    count = case["workers"]
    task = train(METHODS[case["method"]], quick, 32 * count, count)
    return task._replace(dataset="digits") if quick else task


def damping(case: Case, quick: bool) -> Training:
    kfac = {
        "distribution": "dp_kfac",
        "damping": case["damping"],
        "factor_update_interval": case["interval"],
        "inverse_update_interval": case["interval"],
    }
    if quick:
        return train(kfac, quick, 64, workers=2)
    return train(kfac, quick, 128, workers=4)


EXPERIMENTS = {
    "distributed-kfac-table-1": Experiment(
        f"{DISTRIBUTED}, table 1",
        "Does the explicit inverse cost accuracy in large batches, where the "
        "eigen-decomposition does not?",
        {"batch": (128, 512, 2048), "solver": ("inverse", "eigen")},
        {"batch": (128, 256, 512, 1024, 2048)},
        solver,
        ("metric", "CPU seconds"),
        ELSEWHERE,
    ),
    "distributed-kfac-table-4": Experiment(
        f"{DISTRIBUTED}, table 4",
        "Does a language model that LAMB trains in the end gain by K-FAC in "
        "the first phase?",
        {"first": ("LAMB", "K-FAC")},
        {},
        phases,
        ("metric", "CPU seconds"),
        "BERT-large on Wikipedia and books, on up to 256 GPUs.",
    ),
    "distributed-kfac-table-5": Experiment(
        f"{DISTRIBUTED}, table 5",
        "How rarely can inverses be updated (and factors ten times as often) "
        "without a loss of accuracy?",
        {"inverse interval": (1, 10, 100)},
        {"inverse interval": (1, 10, 50, 100, 500, 1000)},
        intervals,
        ("metric", "CPU seconds"),
        ELSEWHERE,
    ),
    "dp-kfac-table-7": Experiment(
        f"{DP}, table 7",
        "Factors of the owner's batch alone: do they cost accuracy where that "
        "batch is small?",
        {"local batch": (8, 32, 128), "method": tuple(METHODS)},
        {"local batch": (4, 8, 16, 32, 128)},
        local_batch,
        ("metric", "factor step, MB"),
        "ResNet-50 on ImageNet and 64 GPUs.",
    ),
    "dp-kfac-figure-10": Experiment(
        f"{DP}, figure 10",
        "More workers with a constant local batch: does a factor of one "
        "worker's batch stay enough?",
        {"workers": (1, 2, 4), "method": ("comm_opt", "dp_kfac")},
        {},
        workers,
        ("metric", "factor step, MB"),
        "ResNet-50 on ImageNet, on 4 to 64 GPUs.",
    ),
    "dp-kfac-figure-13": Experiment(
        f"{DP}, figure 13",
        "How sensitive is the accuracy to interval and damping?",
        {"interval": (1, 10, 100), "damping": (0.001, 0.01, 0.1)},
        {"interval": (1, 10, 50, 100, 500), "damping": (1e-3, 3e-3, 0.01, 0.1)},
        damping,
        ("metric", "seconds"),
        "longer trainings, on 32 GPUs and more.",
    ),
}
