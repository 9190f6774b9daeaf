"""Files that are replaced as a whole, and checksums of their content."""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable

# Beginning of the name of a file that is not complete yet.
WRITING = ".writing-"
_MARK = b"\ntfkfac sha256 "  # before the digest, at the end of a file
_HEX_DIGITS = 64  # of SHA-256
_CHUNK = 2**20  # bytes


def replace_file(
    path: pathlib.Path, write: Callable[[pathlib.Path], None]
) -> None:
    """Write a file beside its place, and move it there when it is on disk.

    At any moment the place has the old file or the new one, both whole. `write`
    is given a path that ends as the place does.

    Raises:
        OSError: If that fails. The place is as before, and nothing is beside
            it.
    """
    beside = path.with_name(f"{WRITING}{path.name}")
    try:
        write(beside)
        _sync(beside)
        os.replace(beside, path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def append_checksum(path: pathlib.Path) -> None:
    """Append the SHA-256 digest of a file to it.

    HDF5 reads a file up to the length that is in its header, and ignores what
    follows.

    Raises:
        OSError: If the file cannot be read or written.
    """
    digest = _digest(path, path.stat().st_size)
    with path.open("ab") as file:
        file.write(_MARK + digest.encode())


def verify_checksum(path: pathlib.Path) -> str:
    """Return the checksum at the end of a file after a comparison.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it has no checksum or another content. The message
            completes a sentence that begins with the file's name.
    """
    size = path.stat().st_size - len(_MARK) - _HEX_DIGITS
    with path.open("rb") as file:
        file.seek(max(size, 0))
        end = file.read()
    mark, stored = end[: len(_MARK)], end[len(_MARK) :]
    if size < 0 or mark != _MARK:
        raise ValueError("has no checksum at its end")
    digest = _digest(path, size)
    if stored != digest.encode():
        raise ValueError("does not have the content of its checksum")
    return digest


def _digest(path: pathlib.Path, size: int) -> str:
    """SHA-256 of the first bytes of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in range(0, size, _CHUNK):
            digest.update(file.read(min(_CHUNK, size - start)))
    return digest.hexdigest()


def _sync(path: pathlib.Path) -> None:
    """Wait until a file, or a directory's list of files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
