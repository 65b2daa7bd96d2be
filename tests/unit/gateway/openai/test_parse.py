"""Request bodies of the OpenAI door: settings reach the TextRequest unchanged; errors name the field and the fix."""

import inspect
import json
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from services.contracts.access import ANYONE, Priority
from services.contracts.text import ChatMessage, SamplingOptions
from services.errors import InvalidRequest
from services.gateway.openai.body import NOT_SUPPORTED, WITHOUT_EFFECT
from services.gateway.openai.parse import CallContext, CompletionCall, parse_chat, parse_completion
from services.gateway.openai.schema import ChatBody, CompletionBody, GenerationBody
from tests.unit.gateway.openai.conftest import LIMITS

CHAT, COMPLETIONS = "chat", "completions"
CONTEXT = CallContext(request_id="r", caller=ANYONE, deadline_unix_s=5.0, limits=LIMITS)
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "a b"}]},
    COMPLETIONS: {"model": "m", "prompt": "a b"},
}


def parse(route: str, content: bytes) -> CompletionCall:
    return (parse_chat if route == CHAT else parse_completion)(content, CONTEXT)


def parsed(route: str, **fields: Any) -> CompletionCall:
    return parse(route, json.dumps({**BASE[route], **fields}).encode())


def test_every_setting_reaches_the_request() -> None:
    """The settings of OpenAI and of vLLM reach the request."""
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

    (request,) = parsed(CHAT, **settings, **fields, top_logprobs=4, response_format=schema, cache_salt="s").requests

    assert request.sampling == SamplingOptions(**{**settings, "logit_bias": {7: -100.0}, "num_logprobs": 4})
    assert (request.n, request.max_tokens, request.stop, request.stop_token_ids) == (2, 3, ("x",), (9,))
    assert request.ignore_eos
    assert json.loads(request.json_schema or "") == {"type": "object"}
    assert (request.priority, request.deadline_unix_s) == (Priority.NORMAL, 5.0)
    assert (request.key_id, request.cache_salt) == (ANYONE.key_id, "s")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a b", ["a b"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1], [2, 3]], [(1,), (2, 3)])],
)
def test_a_prompt_has_four_forms(prompt: object, prompts: list[object]) -> None:
    """A prompt may be a text, a list of texts, token ids, or a list of token id lists."""
    assert [request.prompt for request in parsed(COMPLETIONS, prompt=prompt).requests] == prompts


