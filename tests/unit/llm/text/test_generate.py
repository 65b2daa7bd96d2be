"""Text requests to a real engine: equality with transformers, choices, ends, cancels, deadlines, schemas."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.contracts.text import (
    ChatMessage,
    FinishReason,
    SamplingOptions,
    TextBegan,
    TextDone,
    TextEvent,
    TextPiece,
    TextRequest,
)
from services.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, Overloaded, SchemaViolated
from services.llm.engine.config import EngineConfig
from services.llm.engine.outcome import SequenceStatus
from services.llm.serving.engine_thread import EngineThread, Stepped
from services.llm.text.generate import generate
from services.llm.text.guided_decoding import JsonGrammar, JsonGuide
from services.llm.text.model import LoadedText, RequestLimits, load_text
from services.llm.text.schema_compiler import SchemaCompiler
from tests.support.engine.checkpoints import EOS_ID, build_tokenizer, write_checkpoint
from tests.support.wait import until

GREEDY = SamplingOptions(temperature=0)
TURN = ChatMessage(role="user", content="where to?")
PROMPT = "the tail gets out and the river runs on to the sea"
LONG_PROMPT = tuple([5] * 300)
X = {"prompt": "x"}
VOCAB_SIZE = build_tokenizer().get_vocab_size()
CONTEXT = "this model's maximum context length is 256 tokens, so send at most"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def loaded(folder) -> LoadedText:
    """The checkpoint in an engine with blocks of four tokens and a short queue; its cache persists across tests."""
    config = EngineConfig(block_tokens=4, num_blocks=200, max_waiting=20, tile_tokens=64, cpu_kernels="torch")
    limits = RequestLimits(max_tokens=200, max_choices=8)
    return load_text(folder, "tiny", config, torch.float32, "cpu", limits)


class Watched:
    """A running engine that keeps all step results and lets the streams deliver them after each step."""

    def __init__(self, loaded: LoadedText) -> None:
        self.loaded = loaded
        self.steps: list[Stepped] = []
        self.num_planned = 0
        self.may_step = threading.Event()
        self.may_step.set()
        self._loop = asyncio.get_running_loop()
        self.thread = EngineThread(loaded.engine, 1, self._stepped)

    def _stepped(self, stepped: Stepped) -> None:
        self.steps.append(stepped)
        self.may_step.wait(10)
        for _ in range(4):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(10)

    def statuses(self) -> list[SequenceStatus]:
        return [end.outcome.status for step in self.steps for end in step.ended]

    async def events(self, **fields) -> AsyncIterator[TextEvent]:
        """Yield each event of a request."""
        deadline_s = fields.pop("deadline_s", None)
        request = TextRequest(**{"request_id": "r", "model": "tiny", "sampling": GREEDY, "max_tokens": 20, **fields})
        plan = await self.loaded.plan(request, deadline_s)
        self.num_planned += 1
        async with aclosing(generate(plan, self.thread, in_pieces=request.in_pieces)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def all_events(self, **fields) -> list[TextEvent]:
        return [event async for event in self.events(**fields)]


@pytest.fixture
async def engine(loaded):
    """A running engine."""
    watched = Watched(loaded)
    yield watched
    watched.may_step.set()
    watched.thread.stop()
    await asyncio.to_thread(watched.thread.join, 10)


def text_of(events: list[TextEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextPiece) and event.index == index)


def reasons_of(events: list[TextEvent]) -> dict[int, FinishReason | None]:
    return {event.index: event.finish_reason for event in events if isinstance(event, TextPiece)}


async def test_greedy_text_is_transformers_text(engine, folder) -> None:
    """A prompt and a chat produce the text of transformers' generate, and the events count its tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turn = {"role": TURN.role, "content": TURN.content}
    chat = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    plain = "a turbine takes the head of the flow"  # only used here, so that no prefix of it is cached

    by_prompt = await engine.all_events(prompt=plain, max_tokens=40)
    by_chat = await engine.all_events(messages=(TURN,), max_tokens=40)

    for events, prompt in ((by_prompt, plain), (by_chat, chat)):
        tokens = torch.tensor([tokenizer(prompt).input_ids])
        ends = {"eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "attention_mask": torch.ones_like(tokens)}
        made = model.generate(tokens, max_new_tokens=40, do_sample=False, **ends)[0, tokens.shape[1] :]
        assert text_of(events) == tokenizer.decode(made, skip_special_tokens=True)
        assert events[0] == TextBegan(num_prompt_tokens=tokens.shape[1], num_cached_tokens=0)
        assert events[-1].num_completion_tokens == len(made)


async def test_pieces_come_as_they_are_made(engine) -> None:
    """A stream has many pieces; without streaming a choice is a single piece with the same text."""
    streamed = await engine.all_events(prompt=PROMPT, max_tokens=60, ignore_eos=True)
    whole = await engine.all_events(prompt=PROMPT, max_tokens=60, ignore_eos=True, in_pieces=False)

    assert sum(isinstance(event, TextPiece) for event in streamed) > 5
    assert [type(event) for event in whole] == [TextBegan, TextPiece, TextDone]
    assert text_of(streamed) == text_of(whole)
    assert sum(event.num_tokens for event in streamed if isinstance(event, TextPiece)) == 60
    assert reasons_of(whole) == {0: FinishReason.LENGTH}


async def test_choices_share_the_prompt_and_differ_by_seed(engine) -> None:
    """Each choice has its own seed, the first the request's seed; the prompt is computed once."""
    sampling = SamplingOptions(temperature=3.0, seed=7)
    prompt = tuple(range(3, 43))

    alone = await engine.all_events(prompt=prompt, sampling=sampling)
    together = await engine.all_events(prompt=tuple(reversed(prompt)), sampling=sampling, n=4)
    again = await engine.all_events(prompt=prompt, sampling=sampling, n=4)

    ended = [end.outcome for step in engine.steps for end in step.ended]
    outcomes = [outcome for outcome in ended if outcome.request_id.startswith("1.")]
    assert len({text_of(together, index) for index in range(4)}) == 4
    assert text_of(again, 0) == text_of(alone)
    assert sorted(outcome.num_cached_tokens for outcome in outcomes) == [0, 36, 36, 36]
    assert together[-1].num_completion_tokens == sum(len(outcome.tokens) for outcome in outcomes)


async def test_a_cached_prefix_is_found_by_the_same_key_and_salt_alone(engine) -> None:
    """Cached token counts depend only on the caller's own prompts; choices of a request always share a prefix.

    A token's subject may be a caller of several tenants, with one key id.
    """
    callers = [("a", "", ""), ("b", "", ""), ("a", "s", ""), ("as", "", ""), ("", "as", ""), ("a", "t", "")]
    callers += [("a", "", "acme"), ("a", "", "bolt")]
    prompt = "naïve café, 日本語: 1 2 3 4 5 6 7 8 9 0"

    counts = [
        (await engine.all_events(prompt=prompt, key_id=key_id, cache_salt=salt, tenant=tenant, n=2))[
            0
        ].num_cached_tokens
        for key_id, salt, tenant in callers * 2
    ]

    assert counts[: len(callers)] == [0] * len(callers)
    assert all(counts[len(callers) :])


async def test_a_stop_string_ends_a_choice_at_once(engine) -> None:
    """The text is cut before the stop string, and the engine ends the request as done."""
    whole = text_of(await engine.all_events(prompt=PROMPT, max_tokens=60, ignore_eos=True))
    stop = whole[20:23]

    events = await engine.all_events(prompt=PROMPT, max_tokens=60, ignore_eos=True, stop=(stop,))
    await until(lambda: len(engine.statuses()) == 2)

    assert text_of(events) == whole[: whole.index(stop)]
    assert reasons_of(events)[0] is FinishReason.STOP
    assert events[-1].num_completion_tokens < 60
    assert engine.statuses() == [SequenceStatus.LENGTH, SequenceStatus.DONE]


async def test_a_caller_that_leaves_cancels_within_a_step(engine) -> None:
    """When the iterator is closed, at most the step in progress is computed."""
    events = engine.events(prompt=PROMPT, max_tokens=190, ignore_eos=True, n=2)
    await anext(events)
    engine.may_step.clear()
    num_steps = len(engine.steps)

    await events.aclose()
    engine.may_step.set()
    await until(lambda: len(engine.statuses()) == 2)

    assert engine.statuses() == [SequenceStatus.CANCELLED] * 2
    assert len([step for step in engine.steps[num_steps:] if step.new_tokens]) <= 2
    assert engine.steps[-1].load.kv_cache_usage == 0


async def test_a_deadline_ends_what_was_written(engine) -> None:
    """A text that passes its deadline ends with the tokens so far; without tokens, the request fails."""
    deadline_s = time.monotonic() + 3.0
    events = engine.events(prompt=PROMPT, max_tokens=190, ignore_eos=True, deadline_s=deadline_s)
    first = await anext(events)
    engine.may_step.clear()
    await until(lambda: time.monotonic() > deadline_s)
    engine.may_step.set()

    all_events = [first, *[event async for event in events]]

    assert reasons_of(all_events) == {0: FinishReason.DEADLINE}
    assert text_of(all_events)
    assert isinstance(all_events[-1], TextDone)
    with pytest.raises(DeadlineExceeded):
        await engine.all_events(prompt=PROMPT, deadline_s=time.monotonic() - 1)


async def test_a_schema_holds_at_any_temperature(engine) -> None:
    """Guided text is JSON that matches the schema, even if the caller ignores the EOS token."""
    properties = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    for seed in range(3):
        sampling = SamplingOptions(temperature=2.0, seed=seed)
        events = await engine.all_events(
            prompt="say:", sampling=sampling, json_schema=json.dumps(schema), n=2, max_tokens=60, ignore_eos=True
        )
        assert reasons_of(events) == {0: FinishReason.STOP, 1: FinishReason.STOP}
        assert all(isinstance(json.loads(text_of(events, index))["a"], bool) for index in range(2))


class Looser(JsonGuide):
    """A guide whose grammar accepts any boolean instead of the schema, or fails if `fails` is set."""

    fails = False

    def compile(self, schema: str) -> JsonGrammar:
        """Compile the given schema for the validator and a boolean for the grammar."""
        loose = super().compile('{"type": "boolean"}')
        loose.matcher.consume_token(0) if self.fails else None
        return replace(super().compile(schema), matcher=loose.matcher)


@pytest.mark.parametrize("in_pieces", [True, False])
async def test_a_finished_text_that_breaks_its_schema_is_an_error(engine, in_pieces: bool) -> None:
    """Only complete texts are validated, not texts cut by length, stop strings or stop tokens."""
    loaded = engine.loaded
    guide = Looser(loaded.tokenizer, VOCAB_SIZE, loaded.eos_ids)
    engine.loaded = replace(loaded, schemas=SchemaCompiler(guide.compile))
    broken = {"prompt": "x", "json_schema": '{"const": 5}', "max_tokens": 60, "in_pieces": in_pieces}

    with pytest.raises(SchemaViolated, match="the text breaks its JSON schema"):
        await engine.all_events(**broken)
    cut = await engine.all_events(**broken | {"max_tokens": 1})
    stopped = await engine.all_events(**broken, stop=("true", "false"))

    assert reasons_of(cut) == {0: FinishReason.LENGTH}
    assert reasons_of(stopped) == {0: FinishReason.STOP}


async def test_a_failing_grammar_ends_a_stream_before_its_next_token(engine, monkeypatch) -> None:
    """A grammar that fails at the first token gives an error with the request's field."""
    monkeypatch.setattr(Looser, "fails", True)
    loaded = engine.loaded
    guide = Looser(loaded.tokenizer, VOCAB_SIZE, loaded.eos_ids)
    engine.loaded = replace(loaded, schemas=SchemaCompiler(guide.compile))

    events: list[TextEvent] = []

    async def collect() -> None:
        """Keep the events sent before the error."""
        async for event in engine.events(prompt="x", json_schema='{"const": 5}', max_tokens=60):
            events.append(event)  # noqa: PERF401 - an error ends it

    with pytest.raises(InvalidRequest, match="response_format: too complex"):
        await collect()

    assert events == []


def slow_part(repeats: int, last: int) -> dict[str, str]:
    """Return a schema whose conjunction with others is slow to compute."""
    return {"type": "string", "pattern": f"^x{{{repeats}}}{last}.*"}


async def test_schemas_that_take_long_stop_no_other_text(engine) -> None:
    """Requests with slow schemas end at their deadline; a text without a schema is generated meanwhile."""
    slow = [
        {"allOf": [{"anyOf": [slow_part(part + number, branch) for branch in range(2)]} for part in range(12)]}
        for number in range(6)
    ]
    loaded = engine.loaded
    guide = JsonGuide(loaded.tokenizer, VOCAB_SIZE, loaded.eos_ids)
    engine.loaded = replace(loaded, schemas=SchemaCompiler(guide.compile))
    guided = [
        engine.all_events(prompt="x", json_schema=json.dumps(schema), deadline_s=time.monotonic() + 0.2)
        for schema in slow
    ]
    plain = engine.all_events(prompt="x", max_tokens=1, deadline_s=time.monotonic() + 60)

    *refused, written = await asyncio.gather(*guided, plain, return_exceptions=True)

    assert [type(end) for end in refused] == [DeadlineExceeded] * 6
    assert reasons_of(written) == {0: FinishReason.LENGTH}


async def test_too_many_choices_for_the_queue_are_refused_as_one(engine) -> None:
    """Either all choices of a request are admitted or the request fails and admitted choices are cancelled."""
    engine.may_step.clear()
    tasks = [asyncio.create_task(engine.all_events(prompt=PROMPT, n=8, max_tokens=30)) for _ in range(9)]
    await until(lambda: engine.num_planned == 9)
    engine.may_step.set()

    ends = await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(end) for end in ends} == {list, Overloaded}
    assert all(len(reasons_of(end)) == 8 for end in ends if isinstance(end, list))
    await until(lambda: engine.steps[-1].load.kv_cache_usage == 0)


