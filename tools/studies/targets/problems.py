"""The problems: data, loss, epochs, batches, and the rates that are tried.

The models and the data are in `models`, `data` and `tiny`, by the same names.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence

# Divisors of the layers' widths. Small problems have about a quarter of the
# weights and half of the examples of full ones; tiny problems are others.
SIZES = {"full": 1, "small": 2, "tiny": 1}
TINY = "tiny"
# Share of the training examples that a search holds out.
HELD_OUT = 1 / 6


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, its data, and how it is trained.

    Attributes:
        metric: The metric, in words.
        score: "accuracy", "loss" or "pixels", see `models.make_measure`.
        data: Name of the data.
        examples: Number of training examples at full size.
        epochs: Epochs of a schedule of full length.
        batches: Batch sizes that are tried.
        rates: Learning rates that are tried, by optimizer.
        loss: Name of the loss, see `models.LOSSES`.
        augmented: True to shift and flip images.
        batch_statistics: True to measure with the statistics of the batch:
            moving averages need longer trainings.
        needs: An optional package, or "".
        validation: Second metric at the end, of test examples, or "".
    """

    metric: str
    score: str
    data: str
    examples: int
    epochs: float
    batches: Sequence[int]
    rates: Mapping[str, Sequence[float]]
    loss: str = "classes"
    augmented: bool = False
    batch_statistics: bool = False
    needs: str = ""
    validation: str = ""

    @property
    def higher_is_better(self) -> bool:
        """True if a larger metric is better."""
        return self.score == "accuracy"

    def count_examples(self, size: str) -> int:
        """Return the number of training examples."""
        return self.examples // SIZES[size]

    @property
    def is_here(self) -> bool:
        """True if the package that it needs is installed."""
        return (
            not self.needs or importlib.util.find_spec(self.needs) is not None
        )


def problem_of(name: str, size: str) -> Problem:
    """Return a problem by name and size."""
    return problems_of(size)[name]


def problems_of(size: str) -> Mapping[str, Problem]:
    """Return all problems of a size, by name."""
    return TINY_PROBLEMS if size == TINY else FULL_PROBLEMS


def _doubled(first: float) -> Sequence[float]:
    """Return four rates, each twice the previous rate."""
    return first, 2 * first, 4 * first, 8 * first


def _rates(
    sgd: float, adam: float = 1e-3, muon: float = 2e-3
) -> Mapping[str, Sequence[float]]:
    """Return the rates of all optimizers, from their smallest."""
    return {
        "sgd": _doubled(sgd),
        "adam": _doubled(adam),
        "muon": _doubled(muon),
    }


_IMAGES = (125, 250, 500)

FULL_PROBLEMS = {
    "autoencoder": Problem(
        metric="squared error of an image",
        score="pixels",
        data="mnist",
        examples=60_000,
        epochs=4,
        batches=_IMAGES,
        rates=_rates(sgd=1.0, adam=5e-4),
        loss="pixels",
    ),
    "mlp": Problem(
        metric="accuracy",
        score="accuracy",
        data="fashion_mnist",
        examples=60_000,
        epochs=3,
        batches=_IMAGES,
        rates=_rates(sgd=0.01, adam=2.5e-4, muon=1e-3),
    ),
    "cnn": Problem(
        metric="accuracy",
        score="accuracy",
        data="fashion_mnist",
        examples=60_000,
        epochs=3,
        batches=_IMAGES,
        rates=_rates(sgd=0.02),
    ),
    "resnet20": Problem(
        metric="accuracy",
        score="accuracy",
        data="fashion_mnist",
        examples=60_000,
        epochs=3,
        batches=_IMAGES,
        rates=_rates(sgd=0.02),
        loss="smoothed classes",
        augmented=True,
    ),
    "transformer": Problem(
        metric="nats of a character",
        score="loss",
        data="text",
        examples=32_000,
        epochs=1,
        batches=(16, 32, 64),
        rates=_rates(sgd=0.05),
    ),
    "llama": Problem(
        metric="nats of a character",
        score="loss",
        data="tokens",
        examples=32_000,
        epochs=1,
        batches=(16, 32, 64),
        rates=_rates(sgd=0.05),
        needs="keras_hub",
    ),
    "regression": Problem(
        metric="unexplained variance",
        score="loss",
        data="arm",
        examples=20_000,
        epochs=20,
        batches=(50, 100, 250),
        rates=_rates(sgd=0.01),
        loss="squares",
    ),
    "vae": Problem(
        metric="nats of an image, at most",
        score="loss",
        data="mnist",
        examples=60_000,
        epochs=4,
        batches=_IMAGES,
        rates=_rates(sgd=1e-3, adam=5e-4),
        loss="summed pixels",
    ),
}

_TINY_RATES = {
    "sgd": (0.01, 0.03, 0.1, 0.3),
    "adam": (1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (3e-3, 1e-2, 3e-2, 0.1),
}


def _tiny(
    examples: int,
    batch: int,
    epochs: int,
    data: str = "digits",
    loss: str = "classes",
    validation: str = "accuracy",
    needs: str = "",
    batch_statistics: bool = False,
) -> Problem:
    """Return a problem of seconds; its result is the training loss."""
    return Problem(
        metric="training loss",
        score="loss",
        validation=validation,
        data=data,
        examples=examples,
        epochs=epochs,
        batches=(batch,),
        rates=_TINY_RATES,
        loss=loss,
        needs=needs,
        batch_statistics=batch_statistics,
    )


def _language(examples: int, batch: int, epochs: int) -> Problem:
    """Return a language model of keras-hub on random sequences."""
    return _tiny(
        examples, batch, epochs, "drawn", validation="loss", needs="keras_hub"
    )


TINY_PROBLEMS = {
    "cnn": _tiny(960, 48, 6),
    "autoencoder": _tiny(1440, 96, 20, loss="squares", validation="loss"),
    "regression": _tiny(
        1200, 60, 15, "drawn", loss="squares", validation="loss"
    ),
    "mlp": _tiny(12_000, 120, 3, "fashion_mnist"),
    "siamese": _tiny(548, 64, 30, loss="pairs", validation="loss"),
    "vae": _tiny(1440, 96, 20, loss="summed pixels", validation="loss"),
    "lstm": _tiny(700, 50, 12, "drawn"),
    "vit": _tiny(600, 50, 8, needs="keras_hub"),
    "bert": _tiny(1500, 50, 6, "drawn", needs="keras_hub"),
    "gpt2": _language(600, 50, 6),
    "llama": _language(1200, 32, 4),
    "llama-tied": _language(1200, 32, 4),
    "mobilenet": _tiny(512, 64, 4, batch_statistics=True),
}
