"""Pauloski et al., KAISA: An Adaptive Second-Order Optimizer Framework."""

from typing import NamedTuple

from experiments.experiment import Case, Experiment, grid, optimizer
from experiments.running import Training

PAPER = "KAISA (SC'21)"


class Application(NamedTuple):
    """A script of the examples.

    Attributes:
        baseline: The optimizer that it has without K-FAC.
        kfac: K-FAC as the script has it.
        quick: Arguments for so much training that the two differ.
    """

    baseline: str
    kfac: str
    quick: str


APPLICATIONS = {
    "classification": Application("sgd", "kfac", "--model cnn --epochs 5"),
    "segmentation": Application("adam", "kfac", "--epochs 3"),
    "detection": Application(
        "sgd", optimizer("kfac", skip_layers=["neck"]), "--epochs 3"
    ),
    "masked_language": Application("adam", "kfac:kl_clip=0.005", "--epochs 1"),
}


def hybrid(fraction: float) -> str:
    return optimizer(
        "kfac",
        distribution="hybrid_opt",
        gradient_worker_fraction=fraction,
        factor_update_interval=5,
        inverse_update_interval=10,
    )


def fraction(case: Case, quick: bool) -> Training:
    model = "cnn --epochs 2" if quick else "resnet32 --dataset cifar10"
    kfac = hybrid(case["fraction"])
    return Training.of_classifier(kfac, f"--model {model}", workers=4)


def memory(case: Case, quick: bool) -> Training:
    application = case["application"]
    arguments = ["--epochs", "1"]
    if quick:
        arguments.append("--quick")
        arguments += ["--model", "cnn"] * (application == "classification")
    workers = 2 if quick else 4
    return Training(application, hybrid(case["fraction"]), arguments, workers)


def fixed_batch(case: Case, quick: bool) -> Training:
    application = case["application"]
    baseline, kfac, setting = APPLICATIONS[application]
    name = kfac if case["optimizer"] == "K-FAC" else baseline
    return Training(application, name, setting.split() if quick else [])


EXPERIMENTS = {
    "kaisa-table-3": Experiment(
        source=f"{PAPER}, table 3",
        question="With the same batches, is K-FAC there before the "
        "application's own optimizer?",
        cases=lambda quick: grid(
            application=tuple(APPLICATIONS), optimizer=("baseline", "K-FAC")
        ),
        task=fixed_batch,
        measures={
            "metric": lambda r: r.metric,
            "steps to target": lambda r: r.steps_to_target,
            "CPU s to target": lambda r: r.processor_seconds_to_target,
            "CPU seconds": lambda r: r.processor_seconds,
        },
        x="application",
        y=("metric", "CPU seconds"),
        elsewhere="ResNet-50, Mask R-CNN, U-Net and BERT-Large on up to 64 "
        "A100 GPUs. The applications here are of the same kinds.",
    ),
    "kaisa-table-5": Experiment(
        source=f"{PAPER}, table 5",
        question="How much memory does K-FAC take in each application, with "
        "one and with all workers as gradient workers of a layer?",
        cases=lambda quick: grid(
            application=tuple(APPLICATIONS),
            fraction=(0.5, 1.0) if quick else (0.25, 0.5, 1.0),
        ),
        task=memory,
        measures={
            "state, MB": lambda r: r.state(),
            "factors, MB": lambda r: r.state("factors"),
            "decompositions, MB": lambda r: r.state("decompositions"),
        },
        x="application",
        y=("state, MB",),
        elsewhere="its models, on 64 GPUs.",
    ),
    "kaisa-figure-6": Experiment(
        source=f"{PAPER}, figure 6",
        question="What do more gradient workers cost in memory, and spare in "
        "time? (Four workers.)",
        cases=lambda quick: grid(fraction=(0.25, 0.5, 1.0)),
        task=fraction,
        measures={
            "state, MB": lambda r: r.state(),
            "plain step, MB": lambda r: r.received("plain"),
            "inverse step, MB": lambda r: r.received("inverse"),
            "plain step, s": lambda r: r.seconds_of("plain"),
            "factor step, s": lambda r: r.seconds_of("factor"),
            "inverse step, s": lambda r: r.seconds_of("inverse"),
        },
        x="fraction",
        y=("state, MB", "plain step, s", "inverse step, s"),
        elsewhere="64 GPUs. Workers that share the cores of one machine do "
        "not show what a network costs.",
    ),
}
