"""`rationale: true`: a sentence from the text writer within the rest of the deadline, at both doors."""

import pytest

from services.contracts.access import Priority
from services.errors import DependencyUnavailable, Overloaded
from services.gateway.text.rationale import MAX_TOKENS, RationaleWriter, ended, prompt_of, whole_sentence
from tests.support.engine.parrot import Parrot
from tests.support.wait import until
from tests.unit.gateway.clients import Door
from tests.unit.gateway.world import NOW_S, World

DEADLINE_MS, SHORT_MS = 30_000, 1_000
RESERVE_S = 0.008
ASK = {"user_id": "long", "k": 3, "rationale": True, "deadline_ms": DEADLINE_MS}
IN_A_HURRY = ASK | {"deadline_ms": SHORT_MS}


async def test_a_sentence_comes_with_the_items(door: Door, world: World, parrot: Parrot) -> None:
    """The sentence is generated from the titles of history and items, is short, and has low priority."""
    reply = await door.recommend(ASK)

    (request,) = parrot.requests
    assert (reply.body["rationale_reason"], len(reply.body["items"])) == ("written", 3)
    assert reply.body["rationale"].startswith("Someone liked: Item 0; Item 1; Item 2; Item 3.")
    assert "Item 4; Item 5; Item 6" in request.messages[-1].content
    assert (request.priority, request.max_tokens, request.sampling.temperature) == (Priority.LOW, MAX_TOKENS, 0.0)
    assert "rationale" in reply.body["stages_ms"]
    assert world.metric("tailrace_rationales_total", outcome="written") == 1


@pytest.mark.parametrize(("variables", "sent"), [((), {}), (("enable_thinking", "effort"), {"enable_thinking": False})])
async def test_thinking_is_disabled_where_the_model_has_it(
    door: Door, parrot: Parrot, variables: tuple[str, ...], sent: dict[str, bool]
) -> None:
    """The variable is sent only to a chat template that supports it, since others reject it."""
    parrot.template_variables = frozenset(variables)

    await door.recommend(ASK)

    assert parrot.requests[0].chat_template_kwargs == sent


async def test_without_the_flag_there_is_no_rationale(door: Door, parrot: Parrot) -> None:
    """The writer is not called, and the answer has neither field."""
    reply = await door.recommend({"user_id": "long"})

    assert parrot.requests == []
    assert "rationale_reason" not in reply.body
    assert "rationale" not in reply.body


@pytest.mark.parametrize("num_pieces", [0, 3])
async def test_a_late_writer_costs_only_the_sentence(door: Door, parrot: Parrot, num_pieces: int) -> None:
    """A slow writer gets the rest of the deadline minus the reserve; partial sentences are discarded."""
    parrot.hangs_after = num_pieces

    reply = await door.recommend(IN_A_HURRY)

    (request,) = parrot.requests
    assert (reply.code, len(reply.body["items"])) == ("ok", 3)
    assert reply.body["rationale_reason"] == "late"
    assert "rationale" not in reply.body
    assert request.deadline_unix_s is not None
    assert request.deadline_unix_s - NOW_S <= SHORT_MS / 1_000 - RESERVE_S
    await until(lambda: parrot.num_open == 0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(DependencyUnavailable("text", 1), "failed"), (RuntimeError("broken"), "failed"), (Overloaded("text", 1), "busy")],
)
async def test_a_broken_writer_fails_no_recommendation(
    door: Door, parrot: Parrot, error: Exception, reason: str
) -> None:
    """The reason names the kind of failure."""
    parrot.error = error

    reply = await door.recommend(ASK)

    assert (reply.code, len(reply.body["items"]), reply.body["rationale_reason"]) == ("ok", 3, reason)


async def test_without_a_writer_or_time_there_is_no_sentence(world: World, parrot: Parrot) -> None:
    """Without a text model the outcome is `no_text`; without enough time the writer is not called."""
    counter = world.plane.text_report.metrics.rationales
    without = await RationaleWriter(None, counter)([], ["A"], 1.0)
    late = await RationaleWriter(world.plane.text, counter)([], ["A"], 0.01)

    assert (without.outcome, without.sentence) == ("no_text", None)
    assert (late.outcome, parrot.requests) == ("late", [])


@pytest.mark.parametrize(
    ("text", "whole", "cut"),
    [
        ("", None, ""),
        ("They lik", None, "They …"),
        ("They like it.", None, "They like it."),
        ("It costs 3.5 ", None, "It costs …"),
        (" They like\nit. And", "They like it.", None),
        (" They like\nit. ", "They like it.", "They like it."),
        ("Why? Because.", "Why?", "Why? Because."),
        ("Word", None, "Word"),
    ],
)
def test_a_sentence_is_whole_when_something_follows(text: str, whole: str | None, cut: str | None) -> None:
    """A full stop may be a decimal point until text follows; text cut by the token limit ends after a whole word."""
    assert whole_sentence(text) == whole
    assert cut is None or ended(text) == cut


def test_the_prompt_has_only_the_newest_titles() -> None:
    """The prompt is short for any length of history."""
    prompt = prompt_of([f"old {i}" for i in range(100)], [f"new {i}" for i in range(100)])

    assert prompt.count("old") == prompt.count("new") == 5
    assert "old 99" in prompt
    assert "new 0" in prompt