async def test_logprobs_and_stop_tokens(engine) -> None:
    """A greedy token is its own best alternative, logprob bytes match the text, and a stop token is not shown."""
    tokens = engine.loaded.tokenizer.encode(PROMPT, with_special_tokens=True)
    request = {"max_tokens": 9, "ignore_eos": True, "sampling": SamplingOptions(temperature=0, num_logprobs=3)}
    events = await engine.all_events(prompt=PROMPT, **request)
    logprobs = [entry for event in events if isinstance(event, TextPiece) for entry in event.logprobs]
    stop = logprobs[4].token_bytes
    stop_id = next(token_id for token_id in range(320) if engine.loaded.tokenizer.bytes_of(token_id) == stop)

    ended = await engine.all_events(prompt=tuple(tokens), **request, stop_token_ids=(stop_id,))

    assert len(logprobs) == 9
    assert all(len(entry.top) == 3 and entry.top[0].token_bytes == entry.token_bytes for entry in logprobs)
    assert all(entry.logprob == entry.top[0].logprob <= 0 for entry in logprobs)
    assert ended[-1].num_completion_tokens == [entry.token_bytes for entry in logprobs].index(stop) + 1
    assert reasons_of(ended)[0] is FinishReason.STOP


@pytest.mark.parametrize(
    ("fields", "field", "fix"),
    [
        ({"prompt": None}, "prompt", ""),
        ({"prompt": ()}, "prompt", ""),
        ({"prompt": (100_000,)}, "prompt", ""),
        ({"prompt": LONG_PROMPT}, "prompt", f"{CONTEXT} 255"),
        ({"prompt": LONG_PROMPT[:250], "max_tokens": 20}, "max_tokens", f"{CONTEXT} 6"),
        ({**X, "n": 9}, "n", ""),
        ({**X, "max_tokens": 0}, "max_tokens", ""),
        ({**X, "max_tokens": 201}, "max_tokens", ""),
        ({**X, "max_tokens": 300, "settings_sent": {"max_completion_tokens"}}, "max_completion_tokens", CONTEXT),
        ({**X, "sampling": SamplingOptions(temperature=-1)}, "temperature", ""),
        ({**X, "sampling": SamplingOptions(temperature=1, top_k=10**400)}, "top_k", ""),
        ({**X, "sampling": SamplingOptions(logit_bias={100_000: 1.0})}, "logit_bias", ""),
        ({**X, "json_schema": '{"type": 3}'}, "response_format", ""),
        ({"messages": (ChatMessage(role="system", content="x"),)}, "messages", ""),
        ({"messages": (ChatMessage(role="user", content="the tail " * 300),)}, "messages", f"{CONTEXT} 255"),
        ({"messages": (TURN,), "chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour", ""),
    ],
)
async def test_a_bad_request_is_refused_by_its_field(engine, fields, field: str, fix: str) -> None:
    """The engine keeps running; context errors use the wording of OpenAI and vLLM that clients recognise."""
    with pytest.raises(InvalidRequest) as refusal:
        await engine.all_events(**fields)

    assert refusal.value.field == field
    assert isinstance(refusal.value, ContextTooLong) == bool(fix)
    assert (refusal.value.fix or "").startswith(fix)
    assert await engine.all_events(prompt="x", max_tokens=1)
