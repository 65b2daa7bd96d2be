"""What the OpenAI door takes and refuses: settings reach the writer as they are meant, every refusal names the field and the fix."""

import inspect
import json
from typing import Any

import httpx
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from pydantic import BaseModel, ValidationError

from services.contracts.access import Priority
from services.contracts.text import ChatMessage, SamplingOptions
from services.errors import InvalidRequest
from services.gateway.openai.body import NOT_SUPPORTED, WITHOUT_EFFECT, parse_body
from services.gateway.openai.schema import ChatBody, CompletionBody
from tests.support.parrot import MODEL, Parrot
from tests.unit.gateway.world import MAX_BODY_BYTES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "a b"}]


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A good body with these fields."""
    base = {"model": MODEL, "messages": SAID} if path == CHAT else {"model": MODEL, "prompt": "a b"}
    return {**base, **fields}


async def test_every_setting_reaches_the_writer(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """OpenAI's and vLLM's."""
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100},
        "seed": 3,
    }
    fields = {"n": 2, "max_tokens": 3, "stop": "x", "stop_token_ids": [9], "ignore_eos": True, "logprobs": True}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}

    answer = await http.post(CHAT, json=body(CHAT, **settings, **fields, top_logprobs=4, response_format=schema))

    (asked,) = parrot.asked
    assert answer.status_code == 200
    assert asked.sampling == SamplingOptions(**{**settings, "logit_bias": {7: -100.0}, "num_logprobs": 4})
    assert (asked.n, asked.max_tokens, asked.stop, asked.stop_token_ids, asked.ignore_eos) == (2, 3, ("x",), (9,), True)
    assert json.loads(asked.json_schema or "") == {"type": "object"}
    assert asked.priority == Priority.NORMAL
    assert asked.deadline_unix_s is not None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a b", ["a b"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1], [2, 3]], [(1,), (2, 3)])],
)
async def test_a_prompt_has_four_shapes(
    http: httpx.AsyncClient, parrot: Parrot, prompt: object, prompts: list[object]
) -> None:
    """Text, texts, token ids, lists of token ids."""
    await http.post(COMPLETIONS, json=body(COMPLETIONS, prompt=prompt))

    assert sorted(map(str, (asked.prompt for asked in parrot.asked))) == sorted(map(str, prompts))


async def test_messages_are_put_together_from_their_parts(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """Developer is OpenAI's newer word for system; nulls are absent fields."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    turns = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "user", "content": "c"},
    ]

    answer = await http.post(CHAT, json=body(CHAT, messages=turns))

    assert answer.status_code == 200
    assert parrot.asked[0].messages == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="a b"),
        ChatMessage(role="assistant", content=""),
        ChatMessage(role="user", content="c"),
    )


