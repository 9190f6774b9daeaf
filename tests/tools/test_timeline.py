"""What a timeline says of steps: worked out by hand, and in a real job."""

from pathlib import Path

import pytest

import timeline
from timelines.events import Event, sent_together
from timelines.recording import of_step


def test_a_message_begins_with_the_last_who_comes() -> None:
    computes = Event("MatMul:MatMul", 0, 1)
    first = [computes, Event("a:CollectiveBcastSend", 2, 4, message=7)]
    second = [Event("b:CollectiveBcastRecv", 0.5, 3, message=7)]
    # Who has its part of a reduction may end before the last one comes.
    second += [Event("c:CollectiveReduce", 1, 2, message=8)]
    first += [Event("c:CollectiveReduce", 3, 5, message=8)]
    got = sent_together([first, second])
    assert [[e.interval for e in events] for events in got] == [
        [(0, 1), (2, 4), (3, 5)],
        [(2, 3), (2, 2)],
    ]


def test_what_begins_in_a_step_is_of_it() -> None:
    before, after = Event("a:Add", 0, 1), Event("d:Add", 6, 7)
    late = Event("c:CollectiveReduce", 3, 5.5, message=1)
    step = Event("step", 1.5, 5)
    got = of_step([before, Event("b:Add", 2, 3), late, after], step)
    assert [(e.name, e.interval) for e in got] == [
        ("b:Add", (2, 3)),
        ("c:CollectiveReduce", (3, 5)),
    ]


def test_tables() -> None:
    """A worker that sends for 4 ms, in 3 of which it computes."""
    name = "x/preconditioned_2/layers_1_3/collective/Send:CollectiveBcastSend"
    events = [
        Event("MatMul:MatMul", 0.000, 0.003),
        Event("MatMul:MatMul", 0.002, 0.005),
        Event(name, 0.002, 0.006, message=1),
        Event("collective/Reduce:CollectiveReduce", 0.0, 0.001, message=2),
    ]
    lines = list(timeline.rows(({"plain": [events]}, ["a", "b", "c", "d"])))
    assert lines[2] == "| plain | 0 | 6 | 5 | 5 | 80 % |"
    assert lines[5] == "| plain | preconditioned | b to d | 2 | 6 | 75 % |"
    assert len(lines) == 6


@pytest.mark.slow
def test_two_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All layers are in the tables, in the order of layers, and in a plot."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "step.png"
    arguments = ["--width", "16", "--depth", "1", "--plot", str(plot)]
    assert timeline.main([*arguments, "comm_opt", "dp_kfac"]) == 0
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capfd.readouterr().out.splitlines()
        if line.startswith("| ")
    ]
    for kind in ("plain", "factor", "inverse"):
        workers = [row for row in rows if row[0] == kind and row[1] in "01"]
        assert [row[1] for row in workers] == ["0", "1", "0", "1"]
        assert all(int(row[3]) > 0 for row in workers)
    sent = {(row[0], row[1]) for row in rows if " to " in row[2]}
    assert sent == {
        ("factor", "statistics"),
        ("inverse", "decompositions"),
        *((k, "preconditioned") for k in ("plain", "factor", "inverse")),
    }
    assert plot.read_bytes().startswith(b"\x89PNG")