def test_messages_are_joined_from_their_parts() -> None:
    """Text parts are concatenated; `developer` is OpenAI's newer name of `system`; nulls are absent fields."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
    ]

    (request,) = parsed(CHAT, messages=messages).requests

    assert request.messages == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="a b"),
        ChatMessage(role="assistant", content=""),
    )


def test_nulls_are_kept_where_they_are_values() -> None:
    """A null in template variables or in a schema is a value, not an absent field."""
    variables = {"enable_thinking": False, "effort": None, "nested": {"a": [None, 1], "b": None}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "description": None, "schema": {"enum": [None, 1]}}}

    (request,) = parsed(CHAT, chat_template_kwargs=variables, response_format=schema).requests

    assert request.chat_template_kwargs == variables
    assert json.loads(request.json_schema or "") == {"enum": [None, 1]}


HARMLESS: list[dict[str, Any]] = [
    {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
    {"tools": [], "tool_choice": "none", "modalities": ["text"], "temperature": None, "stop": None, "n": None},
    {"stream_options": {"include_usage": None, "include_obfuscation": False}, "response_format": {"type": "text"}},
    {"top_k": -1, "logit_bias": {}, "skip_special_tokens": True, "min_tokens": 0, "best_of": 1},
    {"add_generation_prompt": True, "prompt_cache_options": {"mode": "implicit"}},
    {"response_format": {"type": "text", "json_schema": None}},
]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", HARMLESS, ids=[" ".join(fields) for fields in HARMLESS])
def test_fields_without_effect_are_accepted(route: str, fields: dict[str, Any]) -> None:
    """Bookkeeping fields, nulls, and disabled features are accepted."""
    assert parsed(route, **fields).requests[0].sampling == SamplingOptions(num_logprobs=None)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"colour": 1}, "colour"),
    (CHAT, {"model": None}, "model"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
        "messages[0].content[1]",
    ),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"cache_salt": "s" * 257}, "cache_salt"),
    (COMPLETIONS, {"cache_salt": 1}, "cache_salt"),
    (CHAT, {"max_completion_tokens": 33}, "max_completion_tokens"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"a": "x" * 8_192}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"a": 1, "tools": []}}, "chat_template_kwargs.tools"),
    (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    (COMPLETIONS, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 65}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", 1]}, "prompt[1]"),
    (COMPLETIONS, {"top_k": 10**400}, "top_k"),
    (COMPLETIONS, {"logit_bias": {str(token): 1 for token in range(1_025)}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"stop": ["a"] * 5}, "stop"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
    (COMPLETIONS, {"echo": True, "prompt": [1]}, "echo"),
    (COMPLETIONS, {"n": 5}, "n"),
    (COMPLETIONS, {"max_tokens": 33}, "max_tokens"),
    (COMPLETIONS, {"seed": 2**63}, "seed"),
    (COMPLETIONS, {"guided_json": {}, "guided_regex": "a+"}, "guided_regex"),
]


def test_a_value_beyond_a_bound_is_refused_with_the_bound() -> None:
    """Of a field with two types, the error is that of the type that was sent."""
    with pytest.raises(InvalidRequest) as caught:
        parsed(CHAT, stop=["a"] * 5)

    assert (caught.value.field, "at most 4" in caught.value.fix) == ("stop", True)


@pytest.mark.parametrize(
    ("route", "fields", "field"), REFUSED, ids=[f"{route} {json.dumps(fields)[:50]}" for route, fields, _ in REFUSED]
)
def test_a_refusal_names_the_field_and_the_fix(route: str, fields: dict[str, Any], field: str) -> None:
    """Wrong types, ranges and combinations, and unsupported and unknown fields are rejected by name with a fix."""
    with pytest.raises(InvalidRequest, check=lambda error: error.field == field and error.fix != ""):
        parsed(route, **fields)


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps({**BASE[CHAT], **fields}).encode()


def nested(num_levels: int) -> dict[str, Any]:
    """Return a schema with this many levels."""
    schema: dict[str, Any] = {}
    for _ in range(num_levels - 1):
        schema = {"not": schema}
    return schema


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.mark.parametrize(
    ("within", "beyond", "problem", "bound"),
    [
        ({"enum": ["é" * 32_761]}, {"enum": ["é" * 32_762]}, "bytes", "65536"),
        ({"enum": [{str(key): 1 for key in range(1_999)}]}, {"enum": [{str(key): 1 for key in range(2_000)}]}, "keys", "2000"),
        (nested(64), nested(65), "levels", "64"),
        ({"multipleOf": 0.25, "minimum": 0.1}, {"multipleOf": 10_001}, "multipleOf", "10000"),
        ({"anyOf": [{"multipleOf": 600}, {"multipleOf": 0.5}]}, {"allOf": [{"multipleOf": 9.97}, {"multipleOf": 991}]}, "multipleOf", "10000"),
    ],
)  # fmt: skip
def test_a_schema_beyond_a_bound_is_refused_with_the_bound(
    within: dict[str, Any], beyond: dict[str, Any], problem: str, bound: str
) -> None:
    """Schemas are limited in bytes, keys, levels and unfolded numbers, since compilation is superlinear."""
    (request,) = parsed(CHAT, **schema_format(within)).requests
    with pytest.raises(InvalidRequest) as refusal:
        parsed(CHAT, **schema_format(beyond))

    assert json.loads(request.json_schema or "") == within
    assert refusal.value.field == "response_format.json_schema.schema"
    assert problem in refusal.value.problem
    assert bound in refusal.value.fix


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        (b"", "body", "not JSON"),
        (b'{"model": "m",}', "body", "not JSON: trailing comma at line 1 column 15"),
        (b"[]", "body", None),
        (b"\xff", "body", None),
        (b'{"model": "\\ud800"}', "body", None),
        (b"[" * 9_000, "body", None),
        (body_of(schema_format(nested(300))), "body", "nested more than 200 levels deep"),
        *(
            (body_of(fields).replace(b"77", number), field, None)
            for number in (b"1e999", b"NaN")
            for fields, field in (
                ({"chat_template_kwargs": {"a": 77}}, "chat_template_kwargs"),
                (schema_format({"const": 77}), "response_format.json_schema.schema"),
            )
        ),
    ],
)
def test_what_is_no_json_is_refused_by_its_place(content: bytes, field: str, words: str | None) -> None:
    """Invalid JSON, deep nesting and numbers that JSON cannot represent never reach another server."""
    with pytest.raises(InvalidRequest, match=words) as refusal:
        parse(CHAT, content)

    assert refusal.value.field == field


LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": [7.5] * 9_999}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [["x"] * 9_999]}, "prompt[0][0]"),
    (COMPLETIONS, {"stop": [1] * 9_999}, "stop"),
    (COMPLETIONS, {"logit_bias": {str(token): "x" for token in range(9_999)}}, "logit_bias"),
    (COMPLETIONS, {f"colour{number}": 1 for number in range(9_999)}, "colour0"),
    (CHAT, {"messages": [{}] * 9_999}, "messages"),
    (CHAT, {"messages": [{}] * 2_048}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 2_049}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * 2_048}]}, "messages[0].content[0].type"),
    (CHAT, {"stream_options": {f"colour{number}": 1 for number in range(9_999)}}, "stream_options.colour0"),
    (CHAT, {"response_format": {f"colour{number}": 1 for number in range(9_999)}}, "response_format.colour0"),
]


@pytest.mark.parametrize(("route", "fields", "field"), LONG)
def test_the_first_fault_of_a_long_body_is_named(route: str, fields: dict[str, Any], field: str) -> None:
    """Validation of long bodies stops at the first fault: a list of all errors would block the event loop."""
    with pytest.raises(InvalidRequest, check=lambda error: error.field == field):
        parsed(route, **fields)


@pytest.mark.parametrize(
    ("methods", "kind"), [(ChatCompletions, ChatBody), (Completions, CompletionBody)], ids=["chat", "completions"]
)
def test_every_field_of_the_openai_client_is_known(methods: Any, kind: type[GenerationBody]) -> None:
    """Every field of the openai client is accepted, ignored, or rejected with its own fix, never as unknown."""
    of_http = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

    fields = inspect.signature(methods.create).parameters.keys() - of_http

    assert fields - set(kind.__struct_fields__) - WITHOUT_EFFECT - NOT_SUPPORTED.keys() == set()
