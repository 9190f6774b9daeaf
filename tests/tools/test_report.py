"""The page that shows what was logged."""

import csv
from pathlib import Path

import pytest

import report
from tfkfac.callbacks.curvature_logger import COLUMNS

pytest.importorskip("matplotlib")


def log(path: Path, *rows: tuple[int, str, str, float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for step, quantity, layer, value in rows:
            writer.writerow((step, 0, 1.0, quantity, layer, value))


def test_it_shows_all_that_was_logged(tmp_path: Path) -> None:
    """One plot for each subject."""
    log(
        tmp_path / "curvature.csv",
        *((s, "loss", "", 1 / s) for s in (10, 20, 30)),
        *((s, "accuracy", "", s / 30) for s in (10, 20, 30)),
        *((s, "trace", "one", 2.0 * s) for s in (10, 20, 30)),
        (10, "skipped_steps", "", 0.0),
    )
    log(tmp_path / "curvature-1.csv", (10, "trace", "<two>", 3.0))
    page = tmp_path / "page.html"
    assert report.main([str(tmp_path), str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "<two>" not in text  # a name is no HTML
    curves = report.read(tmp_path)
    assert {curve.name for curve in curves["trace"]} == {"one", "<two>"}
