"""What `summary` prints, read back as tables."""

import re
from typing import Any

import keras

import tfkfac
from tests.support.options import kfac as options_kfac
from tests.support.small import FEATURES, kfac_of, summary_text

_bound: list[Any] = []


def tables(optimizer: Any) -> list[list[list[str]]]:
    """Cells of each table of the summary, without the headers."""
    lines = summary_text(optimizer).splitlines()
    rules = [i for i, line in enumerate(lines) if re.fullmatch("-+", line)]
    assert len(rules) % 3 == 0
    return [
        [re.split(r" {2,}", line) for line in lines[rules[i + 1] + 1 : end]]
        for i, end in zip(range(0, len(rules), 3), rules[2::3], strict=True)
    ]


def blocks_of(optimizer: Any) -> dict[str, list[str]]:
    """Kind, A, G, weights and bytes of each block, by path."""
    if "No layer is preconditioned." in summary_text(optimizer):
        return {}
    rows = tables(optimizer)[0]
    found = {row[0]: row[1:] for row in rows}
    assert len(found) == len(rows)
    return found


def leftovers_of(optimizer: Any) -> dict[str, str]:
    """Reason for each leftover variable, by path and name."""
    text = summary_text(optimizer)
    if "optimizer, without curvature:" not in text:
        return {}
    rows = tables(optimizer)[-1]
    found = {f"{row[0]}:{row[1]}": row[3] for row in rows}
    assert len(found) == len(rows)
    return found


def bind(model: Any, **kwargs: Any) -> tfkfac.KFAC:
    _bound.append(model)  # an optimizer does not keep its model
    model.compile(options_kfac(**kwargs), "mse", run_eagerly=True)
    return kfac_of(model)


def sequential(*parts: Any, shape: tuple[int, ...] = (FEATURES,)) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input(shape), *parts])
