"""The problems: data, loss, epochs, batches, and the rates that are tried.

The models and the data are in `models`, `data` and `tiny`, by the same names.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

# Divisors of the layers' widths. Small problems have about a quarter of the
# weights and half of the examples of full problems; tiny problems differ.
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
        epochs: Epochs of a schedule of full length.
        rates: Learning rates that are tried, by optimizer.
        data: Name of the data.
        examples: Number of training examples at full size.
        batches: Batch sizes that are tried.
        loss: Name of the loss, see `models.LOSSES`.
        augmented: True to shift and flip images.
        batch_statistics: True to measure with the statistics of the batch:
            moving averages need longer trainings.
        needs: An optional package, or "".
        validation: Second metric at the end, of test examples, or "".
    """

    metric: str
    score: str
    epochs: float
    rates: Mapping[str, Sequence[float]]
    data: str = "mnist"
    examples: int = 60_000
    batches: Sequence[int] = (125, 250, 500)
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
    def is_installed(self) -> bool:
        """True if the optional package is installed."""
        return not self.needs or find_spec(self.needs) is not None


def problems_of(size: str) -> Mapping[str, Problem]:
    """Return all problems of a size, by name."""
    return TINY_PROBLEMS if size == TINY else FULL_PROBLEMS


def _rates(
    sgd: float, adam: float = 1e-3, muon: float = 2e-3
) -> Mapping[str, Sequence[float]]:
    """Return four rates of each optimizer, each twice the previous rate."""
    smallest = {"sgd": sgd, "adam": adam, "muon": muon}
    return {
        name: [rate * factor for factor in (1, 2, 4, 8)]
        for name, rate in smallest.items()
    }


def _fashion(rates: Mapping[str, Sequence[float]], **changes: Any) -> Problem:
    """Return a classifier of Fashion-MNIST."""
    return Problem(
        "accuracy", "accuracy", 3, rates, data="fashion_mnist", **changes
    )


def _characters(data: str, **changes: Any) -> Problem:
    """Return a language model of Python's standard library."""
    return Problem(
        metric="nats of a character",
        score="loss",
        epochs=1,
        rates=_rates(sgd=0.05),
        data=data,
        examples=32_000,
        batches=(16, 32, 64),
        **changes,
    )


FULL_PROBLEMS = {
    "autoencoder": Problem(
        metric="squared error of an image",
        score="pixels",
        epochs=4,
        rates=_rates(sgd=1.0, adam=5e-4),
        loss="pixels",
    ),
    "mlp": _fashion(_rates(sgd=0.01, adam=2.5e-4, muon=1e-3)),
    "cnn": _fashion(_rates(sgd=0.02)),
    "resnet20": _fashion(
        _rates(sgd=0.02), loss="smoothed classes", augmented=True
    ),
    "transformer": _characters("text"),
    "llama": _characters("tokens", needs="keras_hub"),
    "regression": Problem(
        metric="unexplained variance",
        score="loss",
        epochs=20,
        rates=_rates(sgd=0.01),
        data="arm",
        examples=20_000,
        batches=(50, 100, 250),
        loss="squares",
    ),
    "vae": Problem(
        metric="nats of an image, at most",
        score="loss",
        epochs=4,
        rates=_rates(sgd=1e-3, adam=5e-4),
        loss="summed pixels",
    ),
}

_TINY_RATES = {
    "sgd": (0.01, 0.03, 0.1, 0.3),
    "adam": (1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (3e-3, 1e-2, 3e-2, 0.1),
}


def _tiny(examples: int, batch: int, epochs: int, **changes: Any) -> Problem:
    """Return a problem of seconds; its result is the training loss."""
    return Problem(
        metric="training loss",
        score="loss",
        epochs=epochs,
        rates=_TINY_RATES,
        examples=examples,
        batches=(batch,),
        **{"data": "digits", "validation": "accuracy", **changes},
    )


_HUB = {"needs": "keras_hub"}
_LOSS = {"validation": "loss"}
TINY_PROBLEMS = {
    "cnn": _tiny(960, 48, 6),
    "autoencoder": _tiny(1440, 96, 20, loss="squares", **_LOSS),
    "regression": _tiny(1200, 60, 15, data="drawn", loss="squares", **_LOSS),
    "mlp": _tiny(12_000, 120, 3, data="fashion_mnist"),
    "siamese": _tiny(548, 64, 30, loss="pairs", **_LOSS),
    "vae": _tiny(1440, 96, 20, loss="summed pixels", **_LOSS),
    "lstm": _tiny(700, 50, 12, data="drawn"),
    "vit": _tiny(600, 50, 8, **_HUB),
    "bert": _tiny(1500, 50, 6, data="drawn", **_HUB),
    "gpt2": _tiny(600, 50, 6, data="drawn", **_HUB, **_LOSS),
    "llama": _tiny(1200, 32, 4, data="drawn", **_HUB, **_LOSS),
    "llama-tied": _tiny(1200, 32, 4, data="drawn", **_HUB, **_LOSS),
    "mobilenet": _tiny(512, 64, 4, batch_statistics=True),
}
