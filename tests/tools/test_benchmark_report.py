from typing import Any

from benchmarks import report


def cost(mean: float, ratio: float, longest: float) -> dict[str, Any]:
    return {
        "mean_ms": mean,
        "median_ms": 2.0,
        "longest_ms": longest,
        "ratio": ratio,
        "cpu_ratio": ratio,
        "kinds_ms": {"plain": 2.0},
    }


def row(variant: str, *costs: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "M1",
        "variant": variant,
        "mixes": dict(zip(("(10,100)", "(1,10)"), costs, strict=True)),
        "first_step": {"seconds": 1.0, "cpu_seconds": 0.5},
        "peak_bytes": 3_000_000,
    }


ROWS = [
    row("sgd", cost(2.0, 1.0, 2.0), cost(2.1, 1.0, 2.0)),
    row("adam", cost(2.4, 1.2, 2.0), cost(2.4, 1.14, 2.0)),
    row("kfac-inverse", cost(3.4, 1.7, 6.0), cost(5.6, 2.667, 9.0)),
    {"model": "M1", "variant": "torch-sgd", "unavailable": "not installed"},
]


def test_markdown() -> None:
    steps, _, first, _ = report.markdown(ROWS).split("\n\n")
    assert steps == (
        "|  | M1 |\n"
        "| --- | --- |\n"
        "| `sgd` | 2.0 ms |\n"
        "| `adam` | 1.20 |\n"
        "| `kfac-inverse` | 1.70 / 2.67 (3.0) |"
    )
    assert first == (
        "|  | M1 |\n"
        "| --- | --- |\n"
        "| `sgd` | 0.5 |\n"
        "| `adam` | 0.5 |\n"
        "| `kfac-inverse` | 0.5 |"
    )
