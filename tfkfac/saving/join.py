"""The whole of what each replica of a job has a piece of."""

from collections.abc import Mapping

import numpy as np

from tfkfac.saving.entries import Piece

# What each replica has, by rank and by the entry's name in a file.
Pieces = Mapping[int, Mapping[str, Piece]]


def plan(pieces: Pieces) -> dict[str, list[int]]:
    """The replicas whose pieces make the whole of each entry."""
    needed: dict[str, list[int]] = {}
    for rank, own in sorted(pieces.items()):
        for key, piece in own.items():
            ranks = needed.setdefault(key, [])
            if not ranks or piece.is_stacked or piece.region is not None:
                ranks.append(rank)
    return needed


def join(
    key: str,
    pieces: Pieces,
    values: Mapping[int, np.ndarray],
    replicas: int,
) -> np.ndarray:
    """Puts an entry together.

    Args:
        key: Its name in a file.
        pieces: What each replica has.
        values: The pieces that `plan` names, by rank.
        replicas: Number of replicas of the job.

    Returns:
        The whole. Of what each replica has for itself, one after the other,
        unless there is one replica only.
    """
    first, value = next(iter(values.items()))
    piece = pieces[first][key]
    if piece.region is not None:
        whole = np.zeros(piece.region.whole, value.dtype)
        for rank, part in values.items():
            region = pieces[rank][key].region
            assert region is not None
            region.put(whole, part)
        return whole
    if piece.is_stacked and replicas > 1:
        stacked = np.zeros((replicas, *value.shape), value.dtype)
        for rank, part in values.items():
            stacked[rank] = part
        return stacked
    return value
