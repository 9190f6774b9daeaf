"""Files that are whole, whatever happens while they are written."""

from pathlib import Path

import pytest

from tfkfac.callbacks.backup import replace_file


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.weights.h5"

    def write(beside: Path) -> None:
        assert beside.parent == tmp_path
        assert beside.name.endswith("a.weights.h5"), "Keras asks for it"
        beside.write_text(text)

    for text in ("old", "new"):
        replace_file(path, write)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file(
    error: BaseException, tmp_path: Path
) -> None:
    path = tmp_path / "a.h5"
    path.write_text("old")

    def write(beside: Path) -> None:
        beside.write_text("ne")
        raise error

    with pytest.raises(type(error)):
        replace_file(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
