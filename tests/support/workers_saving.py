"""What the tests of saved state run, alone and on every worker."""

from typing import Any

import numpy as np

from tests.support import workers_fosi, workers_modes
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.workers_modes import FEEDS, dataset, floats, images, shares

# Step 5 is neither of factors nor of inverses, and in the middle of an
# estimation.
STOP, END = 5, 9


def build(kind: str | None, optimizer: str, options: dict[str, Any]) -> Any:
    """A compiled model; `model` and `inner` may be among the options."""
    options = dict(options)
    family = {"kfac": workers_modes, "fosi": workers_fosi}[optimizer]
    model = options.pop("model", {"kfac": "cnn", "fosi": "mlp"}[optimizer])
    inner = options.pop("inner", "sgd")
    return family.compiled(kind, model, inner, options)


def train(
    kind: str | None, network: Any, begin: int, end: int, *callbacks: Any
) -> None:
    """The steps of the feed from one to another, an epoch each."""
    steps = shares(FEEDS["uneven"](), strategy(kind).num_replicas_in_sync)
    batches = dataset(kind, *images(), steps[begin:end], None)
    network.fit(
        batches,
        epochs=end,
        initial_epoch=begin,
        steps_per_epoch=1,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def everything(kind: str | None, network: Any) -> dict[str, Array]:
    """All that this process has."""
    optimizer = network.optimizer
    variables = [*network.variables, *optimizer.variables]
    found = {
        f"variable {i} of replica {rank}": value
        for rank, values in enumerate(copies(kind, variables))
        for i, value in enumerate(values)
    }
    for rank in local_ranks(kind):
        for entry in optimizer.method.contents(rank).entries:
            found[f"{entry.key} of {rank}"] = np.array(entry.variable.numpy())
    return found


def differences(got: dict[str, Array], want: dict[str, Array]) -> list[str]:
    assert list(got) == list(want)
    return [k for k in want if not np.array_equal(got[k], want[k])]


def is_chief(kind: str | None) -> bool:
    return 0 in local_ranks(kind)


def save(kind: str | None, network: Any, path: str) -> None:
    """By the first worker alone; the others wait until it is done."""
    network.optimizer.gather_state()
    if is_chief(kind):
        network.save_weights(path)
    network.optimizer.gather_state()


def resume(
    kind: str | None, optimizer: str, path: str, **options: Any
) -> dict[str, Any]:
    """A run, and one that was saved and loaded on its way.

    Returns:
        What differs after loading, and at the end; that must have changed.
    """
    with floats("float64"):
        whole = build(kind, optimizer, options)
        train(kind, whole, 0, END)
        first = build(kind, optimizer, options)
        train(kind, first, 0, STOP)
        save(kind, first, path)
        saved = everything(kind, first)
        second = build(kind, optimizer, options)
        train(kind, second, 0, 1)
        second.load_weights(path)
        loaded = everything(kind, second)
        train(kind, second, STOP, END)
    final = everything(kind, whole)
    return {
        "loaded": differences(loaded, saved),
        "end": differences(everything(kind, second), final),
        "changed": differences(final, saved),
    }


def part(
    kind: str | None,
    optimizer: str,
    begin: int,
    end: int,
    source: str | None,
    target: str | None,
    **options: Any,
) -> dict[str, Any]:
    """Some steps, from what was saved in a file and to another."""
    with floats("float64"):
        network = build(kind, optimizer, options)
        if source is not None:
            network.load_weights(source)
        train(kind, network, begin, end)
        if target is not None:
            save(kind, network, target)
    return {"weights": network.get_weights()}