HARMLESS: list[dict[str, Any]] = [
    {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
    {"tools": [], "tool_choice": "none", "modalities": ["text"], "temperature": None, "stop": None, "n": None},
    {"stream_options": {"include_usage": True, "include_obfuscation": False}, "response_format": {"type": "text"}},
    {"top_k": -1, "logit_bias": {}, "skip_special_tokens": True, "min_tokens": 0, "best_of": 1},
    {"response_format": {"type": "json_object"}},
    {
        "add_generation_prompt": True,
        "spaces_between_special_tokens": True,
        "prompt_cache_options": {"mode": "implicit"},
    },
    {"stream_options": {"include_usage": None}, "response_format": {"type": "text", "json_schema": None}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", HARMLESS, ids=[" ".join(fields) for fields in HARMLESS])
async def test_what_changes_nothing_is_taken(http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    """Bookkeeping, nulls, and features that are switched off."""
    assert (await http.post(path, json=body(path, **fields))).status_code == 200


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"moderation": {"model": "x"}}, "moderation"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"add_generation_prompt": False}, "add_generation_prompt"),
    (CHAT, {"colour": 1}, "colour"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
        "messages[0].content[1]",
    ),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 33}, "max_completion_tokens"),
    (CHAT, {"model": "tailrace-recommender"}, "model"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"stream_options": {"colour": True}}, "stream_options.colour"),
    (CHAT, {"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"a": "x" * 8_192}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"a": 1, "tools": []}}, "chat_template_kwargs.tools"),
    (CHAT, {"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    (COMPLETIONS, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": 7}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 65}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 7}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 2, "n": 4}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", 1]}, "prompt[1]"),
    (COMPLETIONS, {"top_k": 10**400}, "top_k"),
    (COMPLETIONS, {"logit_bias": {str(token): 1 for token in range(1_025)}}, "logit_bias"),
    (COMPLETIONS, {"stop": ["a", ""]}, "stop[1]"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
    (COMPLETIONS, {"echo": True, "prompt": [1]}, "echo"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": 5}, "n"),
    (COMPLETIONS, {"n": "2"}, "n"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 33}, "max_tokens"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"top_p": 0}, "top_p"),
    (COMPLETIONS, {"stop": ["a"] * 5}, "stop"),
    (COMPLETIONS, {"stop": ""}, "stop"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (COMPLETIONS, {"seed": 2**63}, "seed"),
    (COMPLETIONS, {"stream": "yes"}, "stream"),
    (COMPLETIONS, {"model": "tailrace-recommender", "prompt": [1]}, "prompt"),
    (COMPLETIONS, {"model": "tailrace-recommender", "prompt": " "}, "prompt"),
    (COMPLETIONS, {"model": "tailrace-recommender", "prompt": "50 " + "x" * 300}, "prompt"),
    (COMPLETIONS, {"model": "tailrace-recommender", "prompt": "50 " * 2_001}, "prompt"),
    (COMPLETIONS, {"guided_json": {}, "guided_regex": "a+"}, "guided_regex"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"), REFUSED, ids=[f"{path[4:8]} {json.dumps(fields)[:50]}" for path, fields, _ in REFUSED]
)
async def test_a_wrong_field_is_a_400_that_names_it(
    http: httpx.AsyncClient, parrot: Parrot, path: str, fields: dict[str, Any], param: str
) -> None:
    """In OpenAI's envelope, with the fix in the message, and nothing is written."""
    answer = await http.post(path, json=body(path, **fields))

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith(f"{param}: ")
    assert ";" in error["message"]
    assert parrot.asked == []


@pytest.mark.parametrize(
    ("ways", "kind"), [(ChatCompletions, ChatBody), (Completions, CompletionBody)], ids=["chat", "completions"]
)
def test_every_field_of_the_openai_client_is_known(ways: Any, kind: type[BaseModel]) -> None:
    """Taken, without effect, or refused with a reason of its own: none is taken for a typing mistake."""
    of_http = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

    fields = inspect.signature(ways.create).parameters.keys() - of_http

    assert fields - kind.model_fields.keys() - WITHOUT_EFFECT - NOT_SUPPORTED.keys() == set()


ENDLESS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [7.5] * 9_999}),
    (COMPLETIONS, {"prompt": [["x"]] * 9_999}),
    (COMPLETIONS, {"prompt": [["x"] * 9_999]}),
    (COMPLETIONS, {"stop": [1] * 9_999}),
    (COMPLETIONS, {"stop_token_ids": ["x"] * 9_999}),
    (COMPLETIONS, {"logit_bias": {str(token): "x" for token in range(9_999)}}),
    (COMPLETIONS, {f"colour{number}": 1 for number in range(9_999)}),
    (CHAT, {"messages": [{}] * 9_999}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 2_049}),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * 9_999}]}),
]


