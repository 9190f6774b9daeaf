"""Overriding an attribute of an object, for good or in a with block."""

import contextlib
import functools
import itertools
import random
import threading
from collections.abc import Callable

import pytest

from tests.compat.turns import in_turns
from tfkfac.compat.overrides import (
    drop_from,
    keep_on,
    kept_on,
    overridden,
    override,
)


class Speaker:
    def say(self, text: str) -> str:
        return text


def adding(name: str) -> Callable[..., str]:
    def say(below: Callable[..., str], /, text: str) -> str:
        return f"{name}({below(text)})"

    return say


# --------------------------------------------------------------- for good
@pytest.mark.parametrize("order", itertools.permutations("abc"))
@pytest.mark.parametrize("own", [False, True])
def test_overrides_go_in_any_order(order: tuple[str, ...], own: bool) -> None:
    speaker = Speaker()
    if own:
        speaker.say = lambda text: f"own {text}"  # type: ignore[method-assign]
    before = dict(vars(speaker))
    hello = speaker.say("hello")
    left = {name: override(speaker, "say", adding(name)) for name in "abc"}
    for name in order:
        want = hello
        for other in left:
            want = f"{other}({want})"
        assert speaker.say("hello") == want
        left.pop(name).remove()
    assert vars(speaker) == before
    assert speaker.say("hello") == hello


def test_removing_twice_removes_once() -> None:
    speaker = Speaker()
    first, _ = [override(speaker, "say", adding(name)) for name in "ab"]
    first.remove()
    first.remove()
    assert speaker.say("hello") == "b(hello)"


def test_other_objects_are_untouched() -> None:
    override(Speaker(), "say", adding("a"))
    assert Speaker().say("hello") == "hello"


@pytest.mark.parametrize("copies_marks", [False, True])
def test_what_others_put_on_top_stays(copies_marks: bool) -> None:
    """Ours goes from below, and comes back on top."""
    speaker = Speaker()
    ours = override(speaker, "say", adding("ours"))
    below = speaker.say

    def theirs(text: str) -> str:
        return f"theirs({below(text)})"

    if copies_marks:
        theirs = functools.wraps(below)(theirs)
    speaker.say = theirs  # type: ignore[method-assign]
    assert speaker.say("hello") == "theirs(ours(hello))"
    again = override(speaker, "say", adding("again"))
    assert speaker.say("hello") == "again(theirs(ours(hello)))"
    ours.remove()
    assert speaker.say("hello") == "again(theirs(hello))"
    again.remove()
    assert speaker.say is theirs
    assert speaker.say("hello") == "theirs(hello)"


def test_a_function_held_on_to_follows() -> None:
    speaker = Speaker()
    first = override(speaker, "say", adding("a"))
    held = speaker.say
    override(speaker, "say", adding("b"))
    assert held("hello") == "b(a(hello))"
    first.remove()
    assert held("hello") == "b(hello)"


def test_things_kept_on_an_object() -> None:
    speaker = Speaker()
    assert kept_on(speaker, "thing") is None
    for value in (1, 2):
        assert keep_on(speaker, "thing", lambda value=value: value) == 1
    assert kept_on(speaker, "thing") == 1
    assert drop_from(speaker, "thing") == 1
    assert drop_from(speaker, "thing") is None
    assert not vars(speaker)


# ---------------------------------------------------------- in a with block
def test_blocks_left_in_the_order_entered() -> None:
    speaker = Speaker()
    blocks = [overridden(speaker, "say", adding(name)) for name in "ab"]
    for block in blocks:
        block.__enter__()
    assert speaker.say("hello") == "b(a(hello))"
    blocks[0].__exit__(None, None, None)
    assert speaker.say("hello") == "b(hello)"
    blocks[1].__exit__(None, None, None)
    assert speaker.say("hello") == "hello"
    assert not vars(speaker)


def test_a_block_that_raises() -> None:
    speaker = Speaker()
    with (
        contextlib.suppress(RuntimeError),
        overridden(speaker, "say", adding("a")),
    ):
        raise RuntimeError
    assert not vars(speaker)


@pytest.mark.parametrize("stays_longer", [0, 1])
def test_replicas_in_turns(stays_longer: int) -> None:
    """Enter, enter, leave, leave, in both orders; each sees its own."""
    speaker = Speaker()
    override(speaker, "say", adding("everyone"))
    said: list[str] = []

    def replica(number: int, switch: Callable[[], None]) -> None:
        with overridden(speaker, "say", adding(f"replica {number}")):
            switch()
            said.append(speaker.say(f"{number}"))
            if number == stays_longer:
                switch()
            said.append(speaker.say(f"{number}"))
        switch()
        said.append(speaker.say(f"{number} outside"))

    in_turns(*(functools.partial(replica, number) for number in range(2)))
    inside = [f"replica {i}(everyone({i}))" for i in range(2)]
    outside = [f"everyone({i} outside)" for i in range(2)]
    assert sorted(said) == sorted(2 * inside + outside)


def test_other_threads_do_not_see_it() -> None:
    speaker = Speaker()
    seen: list[str] = []
    with overridden(speaker, "say", adding("a")):
        other = threading.Thread(target=lambda: seen.append(speaker.say("b")))
        other.start()
        other.join()
    assert seen == ["b"]


def test_many_threads_leave_nothing_behind() -> None:
    """Threads that nobody orders."""
    speaker = Speaker()
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for step in range(300):
            with contextlib.ExitStack() as blocks:
                want = "x"
                for depth in range(rng.randrange(4)):
                    name = f"{number} {step} {depth}"
                    blocks.enter_context(
                        overridden(speaker, "say", adding(name))
                    )
                    want = f"{name}({want})"
                got = speaker.say("x")
                if got != want:
                    wrong.append(got)

    threads = [threading.Thread(target=work, args=[i]) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not vars(speaker)
