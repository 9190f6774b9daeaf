"""Zhang et al., Scalable K-FAC Training With Distributed Preconditioning."""

from typing import Any

from experiments.running import Case, Experiment, Training

PAPER = "DP-KFAC (2022)"
# In the last method the new batch has the weight xi = 0.95 of section 6.4 in
# the running average, as eq. 10 and 11 are printed.
METHODS: dict[str, dict[str, Any]] = {
    "comm_opt": {"distribution": "comm_opt"},
    "dp_kfac": {"distribution": "dp_kfac"},
    "dp_kfac, xi as printed": {"distribution": "dp_kfac", "factor_decay": 0.05},
}


def train(kfac: dict[str, Any], quick: bool, batch_size: int) -> Training:
    """ResNet-32 on CIFAR-10 and four workers, or an MLP on two."""
    return Training(
        "kfac",
        kfac,
        model="mlp" if quick else "resnet32",
        dataset="digits" if quick else "cifar10",
        epochs=3 if quick else 100,
        batch_size=batch_size,
        workers=2 if quick else 4,
    )


def local_batch(case: Case, quick: bool) -> Training:
    batch_size = (2 if quick else 4) * case["local batch"]
    return train(METHODS[case["method"]], quick, batch_size)


def damping(case: Case, quick: bool) -> Training:
    kfac = {
        "distribution": "dp_kfac",
        "damping": case["damping"],
        "factor_update_interval": case["interval"],
        "inverse_update_interval": case["interval"],
    }
    return train(kfac, quick, 64 if quick else 128)


EXPERIMENTS = {
    "dp-kfac-table-7": Experiment(
        f"{PAPER}, table 7",
        "Factors of the owner's batch alone: do they cost accuracy where that "
        "batch is small?",
        {"local batch": (8, 32, 128), "method": tuple(METHODS)},
        {"local batch": (4, 8, 16, 32, 128)},
        local_batch,
        ("metric", "factor step, MB"),
        "ResNet-50 on ImageNet and 64 GPUs.",
    ),
    "dp-kfac-figure-13": Experiment(
        f"{PAPER}, figure 13",
        "How sensitive is the accuracy to interval and damping?",
        {"interval": (1, 10, 100), "damping": (0.001, 0.01, 0.1)},
        {
            "interval": (1, 10, 50, 100, 500),
            "damping": (0.001, 0.003, 0.01, 0.1),
        },
        damping,
        ("metric", "seconds"),
        "longer trainings, on 32 GPUs and more.",
    ),
}
