"""Pauloski et al., KAISA: An Adaptive Second-Order Optimizer Framework."""

from experiments.running import Case, Experiment, Training, optimizer

PAPER = "KAISA (SC'21)"
# By script: the optimizer without K-FAC, K-FAC, and arguments of a quick run.
APPLICATIONS = {
    "classification": ("sgd", "kfac", "--model cnn --epochs 5"),
    "segmentation": ("adam", "kfac", "--epochs 3"),
    "detection": ("sgd", 'kfac:skip_layers=["neck"]', "--epochs 3"),
    "masked_language": ("adam", "kfac:kl_clip=0.005", "--epochs 1"),
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
    return Training(hybrid(case["fraction"]), f"--model {model}", workers=4)


def memory(case: Case, quick: bool) -> Training:
    script, arguments = case["application"], "--epochs 1"
    if quick:
        arguments += " --quick"
        arguments += " --model cnn" * (script == "classification")
    kfac = hybrid(case["fraction"])
    return Training(kfac, arguments, 2 if quick else 4, script)


def fixed_batch(case: Case, quick: bool) -> Training:
    script = case["application"]
    baseline, kfac, arguments = APPLICATIONS[script]
    name = kfac if case["optimizer"] == "K-FAC" else baseline
    return Training(name, arguments if quick else "", script=script)


EXPERIMENTS = {
    "kaisa-table-3": Experiment(
        f"{PAPER}, table 3",
        "With the same batches, is K-FAC faster than the application's own "
        "optimizer?",
        {
            "application": tuple(APPLICATIONS),
            "optimizer": ("baseline", "K-FAC"),
        },
        {},
        fixed_batch,
        ("metric", "steps to target", "CPU s to target", "CPU seconds"),
        "ResNet-50, Mask R-CNN, U-Net and BERT-Large on up to 64 A100 GPUs. "
        "The applications here are of the same types.",
    ),
    "kaisa-table-5": Experiment(
        f"{PAPER}, table 5",
        "How much memory does K-FAC take in each application, with one and "
        "with all workers as gradient workers of a layer?",
        {"application": tuple(APPLICATIONS), "fraction": (0.5, 1.0)},
        {"fraction": (0.25, 0.5, 1.0)},
        memory,
        ("state, MB", "factors, MB", "decompositions, MB"),
        "its models, on 64 GPUs.",
    ),
    "kaisa-figure-6": Experiment(
        f"{PAPER}, figure 6",
        "How much memory do more gradient workers cost, and how many messages "
        "do they save? (Four workers.)",
        {"fraction": (0.25, 0.5, 1.0)},
        {},
        fraction,
        ("state, MB", "plain step, MB", "inverse step, MB", "seconds"),
        "64 GPUs. Workers that share the cores of one machine do not show the "
        "cost of a network.",
    ),
}
