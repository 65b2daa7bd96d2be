"""Chat templates render as in transformers; template errors are the caller's errors."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from services.contracts.text import TEMPLATE_NAMES, ChatMessage
from services.errors import CheckpointError, InvalidRequest
from services.llm.text.chat_template import ChatTemplate, load_chat_template
from tests.support.engine.checkpoints import TEMPLATE, write_checkpoint

CONVERSATION = [("user", "Who are you? <&>"), ("assistant", "  A river.\n"), ("user", "Where to?")]
FANCY = """
{%- set loud = namespace(on=false) -%}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}
{%- endif %}
{{- strftime_now('%Y') | length }}
{% for message in messages %}
    {% if loop.index > 9 %}{% break %}{% endif %}
    {%- if message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] | trim | upper }}{% endgeneration %}
    {%- else %}
        {{- message | tojson }}
    {%- endif %}
    {%- set loud.on = true -%}
{% endfor %}
{{ eos_token if loud.on }}{{ '<|assistant|>' if add_generation_prompt }}
"""
THINKING = """
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- if not effort is none %}{{ 6 // (effort | default(3)) }}{% endif %}
{{- eos_token if add_generation_prompt }}"""


def messages_of(turns) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=content) for role, content in turns]


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (TEMPLATE, {}),
        (FANCY, {}),
        (THINKING, {}),
        (THINKING, {"enable_thinking": False}),
        (THINKING, {"enable_thinking": True, "effort": None}),
    ],
)
def test_a_template_renders_as_transformers_does(template: str, variables: dict[str, object], tmp_path: Path) -> None:
    """The prompt equals that of transformers, including white space, escapes, and variables with null values."""
    folder = write_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": role, "content": content} for role, content in CONVERSATION]

    ours = load_chat_template(folder).render(messages_of(CONVERSATION), variables)

    assert ours == theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **variables)


def test_the_template_file_has_precedence(tmp_path: Path) -> None:
    """`chat_template.jinja` takes precedence over the config; a list has a default; a template is optional."""
    templates = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))

    assert load_chat_template(tmp_path).render([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(tmp_path).render([]) == "file"
    assert load_chat_template(tmp_path / "absent") is None


@pytest.mark.parametrize("name", ["enable_thinkin", "", "self", "namespace", "strftime_now", *sorted(TEMPLATE_NAMES)])
def test_a_variable_that_is_not_the_callers_is_refused(name: str) -> None:
    """A variable that is reserved or that the template does not read is rejected, and valid variables are named."""
    template = ChatTemplate(THINKING, {"eos_token": "<|end|>"})

    with pytest.raises(InvalidRequest, match="effort, enable_thinking") as refusal:
        template.render(messages_of(CONVERSATION), {"enable_thinking": True, name: "x"})

    assert refusal.value.field == f"chat_template_kwargs.{name}"
    assert template.variables == {"enable_thinking", "effort"}


def test_what_a_template_refuses_is_the_callers_error() -> None:
    """The template's message reaches the caller with the field; a syntax error is rejected when loading."""
    with pytest.raises(InvalidRequest, match=r"messages: .*only user and assistant speak here"):
        ChatTemplate(TEMPLATE, {"eos_token": "<|end|>"}).render(messages_of([("system", "be brief")]))
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize("effort", [0, "much", [1], {"much": 1}])
def test_a_value_that_breaks_a_template_is_the_callers_error(effort: object) -> None:
    """Any Python error of the template becomes an InvalidRequest."""
    with pytest.raises(InvalidRequest, match="chat_template_kwargs of its types"):
        ChatTemplate(THINKING, {}).render(messages_of(CONVERSATION), {"effort": effort})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ messages | tojson(indent=10 ** 3) }}",
        "{{ messages * 10 ** 4 * 2 }}",
    ],
)
def test_a_template_is_sandboxed(source: str) -> None:
    """Templates cannot access Python internals, and large products, powers and indents are rejected at run time."""
    with pytest.raises(InvalidRequest, match="rejects them"):
        ChatTemplate(source, {}).render(messages_of([("user", "hi")]))
    assert ChatTemplate("{{ '=' * 3 }}{{ 2 ** 3 }}", {}).render(()) == "===8"
