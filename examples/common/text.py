"""Character codes of a text, by default of Python's standard library."""

import argparse
import pathlib
import sysconfig

import numpy as np

from common.data import Data, Split

_PRINTABLE = np.arange(ord(" "), ord("~") + 1)
# Printable ASCII, the end of a line, and one code for all other characters.
CHARACTERS = len(_PRINTABLE) + 2
_CODES = np.full(256, CHARACTERS - 1, "int32")
_CODES[_PRINTABLE] = np.arange(len(_PRINTABLE))
_CODES[ord("\n")] = len(_PRINTABLE)


def standard_library() -> bytes:
    """Return the concatenated sources of Python's standard library."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return b"".join(f.read_bytes() for f in sorted(folder.glob("*.py")))


def tfds_text(name: str, directory: pathlib.Path | None) -> bytes:
    """Return the training text of a set of TensorFlow Datasets."""
    import tensorflow_datasets as tfds

    rows = tfds.as_numpy(tfds.load(name, split="train", data_dir=directory))
    return b"\n".join(row["text"] for row in rows)


def pieces(text: bytes, length: int) -> np.ndarray:
    """Return the codes of a text, `(pieces, length)`."""
    codes = _CODES[np.frombuffer(text, np.uint8)]
    return codes[: len(codes) // length * length].reshape(-1, length)


def load(
    options: argparse.Namespace, length: int, examples: int, held_out: int = 500
) -> Data:
    """Load the text of `--dataset` and `--data-dir`; targets are the inputs.

    An example has `length` characters. The end of the text is the test set.
    """
    if options.dataset == "python":
        text = standard_library()
    else:
        text = tfds_text(options.dataset, options.data_dir)
    rows = pieces(text, length)
    train, test = rows[:-held_out][:examples], rows[-held_out:]
    return Data(Split(train, train), Split(test, test))