@pytest.mark.parametrize(("path", "fields"), ENDLESS)
def test_a_wrong_body_is_left_at_its_first_faults(path: str, fields: dict[str, Any]) -> None:
    """Whatever its length: a list of all faults would hold up everybody else."""
    kind = ChatBody if path == CHAT else CompletionBody

    with pytest.raises(InvalidRequest) as refusal:
        parse_body(kind, json.dumps(body(path, **fields)).encode())

    cause = refusal.value.__cause__
    assert cause is None or (isinstance(cause, ValidationError) and cause.error_count() < 10)


async def test_a_templates_variables_reach_the_writer(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """As they are: their nulls are values, not absent fields."""
    variables = {"enable_thinking": False, "effort": None, "nested": {"a": [None, 1], "b": None}}

    await http.post(CHAT, json=body(CHAT, chat_template_kwargs=variables))

    assert parrot.asked[0].chat_template_kwargs == variables


@pytest.mark.parametrize("number", [b"1e999", b"NaN"])
async def test_a_templates_variables_are_json(http: httpx.AsyncClient, number: bytes) -> None:
    """What could not be written again for another server is refused here, or it would count as that server's failure."""
    content = json.dumps(body(CHAT, chat_template_kwargs={"a": 7})).encode().replace(b"7", number)

    answer = await http.post(CHAT, content=content)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("number", [b"1e999", b"NaN"])
async def test_a_schema_is_json(http: httpx.AsyncClient, parrot: Parrot, number: bytes) -> None:
    """As a template's variables: no caller's number may count as another server's failure."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": 7}}}
    content = json.dumps(body(CHAT, response_format=schema)).encode().replace(b"7", number)

    answer = await http.post(CHAT, content=content)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format.json_schema.schema")
    assert parrot.asked == []


async def test_a_json_object_is_an_object(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """`json_object` promises fields to read: any JSON would be a number now and then."""
    await http.post(CHAT, json=body(CHAT, response_format={"type": "json_object"}))

    assert json.loads(parrot.asked[0].json_schema or "") == {"type": "object"}


async def test_nulls_within_a_schema_are_the_schemas(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """They are values there, not absent fields."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "description": None, "schema": {"enum": [None, 1]}}}
    await http.post(CHAT, json=body(CHAT, response_format=schema))

    assert json.loads(parrot.asked[0].json_schema or "") == {"enum": [None, 1]}


BROKEN = [b"", b"{", b"[]", b"null", b"\xff", b'{"model": "\\ud800"}', b"[" * 9_000, b'{"model": NaN}']


@pytest.mark.parametrize("content", BROKEN)
async def test_what_is_no_json_object_is_a_400(http: httpx.AsyncClient, content: bytes) -> None:
    """Nothing leaves but the envelope."""
    answer = await http.post(CHAT, content=content)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_a_413(http: httpx.AsyncClient) -> None:
    """In the envelope."""
    answer = await http.post(CHAT, content=b" " * (MAX_BODY_BYTES + 1))

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("deadline", ["0", "600001", "soon", "-5"])
async def test_a_deadline_out_of_range_is_a_400(http: httpx.AsyncClient, deadline: str) -> None:
    """The header is the field."""
    answer = await http.post(CHAT, json=body(CHAT), headers={"x-deadline-ms": deadline})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-deadline-ms")


async def test_a_deadline_that_only_text_may_have_is_a_400_for_a_ranking(http: httpx.AsyncClient) -> None:
    """By the header's name, since that is what was sent."""
    sent = {"model": "tailrace-recommender", "prompt": "i00 i01"}

    answer = await http.post(COMPLETIONS, json=sent, headers={"x-deadline-ms": "60001"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-deadline-ms")


async def test_the_request_id_comes_back_and_is_part_of_the_answers_id(http: httpx.AsyncClient) -> None:
    """On answers and on refusals."""
    sent = {"x-request-id": "mine"}
    good = await http.post(CHAT, json=body(CHAT), headers=sent)
    bad = await http.post(CHAT, json={}, headers=sent)

    assert (good.headers["x-request-id"], bad.headers["x-request-id"]) == ("mine", "mine")
    assert good.json()["id"] == "chatcmpl-mine"
