"""Rules of phrasings that a text model writes."""

import pytest

from pipelines.wishes.generate import training_phrasings
from pipelines.wishes.written import is_like, with_written
from tests.support.scripted_server import Step, running

SHIPPED = {"attribute": ["{a}"], "exclusion": ["{a} without {x}"], "turn": ["{a}\nbut no {x}"], "title": ["{words}"]}
MODELS = Step(200, {"data": [{"id": "large"}]})


def answer(*lines: str) -> Step:
    """Return a chat completion of these lines."""
    return Step(200, {"choices": [{"message": {"content": "\n".join(lines)}}]})


def test_lines_with_the_slots_of_their_kind_are_added() -> None:
    """Numbers and quotes are removed; other slots, repeated lines and fields of slots are dropped."""
    lines = ("1. Any {a} left?", '- "{a}, quick!"', "{a}", "{b} please", "{a.__class__}", "{a!r}", "{", "no slot")
    with running([MODELS, answer(*lines), answer("{a} but never {x}", "{x}")]) as server:
        templates = with_written(SHIPPED, 5, server.address, "secret")

    assert templates["attribute"] == ["{a}", "Any {a} left?", "{a}, quick!"]
    assert templates["exclusion"] == ["{a} without {x}", "{a} but never {x}"]
    assert (templates["turn"], templates["title"]) == (SHIPPED["turn"], SHIPPED["title"])
    assert len(server.requests) == 3


@pytest.mark.parametrize("step", [Step(500), Step(0), Step(200, {"choices": []}), Step(200, "no JSON")])
def test_a_server_that_fails_leaves_the_shipped_phrasings(step: Step) -> None:
    """A server that fails does not stop the reader from being made."""
    with running([step]) as server:
        assert with_written(SHIPPED, 5, server.address, model="large") == SHIPPED


def test_every_shipped_phrasing_is_of_its_own_kind() -> None:
    """The rule that judges written lines accepts the shipped ones."""
    for own in training_phrasings().values():
        assert all(is_like(line, [f"{line} "]) for line in own)
