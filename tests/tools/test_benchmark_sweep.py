import pathlib
from typing import Any

import pytest

from benchmarks import plots, sweep
from benchmarks.jobs import Setting
from benchmarks.sweep import Axis, Size, exponent


def test_exponent_of_a_power() -> None:
    sizes = (256, 512, 1024)
    assert exponent(sizes, [3 * n**2.5 for n in sizes]) == pytest.approx(2.5)


def test_counts_of_one_worker() -> None:
    """One layer of 3 inputs, the 1 included, and 2 outputs; 4 rows."""
    size = Size(width=2, depth=1, batch=4, workers=1)
    assert sweep.sgd_step(size) == 3 * 4 * 6
    # Matrices: 2 2^3, fewer than 4 3^2 + 4 2^2 on the rows.
    assert sweep.plain_step(size) == 72 + 16
    assert sweep.factor_step(size) == 88 + 4 * (9 + 4)
    assert sweep.inverse_step(size) == 140 + 27 + 8
    assert sweep.state_bytes(size) == 2 * 4 * (9 + 4)
    assert sweep.factor_traffic(size) == sweep.inverse_traffic(size) == 0


def test_counts_of_four_workers() -> None:
    size = Size(width=2, depth=2, batch=4, workers=4)
    assert sweep.sgd_step(size) == 2 * 3 * 1 * 6
    # One row each: 3^2 + 2^2 a layer.
    assert sweep.plain_step(size) == 36 + 2 * 13
    assert sweep.inverse_step(size) == 36 + 2 * (13 + 13) + 2 * 35 / 4
    # A ring sends 3/4 of everything twice, a broadcast once. A flag and four
    # faults go with the gradients of a layer.
    assert sweep.factor_traffic(size) == 4 * 1.5 * 2 * (6 + 5 + 13)
    assert sweep.inverse_traffic(size) == 4 * 2 * (1.5 * (6 + 5) + 0.75 * 13)


def test_an_axis(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    asked = []

    def measure_point(model: str, setting: Setting) -> dict[str, float]:
        asked.append((model, setting.batch))
        return dict.fromkeys(sweep.COUNTS, float(setting.batch) ** 2)

    axis = Axis(
        "batch", (4, 8, 16), 2, lambda size: ("mlp-3x2", {"batch": size})
    )
    monkeypatch.setattr(sweep, "AXES", (axis,))
    monkeypatch.setattr(sweep, "measure_point", measure_point)
    growth = sweep.run(Setting(), is_quick=True)
    assert asked == [("mlp-3x2", 4), ("mlp-3x2", 8)]
    lines: dict[str, Any] = {line["quantity"]: line for line in growth}
    assert lines["SGD step"]["exponent"] == pytest.approx(2.0)
    assert lines["SGD step"]["counted_exponent"] == pytest.approx(1.0)
    assert lines["state"]["counted_exponent"] == pytest.approx(0.0)
    assert lines["factor traffic"]["counted_exponent"] is None
    plots.save_growth(tmp_path / "growth.png", growth)
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_point_of_two_workers() -> None:
    """The library's own counts are those of `COUNTS`, but for clip factors."""
    setting = Setting(batch=8, workers=2, mode="fit", threads=1)
    point = sweep.measure_point("mlp-16x2", setting)
    assert set(point) == set(sweep.COUNTS)
    size = Size(16, 2, 8, 2)
    assert point["state"] == pytest.approx(sweep.state_bytes(size), rel=0.02)
    for name in ("factor traffic", "inverse traffic"):
        counted = sweep.COUNTS[name](size)
        assert point[name] == pytest.approx(counted, rel=0.02)
    assert all(point[f"{kind} step"] > 0 for kind in ("SGD", *sweep.KINDS))
