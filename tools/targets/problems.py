"""What is trained: how long, in which batches, at which learning rates."""

import dataclasses
from collections.abc import Mapping

# What the steps of a schedule are multiplied by.
LENGTHS = {"quadruple": 4.0, "double": 2.0, "full": 1.0, "half": 0.5}
# What the widths of the layers are divided by: the twins have about a quarter
# of the weights, and half of the examples.
SIZES = {"full": 1, "small": 2}
BASELINES = ("sgd", "adam", "adamw", "muon")
# `quadratic` has no learning rate: step and damping follow the quadratic model.
KFACS = ("kfac", "kfac-quadratic")
METHODS = (*BASELINES, *KFACS, "fosi-sgd", "fosi-adam")

Rates = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, its data, and the baselines' and K-FAC's schedules.

    Attributes:
        metric: What is measured on held-out examples.
        higher_is_better: Whether a larger metric is a better one.
        data: Name of the data, see `data.load`.
        examples: Number of training examples, of the full size.
        epochs: Epochs of the baselines' full schedule.
        batch: Examples of a baseline's batch.
        kfac_share: K-FAC's epochs over those of the baselines.
        kfac_batch: Examples of a batch of K-FAC's.
        kfac: Further arguments of `KFAC`.
        rates: Learning rates of each baseline.
    """

    metric: str
    data: str
    examples: int
    epochs: float
    batch: int
    kfac_batch: int
    rates: Mapping[str, Rates]
    higher_is_better: bool = False
    kfac_share: float = 0.5
    kfac: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def count_examples(self, size: str) -> int:
        """Number of training examples."""
        return self.examples // SIZES[size]

    def batch_of(self, is_kfac: bool) -> int:
        """Examples of a batch."""
        return self.kfac_batch if is_kfac else self.batch

    def count_steps(self, size: str, length: str, is_kfac: bool) -> int:
        """Steps of a whole training; its last batches are full ones."""
        epochs = self.epochs * LENGTHS[length]
        if is_kfac:
            epochs *= self.kfac_share
        examples = epochs * self.count_examples(size)
        return round(examples / self.batch_of(is_kfac))


def _rates(first: float) -> Rates:
    """Four rates, each twice the one before."""
    return first, 2 * first, 4 * first, 8 * first


_CLASSIFIER_RATES = {
    "sgd": _rates(0.02),
    "adam": _rates(1e-3),
    "adamw": _rates(1e-3),
    "muon": _rates(2e-3),
}
_DEEP_RATES = {
    "sgd": _rates(0.01),
    "adam": _rates(2.5e-4),
    "adamw": _rates(2.5e-4),
    "muon": _rates(1e-3),
}

PROBLEMS = {
    "autoencoder": Problem(
        metric="squared error of an image",
        data="mnist",
        examples=60_000,
        epochs=4,
        batch=125,
        kfac_batch=500,
        kfac_share=0.25,
        rates={
            "sgd": _rates(1.0),
            "adam": _rates(5e-4),
            "adamw": _rates(5e-4),
            "muon": _rates(2e-3),
        },
    ),
    "cnn": Problem(
        metric="accuracy",
        higher_is_better=True,
        data="fashion_mnist",
        examples=60_000,
        epochs=3,
        batch=125,
        kfac_batch=250,
        kfac_share=2 / 3,
        rates=_CLASSIFIER_RATES,
    ),
    "resnet20": Problem(
        metric="accuracy",
        higher_is_better=True,
        data="fashion_mnist",
        examples=60_000,
        epochs=3,
        batch=125,
        kfac_batch=250,
        rates=_CLASSIFIER_RATES,
    ),
    "mlp": Problem(
        metric="accuracy",
        higher_is_better=True,
        data="fashion_mnist",
        examples=60_000,
        epochs=3,
        batch=125,
        kfac_batch=500,
        rates=_DEEP_RATES,
    ),
    "transformer": Problem(
        metric="nats of a character",
        data="text",
        examples=32_000,
        epochs=1,
        batch=32,
        kfac_batch=32,
        kfac={"kl_clip": 0.005},
        rates={**_CLASSIFIER_RATES, "sgd": _rates(0.05)},
    ),
    "regression": Problem(
        metric="unexplained variance",
        data="arm",
        examples=20_000,
        epochs=20,
        batch=100,
        kfac_batch=250,
        rates={**_CLASSIFIER_RATES, "sgd": _rates(0.01)},
    ),
}
