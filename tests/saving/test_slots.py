"""State that is declared once: variables, entries, reset and bytes."""

import pathlib

import tensorflow as tf

from tfkfac.saving.entries import Region, Spread
from tfkfac.saving.slots import Slots, planned

PLACE = Region((4,), (2,))


class Two(Slots):
    def __init__(self) -> None:
        super().__init__("two", spread=Spread.OWNED, part="some")
        self.part = self.slot("half", [2], "float32", region=PLACE)
        self.number = self.slot("number", (), "float64", 1e-3, least=0)
        self.flag = self.slot("flag", (), "bool", False, saved=False)


def test_what_a_declaration_makes() -> None:
    """Values of float64 are exact, and `saved` is about files alone."""
    state = Two()
    half, number = state.entries()
    assert half.variable is state.part
    assert (half.name, half.region) == ("half", PLACE)
    assert (number.key, number.least) == ("some:number:", 0)
    assert {half.spread, number.spread} == {Spread.OWNED}
    assert state.bytes == 17
    for change in (state.part, state.number):
        change.assign(tf.ones_like(change))
    state.flag.assign(True)
    tf.function(state.reset)()
    assert state.part.numpy().tolist() == [0, 0]
    assert (state.number.numpy(), state.flag.numpy()) == (1e-3, False)


def test_planned_states_have_bytes_alone() -> None:
    with planned():
        state = Two()
    assert (state.bytes, state.part, state.entries()) == (17, None, [])


def test_a_checkpoint_follows_the_attributes(tmp_path: pathlib.Path) -> None:
    """By their names, each once, as if they were declared by hand."""
    path = tf.train.Checkpoint(state=Two()).save(str(tmp_path / "a"))
    names = [name.split("/.")[0] for name, _ in tf.train.list_variables(path)]
    kept = [name for name in names if name.startswith("state")]
    assert sorted(kept) == ["state/flag", "state/number", "state/part"]
