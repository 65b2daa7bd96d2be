"""A checkpoint's chat template: renders messages to the prompt format that the model was trained on.

Templates are Jinja2 as rendered by transformers (its documentation, "Chat templates"): sandboxed, with
`raise_exception`, `strftime_now`, loop controls and the `generation` tag. A template is part of a checkpoint and not
trusted, so it gets only plain values. Callers may set the variables that the template reads and that are not set here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.contracts.text import SPECIAL_TOKENS, TEMPLATE_NAMES, ChatMessage
from services.errors import CheckpointError, InvalidRequest
from services.llm.text.tokenizer import TextTokenizer

_FIELD = "chat_template_kwargs"
_MAX_FACTOR, _MAX_INDENT = 10_000, 16


class ChatTemplate:
    """A compiled template with the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raise CheckpointError when the template cannot be compiled."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            syntax = environment.parse(source)
            self._template = environment.from_string(syntax)
            names = meta.find_undeclared_variables(syntax) - environment.globals.keys() - TEMPLATE_NAMES
        except Exception as error:  # a template is untrusted code: compilation may raise anything
            raise CheckpointError(f"chat template: {error!r:.200}") from error
        self.variables = frozenset(names)
        """The variables that callers may set."""

    def render(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any] | None = None) -> str:
        """Return the prompt that the assistant's message continues. `variables` are JSON values set by the caller.

        Raises InvalidRequest with the template's own message, or for a variable that it does not read.
        """
        self._check(variables or {})
        plain = [{"role": message.role, "content": message.content} for message in messages]
        ours = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render({**(variables or {}), **ours, **self._special_tokens})
        except Exception as error:  # so may rendering
            fix = "send roles in the order that it takes" + (f", and {_FIELD} of its types" if variables else "")
            raise InvalidRequest("messages", f"the model's chat template rejects them ({error})", fix) from error

    def _check(self, variables: Mapping[str, Any]) -> None:
        unread = next((name for name in variables if name not in self.variables), None)
        if unread is not None:
            known = ", ".join(sorted(self.variables))
            fix = f"send only {known}" if known else f"remove {_FIELD}: the template reads no variables"
            raise InvalidRequest(f"{_FIELD}.{unread}", "the model's chat template reads no such variable", fix)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the template of a checkpoint folder; None without a template.

    Raises CheckpointError if it cannot be read.
    """
    config = read_tokenizer_config(folder)
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text() if path.exists() else _default_of(config.get("chat_template"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable ({error})") from error
    return None if source is None else ChatTemplate(source, special_tokens_of(config))


def read_eos_ids(folder: Path, tokenizer: TextTokenizer, template: ChatTemplate | None = None) -> frozenset[int]:
    """Return the tokens that end a text, by the checkpoint's files, or a turn, by its chat template.

    Raises CheckpointError if there are none, or a file is broken.
    """
    eos_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        given = read_optional(folder / name).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id {given!r} is not a token id")
        eos_ids |= set(ids)
    eos_token = special_tokens_of(read_tokenizer_config(folder)).get("eos_token")
    if eos_token is not None and (token_id := tokenizer.id_of(eos_token)) is not None:
        eos_ids.add(token_id)
    if template is not None:
        eos_ids |= {token_id for name, token_id in tokenizer.special_ends.items() if name in template.source}
    if not eos_ids:
        raise CheckpointError(f"{folder}: no eos_token_id in generation_config.json or config.json")
    return frozenset(eos_ids)


def read_optional(path: Path) -> dict[str, Any]:
    """Read an optional JSON file of a checkpoint; empty if absent. Raises CheckpointError if it cannot be read."""
    try:
        content: Any = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`; empty if absent. Raises CheckpointError if it cannot be read."""
    return read_optional(folder / "tokenizer_config.json")


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer's config names, by role."""
    named = {role: config.get(role) for role in SPECIAL_TOKENS}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in named.items()}
    return {role: str(text) for role, text in texts.items() if text}


def _default_of(given: Any) -> str | None:
    """Return the default template of a config with one template or several by name. Raises CheckpointError."""
    if isinstance(given, list):
        named = [template for template in given if isinstance(template, dict) and template.get("name") == "default"]
        given = named[0].get("template") if named else None
    if not isinstance(given, str | None):
        raise CheckpointError(
            "tokenizer_config.json: chat_template is neither a template nor a list of named templates"
        )
    return given


class _Sandbox(ImmutableSandboxedEnvironment):
    """Rejects products that could exhaust memory, such as `"a" * 10 ** 11`; compilation evaluates none either."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power of small numbers, or repeat a short text or list."""
        sizes = [len(value) if isinstance(value, str | list | tuple) else abs(value) for value in (left, right)]
        if max(sizes) > _MAX_FACTOR or (
            isinstance(left, int | float) != isinstance(right, int | float) and sizes[0] * sizes[1] > _MAX_FACTOR
        ):
            raise TemplateError(f"{operator}: of sizes {sizes}; the result may have {_MAX_FACTOR} parts")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **layout: Any) -> str:
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise TemplateError(f"tojson: indent of {indent}; give 0 to {_MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
