"""Atomic replacement of files, and checksums of their content."""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable

PARTIAL_PREFIX = ".writing-"  # prefix of incomplete files
_DIGEST_MARK = b"\ntfkfac sha256 "
_NUM_HEX_DIGITS = 64
_CHUNK_BYTES = 2**20


def replace_file(
    path: pathlib.Path, write: Callable[[pathlib.Path], None]
) -> None:
    """Replace a file atomically: write a temporary file, sync it, rename it.

    At any moment `path` is the complete old file or the complete new file. The
    temporary file has the same suffix; it is deleted if writing fails.
    """
    temporary = path.with_name(f"{PARTIAL_PREFIX}{path.name}")
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def append_checksum(path: pathlib.Path) -> None:
    """Append the SHA-256 digest of a file's content to the file.

    HDF5 ignores the bytes after the file length that its header contains.
    """
    digest = _digest(path, path.stat().st_size)
    with path.open("ab") as file:
        file.write(_DIGEST_MARK + digest.encode())


def verify_checksum(path: pathlib.Path) -> str:
    """Compare the checksum of a file with its content, and return it.

    The ValueError for a wrong or missing checksum has a predicate as text: the
    caller puts the file's name before it.
    """
    size = path.stat().st_size - len(_DIGEST_MARK) - _NUM_HEX_DIGITS
    with path.open("rb") as file:
        file.seek(max(size, 0))
        tail = file.read()
    mark, stored = tail[: len(_DIGEST_MARK)], tail[len(_DIGEST_MARK) :]
    if size < 0 or mark != _DIGEST_MARK:
        raise ValueError("has no checksum at its end")
    digest = _digest(path, size)
    if stored != digest.encode():
        raise ValueError("does not have the content of its checksum")
    return digest


def _digest(path: pathlib.Path, size: int) -> str:
    """Return the hexadecimal SHA-256 of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            digest.update(file.read(min(_CHUNK_BYTES, size - start)))
    return digest.hexdigest()


def _sync(path: pathlib.Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
