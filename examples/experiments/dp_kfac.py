"""Zhang et al., Scalable K-FAC Training With Distributed Preconditioning.

`python tools/studies/plan.py --papers` has tables 2 and 5.
"""

from experiments.experiment import Case, Experiment, grid, optimizer
from experiments.running import Training

PAPER = "DP-KFAC (2022)"


def train(kfac: str, quick: bool, batch_size: int) -> Training:
    """ResNet-32 on CIFAR-10 and four workers, or less on two."""
    setting = "--dataset cifar10 --model resnet32 --epochs 100"
    if quick:
        setting = "--model mlp --epochs 3"
    setting = f"{setting} --batch-size {batch_size}"
    return Training.of_classifier(kfac, setting, workers(quick))


def workers(quick: bool) -> int:
    return 2 if quick else 4


def local_batch(case: Case, quick: bool) -> Training:
    kfac = optimizer("kfac", distribution=case["distribution"])
    return train(kfac, quick, workers(quick) * case["local batch"])


def damping(case: Case, quick: bool) -> Training:
    kfac = optimizer(
        "kfac",
        distribution="dp_kfac",
        damping=case["damping"],
        factor_update_interval=case["interval"],
        inverse_update_interval=case["interval"],
    )
    return train(kfac, quick, 64 if quick else 128)


EXPERIMENTS = {
    "dp-kfac-table-7": Experiment(
        source=f"{PAPER}, table 7",
        question="Factors of the owner's batch alone: do they cost accuracy "
        "where that batch is small?",
        cases=lambda quick: grid(
            **{"local batch": (8, 32, 128) if quick else (4, 8, 16, 32, 128)},
            distribution=("comm_opt", "dp_kfac"),
        ),
        task=local_batch,
        measures={
            "accuracy": lambda r: r.metric,
            "factor step, MB": lambda r: r.received("factor"),
        },
        x="local batch",
        y=("accuracy",),
        elsewhere="ResNet-50 on ImageNet and 64 GPUs.",
    ),
    "dp-kfac-figure-13": Experiment(
        source=f"{PAPER}, figure 13",
        question="How sensitive is the accuracy to interval and damping?",
        cases=lambda quick: grid(
            interval=(1, 10, 100) if quick else (1, 10, 50, 100, 500),
            damping=(0.001, 0.01, 0.1) if quick else (0.001, 0.003, 0.01, 0.1),
        ),
        task=damping,
        measures={
            "accuracy": lambda r: r.metric,
            "seconds": lambda r: r.seconds,
        },
        x="interval",
        y=("accuracy", "seconds"),
        elsewhere="longer trainings, on 32 GPUs and more.",
    ),
}
