"""The demo, cut short."""

import pathlib

import pytest

import demo
from targets.run import Run


@pytest.mark.slow
def test_demo(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot = tmp_path / "demo" / "digits.png"
    monkeypatch.setattr(Run, "count_steps", lambda self: 8)
    monkeypatch.setattr(demo, "TRIAL", 8)
    monkeypatch.setattr("sys.argv", ["demo.py", str(plot)])
    demo.main()
    text = capsys.readouterr().out
    assert "K-FAC      8 steps" in text
    assert text.count("Adam") == 4 + 1
    assert max(map(len, text.splitlines())) <= 87
    assert plot.stat().st_size > 5_000
