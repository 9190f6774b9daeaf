"""Pauloski et al., KAISA: An Adaptive Second-Order Optimizer Framework."""

from typing import Any

from experiments.running import Case, Experiment, Training

PAPER = "KAISA (SC'21)"
# By script: the optimizer without K-FAC, arguments of K-FAC, the target, epochs
# of a quick run, and epochs.
APPLICATIONS: dict[str, tuple[str, dict[str, Any], float, int, int]] = {
    "classification": ("sgd", {}, 0.98, 5, 20),
    "segmentation": ("adam", {}, 0.8, 3, 6),
    "detection": ("sgd", {"skip_layers": ["neck"]}, 0.8, 3, 6),
    "masked_language": ("adam", {"kl_clip": 0.005}, 0.35, 1, 1),
}


def hybrid(fraction: float) -> dict[str, Any]:
    return {
        "distribution": "hybrid_opt",
        "gradient_worker_fraction": fraction,
        "factor_update_interval": 5,
        "inverse_update_interval": 10,
    }


def fraction(case: Case, quick: bool) -> Training:
    return Training(
        "kfac",
        hybrid(case["fraction"]),
        model="cnn" if quick else "resnet32",
        dataset="digits" if quick else "cifar10",
        epochs=2 if quick else 20,
        workers=4,
    )


def memory(case: Case, quick: bool) -> Training:
    return Training(
        "kfac",
        hybrid(case["fraction"]),
        script=case["application"],
        examples=256 if quick else 1024,
        epochs=1,
        batch_size=32,
        workers=2 if quick else 4,
    )


def fixed_batch(case: Case, quick: bool) -> Training:
    script, is_kfac = case["application"], case["optimizer"] == "K-FAC"
    baseline, kfac, target, quick_epochs, epochs = APPLICATIONS[script]
    return Training(
        "kfac" if is_kfac else baseline,
        kfac if is_kfac else {},
        script=script,
        examples=8_000 if script == "masked_language" else 1024,
        epochs=quick_epochs if quick else epochs,
        batch_size=64 if script == "classification" else 32,
        target=target,
    )


EXPERIMENTS = {
    "kaisa-table-3": Experiment(
        f"{PAPER}, table 3",
        "With the same batches, is K-FAC faster than the application's own "
        "optimizer?",
        {"application": (*APPLICATIONS,), "optimizer": ("baseline", "K-FAC")},
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
