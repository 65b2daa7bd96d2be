"""Reads a framework's own test rows as prompts of text pieces, and their answers.

Rows are a CSV with `history_item_sid` and `item_sid` (MiniOneRec), objects with `instruction`, `input` and `output`
(MIMIGenRec, LLaMA-Factory), `messages` (OpenOneRec), `prompt` with an answer (text, or a chat with the answer in
`reward_model` as verl and MIMIGenRec's RL have it), or `prompt_token_ids`.
"""

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.foreign.refused import Refused
from pipelines.foreign.rows import TABLES, json_lines, json_value, table_rows, text_of
from services.contracts.text import ChatMessage
from services.errors import TailraceError
from services.llm.text.chat_template import ChatTemplate

MINIONEREC_PIECES = (
    (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request. \n\n### Instruction:\n"
        "Can you predict the next possible item that the user may expect?\n\n"
    ),
    (
        "### User Input: \nCan you predict the next possible item the user may expect, given the following "
        "chronological interaction history: {history}\n\n### Response:\n"
    ),
)
"""Prompt of MiniOneRec's evaluation (Apache-2.0), whose pieces are encoded one by one."""
EOS = "<eos>"
"""The end of text, in closing tokens."""
_ANSWERS = ("output", "completion", "response", "answer", "label", "target")
_SYSTEM = "You are a helpful assistant."
_FORMS = "give history_item_sid, or instruction and input, or messages, or prompt, or prompt_token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A test row: its number from 1, the text pieces or tokens of its prompt, and the text or tokens of its answer.

    `special_tokens`: whether the tokenizer adds its own to the first piece. `begins`: whether the checkpoint's
    beginning of text, if it names one, precedes the first piece. `close`: the tokens that the framework generates after
    a code, as text, with `<eos>` for the end of text.
    """

    number: int
    pieces: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    special_tokens: bool = False
    begins: bool = False
    answer: str = ""
    answer_tokens: tuple[int, ...] = ()
    close: tuple[str, ...] = ()


_UNREADABLE = (LookupError, ValueError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError)
"""What a malformed value raises, nested too deeply included."""


def read_examples(path: Path, template: ChatTemplate | None) -> list[Example]:
    """Read the rows. Raises Refused naming the row."""
    if not path.is_file():
        raise Refused(str(path), "", "no such file", "give the test rows of your framework")
    examples = [_example(path, number, row, template) for number, row in enumerate(_rows(path), start=1)]
    if not examples:
        raise Refused(path.name, "", "no rows", "give the test rows of your framework")
    return examples


def _rows(path: Path) -> Iterable[Any]:
    if path.suffix in TABLES:
        return table_rows(path, _FORMS)
    text = text_of(path, _FORMS)
    if not text.lstrip().startswith("["):
        return json_lines(path, text, _FORMS)
    rows: list[Any] = json_value(path, text, _FORMS)
    return rows


def _example(path: Path, number: int, row: Mapping[str, Any], template: ChatTemplate | None) -> Example:
    try:
        return _read(number, row, template)
    except (*_UNREADABLE, TailraceError) as error:
        problem = getattr(error, "problem", None) or str(error)
        raise Refused(path.name, f"row {number}", f"not an example ({problem})", _FORMS) from error


def _read(number: int, row: Mapping[str, Any], template: ChatTemplate | None) -> Example:
    answer = next((row[name] for name in _ANSWERS if row.get(name) is not None), "")
    reward = row.get("reward_model")
    answer = answer or (reward.get("ground_truth", "") if isinstance(reward, Mapping) else "")
    text = str(answer[0] if isinstance(answer, list) and answer else answer)
    if row.get("history_item_sid") is not None:
        sids = _listed(row["history_item_sid"])
        pieces = tuple(piece.replace("{history}", ", ".join(sids)) for piece in MINIONEREC_PIECES)
        answer_text, close = str(row.get("item_sid", "")), ("\n", EOS)
        return Example(number=number, pieces=pieces, begins=True, answer=answer_text, close=close)
    if row.get("prompt_token_ids") is not None:
        target = row.get("answer_token_ids") or row.get("label_token_ids") or ()
        return Example(number=number, tokens=_ids(row["prompt_token_ids"]), answer_tokens=_ids(target))
    if row.get("messages") is not None or isinstance(row.get("prompt"), list):
        return _of_messages(number, row.get("messages") or row["prompt"], text, template)
    if row.get("prompt") is not None:
        return Example(number=number, pieces=(str(row["prompt"]),), special_tokens=True, answer=text)
    content = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else str(row["instruction"])
    messages = [{"role": "system", "content": row.get("system", _SYSTEM)}, {"role": "user", "content": content}]
    return replace(_of_messages(number, messages, text, template), close=(EOS,))


def _of_messages(number: int, given: Any, answer: str, template: ChatTemplate | None) -> Example:
    """Return a chat as the template renders it; the last assistant message's text before its SID joins the prompt."""
    if template is None:
        raise ValueError("chat rows, and the checkpoint has no chat template")
    messages = [(str(message["role"]), _text(message["content"])) for message in _listed(given)]
    if messages[-1][0] == "assistant":
        answer = messages.pop()[1]
    before, begin, rest = answer.partition("<|sid_begin|>")
    prefix = before + begin if begin else ""
    rendered = render(template, [ChatMessage(role=role, content=content) for role, content in messages])
    return Example(number=number, pieces=(rendered + prefix,), answer=rest if begin else answer)


def render(template: ChatTemplate, messages: Sequence[ChatMessage]) -> str:
    """Render a chat; a template that asks for thinking does not think."""
    known = {"enable_thinking": False} if "enable_thinking" in template.variables else {}
    return template.render(messages, known)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) for part in content)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = ast.literal_eval(value)
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r:.60} is not a list")
    return list(value)


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(int(token) for token in value)
