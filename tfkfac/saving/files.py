"""Files that are written as a whole or not at all."""

import contextlib
import os
import pathlib
from collections.abc import Callable


def replace_file(
    path: pathlib.Path, write: Callable[[pathlib.Path], None]
) -> None:
    """Writes a file beside its place, and puts it there when it is on disk.

    Whatever happens, the place has the old file or the new one, both whole.

    Args:
        path: The place.
        write: Writes the file to the path it is given, which ends as `path`.

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


# What the name of a file begins with that is not whole yet.
WRITING = ".writing-"


def _sync(path: pathlib.Path) -> None:
    """Waits until a file, or a directory's list of files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
