"""`rationale: true`: a sentence from the text writer with what is left of the deadline, at both doors, and never at its cost."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.contracts.access import Priority
from services.errors import DependencyAway, Overloaded
from services.gateway.text.rationale import MAX_TOKENS, RationaleWriter, ended, prompt_of, whole_sentence
from tests.support.parrot import Parrot
from tests.support.wait import until
from tests.unit.gateway.clients import RestClient, RpcClient
from tests.unit.gateway.world import NOW_S, VERSION, World, catalogue_of, make_world, publish

DEADLINE_MS, SHORT_MS = 5_000, 400
RESERVE_S = 0.008
ASK = {"user_id": "long", "k": 3, "rationale": True, "deadline_ms": DEADLINE_MS}
IN_A_HURRY = ASK | {"deadline_ms": SHORT_MS}


@pytest.fixture
def parrot() -> Parrot:
    """Who writes."""
    return Parrot()


@pytest.fixture
async def world(tmp_path: Path, parrot: Parrot) -> AsyncIterator[World]:
    """A started plane that serves text."""
    root = tmp_path / "bundles"
    publish(root, VERSION, catalogue_of())
    made = make_world(root, parrot)
    await made.plane.start()
    yield made
    await made.plane.stop()


Door = RestClient | RpcClient


async def test_a_sentence_comes_with_the_items(door: Door, world: World, parrot: Parrot) -> None:
    """It is made from the titles of the history and of the items, short, and behind everybody else's text."""
    reply = await door.recommend(ASK)

    (asked,) = parrot.requests
    assert (reply.body["rationale_reason"], len(reply.body["items"])) == ("written", 3)
    assert reply.body["rationale"].startswith("Someone liked: Item 0; Item 1; Item 2; Item 3.")
    assert "Item 4; Item 5; Item 6" in asked.messages[-1].content
    assert (asked.priority, asked.max_tokens, asked.sampling.temperature) == (Priority.LOW, MAX_TOKENS, 0.0)
    assert "rationale" in reply.body["stages_ms"]
    assert world.metric("tailrace_rationales_total", outcome="written") == 1


@pytest.mark.parametrize(("known", "sent"), [((), {}), (("enable_thinking", "effort"), {"enable_thinking": False})])
async def test_a_model_that_can_think_first_is_told_not_to(
    door: Door, parrot: Parrot, known: tuple[str, ...], sent: dict[str, bool]
) -> None:
    """Where its chat template has the switch; others would refuse a variable that they do not read."""
    parrot.template_variables = frozenset(known)

    await door.recommend(ASK)

    assert parrot.requests[0].chat_template_kwargs == sent


async def test_who_does_not_ask_gets_none(door: Door, parrot: Parrot) -> None:
    """Nobody is asked, and the answer does not speak of it."""
    reply = await door.recommend({"user_id": "long"})

    assert parrot.requests == []
    assert "rationale_reason" not in reply.body
    assert "rationale" not in reply.body


async def test_a_late_writer_costs_the_sentence_not_the_answer(door: Door, parrot: Parrot) -> None:
    """A writer that never comes back is given what is left, the reserve kept back, and is left behind."""
    parrot.hangs_after = 0

    reply = await door.recommend(IN_A_HURRY)

    (asked,) = parrot.requests
    assert (reply.code, len(reply.body["items"])) == ("ok", 3)
    assert reply.body["rationale_reason"] == "late"
    assert "rationale" not in reply.body
    assert asked.deadline_unix_s is not None
    assert asked.deadline_unix_s - NOW_S <= SHORT_MS / 1_000 - RESERVE_S
    await until(lambda: parrot.num_open == 0)


async def test_half_a_sentence_is_none(door: Door, parrot: Parrot) -> None:
    """What was written before the deadline, but not to its end, is not shown."""
    parrot.hangs_after = 3

    assert (await door.recommend(IN_A_HURRY)).body["rationale_reason"] == "late"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DependencyAway("text", 1), "failed"),
        (RuntimeError("broken"), "failed"),
        (Overloaded("text", 1), "busy"),
    ],
)
async def test_a_broken_writer_fails_no_recommendation(
    door: Door, parrot: Parrot, error: Exception, reason: str
) -> None:
    """The reason says how it went."""
    parrot.error = error

    reply = await door.recommend(ASK)

    assert (reply.code, len(reply.body["items"])) == ("ok", 3)
    assert reply.body["rationale_reason"] == reason


async def test_without_a_writer_there_is_no_sentence(world: World) -> None:
    """A stack without text says so."""
    told = await RationaleWriter(None, world.plane.text_report.metrics.rationales)([], ["A"], 1.0)

    assert (told.outcome, told.sentence) == ("no_text", None)


async def test_with_nothing_left_nobody_is_asked(world: World, parrot: Parrot) -> None:
    """A box that no writer could fill is not opened."""
    told = await RationaleWriter(world.plane.text, world.plane.text_report.metrics.rationales)([], ["A"], 0.01)

    assert (told.outcome, parrot.requests) == ("late", [])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", None),
        ("They like", None),
        ("They like it.", None),
        ("It costs 3.5 ", None),
        (" They like\nit. And", "They like it."),
        ("Why? Because.", "Why?"),
    ],
)
def test_a_sentence_is_whole_when_something_follows(text: str, sentence: str | None) -> None:
    """Until then the full stop may be a decimal point."""
    assert whole_sentence(text) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"), [("", ""), (" They like\nit. ", "They like it."), ("Word", "Word"), ("They lik", "They …")]
)
def test_what_the_token_limit_cuts_ends_behind_a_word(text: str, sentence: str) -> None:
    """Half a word is not shown."""
    assert ended(text) == sentence


def test_only_the_newest_titles_are_told() -> None:
    """The prompt stays short whatever the history."""
    prompt = prompt_of([f"old {i}" for i in range(100)], [f"new {i}" for i in range(100)])

    assert prompt.count("old") == prompt.count("new") == 5
    assert "old 99" in prompt
    assert "new 0" in prompt
