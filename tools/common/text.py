"""Character codes of the sources of Python's standard library."""

import pathlib
import sysconfig

import numpy as np

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


def pieces(text: bytes, length: int) -> np.ndarray:
    """Return the codes of a text, `(pieces, length)`."""
    codes = _CODES[np.frombuffer(text, np.uint8)]
    return codes[: len(codes) // length * length].reshape(-1, length)
