"""Files that are whole, whatever happens while they are written."""

from pathlib import Path

import pytest

from tfkfac.callbacks.backup import replace_file


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    for text in ("old", "new"):
        replace_file(path, lambda beside, text=text: beside.write_text(text))
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_the_end_of_the_name_stays(tmp_path: Path) -> None:
    """Keras asks for it."""
    seen: list[Path] = []

    def write(beside: Path) -> None:
        seen.append(beside)
        beside.touch()

    replace_file(tmp_path / "a.weights.h5", write)
    assert seen[0].parent == tmp_path
    assert seen[0].name.endswith("a.weights.h5")


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
