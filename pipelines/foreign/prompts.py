"""Derives the prompt of a checkpoint from examples or a template, and proves it token for token.

A prompt is three token lists: before the first item, between two items, after the last. Both ways end in the same
derivation, because a template is rendered for several histories first. A template with titles has no such lists; it is
kept as text and encoded for each request.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tokenizers import Tokenizer

from models.prompt import HISTORY, Prompt, PromptText
from models.registry.manifest import MAX_PROMPT_ITEMS
from models.search import MAX_BEAM_WIDTH, Scores
from pipelines.foreign.examples import Example, render
from pipelines.foreign.refused import Refused
from pipelines.foreign.tokens import ItemCodeTable
from services.contracts.text import ChatMessage
from services.llm.text.chat_template import ChatTemplate

_PROVEN_LENGTHS = (1, 2, 3, 5)
_PLACEHOLDER = re.compile(r"\{\w*\}")
_ITEM_FIELDS = {"{code}", "{title}", "{categories}"}
_TYPES = {
    **dict.fromkeys(("chat", "special_tokens", "count_close"), bool),
    **dict.fromkeys(("system", "item", "separator", "answer"), str),
}
_KEYS = {
    "prompt": {"chat", "system", "user", "item", "separator", "answer", "special_tokens", "max_items", "stride"},
    "codes": {"close"},
    "search": {"beam_width", "scores", "count_close"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A prompt, and the history and label of each example as rows of the code table; -1 for a label without an item."""

    prompt: Prompt
    histories: tuple[np.ndarray, ...] = ()
    labels: tuple[int, ...] = ()
    close: tuple[str, ...] = ()


class Codes:
    """Finds codes in token lists."""

    def __init__(self, table: ItemCodeTable) -> None:
        assert table.first_tokens is not None
        tokens_ID = table.codes + np.array(table.first_tokens, dtype=np.int64)
        self.depth = tokens_ID.shape[1]
        self._levels = [frozenset(column.tolist()) for column in tokens_ID.T]
        self._row: dict[tuple[int, ...], int] = {}
        for row, tokens in enumerate(map(tuple, tokens_ID.tolist())):
            self._row.setdefault(tokens, row)

    def row_of(self, tokens: Sequence[int]) -> int | None:
        """Return the first item with this code; None for a code without an item."""
        return self._row.get(tuple(tokens))

    def is_code(self, tokens: Sequence[int]) -> bool:
        """Whether each token belongs to its level."""
        return len(tokens) == self.depth and all(
            token in level for token, level in zip(tokens, self._levels, strict=True)
        )

    def split(self, tokens: Sequence[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the codes of a token list in order, and the tokens before, between and after them."""
        codes, gaps, position = [], [], 0
        gap: list[int] = []
        while position < len(tokens):
            window = tuple(tokens[position : position + self.depth])
            if self.is_code(window):
                codes.append(window)
                gaps.append(tuple(gap))
                gap, position = [], position + self.depth
            else:
                gap.append(tokens[position])
                position += 1
        return codes, [*gaps, tuple(gap)]


def encode(tokenizer: Tokenizer, example: Example, bos: int | None = None) -> tuple[int, ...]:
    """Return the tokens of an example's prompt, as its framework encodes it. `bos` is the beginning of text."""
    if example.tokens:
        return example.tokens
    tokens: list[int] = [bos] if example.begins and bos is not None else []
    for number, piece in enumerate(example.pieces):
        has_special = (example.special_tokens and number == 0) or (example.begins and bos is None)
        tokens += tokenizer.encode(piece, add_special_tokens=has_special).ids
    return tuple(tokens)


def derive(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    table: ItemCodeTable,
    file: str,
    max_items: int | None = None,
    stride: int = 1,
    bos: int | None = None,
) -> Derived:
    """Return the prompt that encodes every example exactly. Raises Refused naming the first example that differs."""
    codes = Codes(table)
    encoded = [encode(tokenizer, example, bos) for example in examples]
    parts = [codes.split(tokens) for tokens in encoded]
    longest = max((len(sids) for sids, _ in parts), default=0)
    if not longest:
        fix = "give the rows of the same index, with SIDs in their history"
        raise Refused(file, "row 1", "no example has an item of the index in its prompt", fix)
    first = next(number for number, (sids, _) in enumerate(parts) if sids)
    head, tail = parts[first][1][0], parts[first][1][-1]
    between = next((gaps[1] for sids, gaps in parts if len(sids) > 1), ())
    prompt = Prompt(max_items or longest, stride, head, between, tail)
    histories, labels = [], []
    for example, tokens, (history, _) in zip(examples, encoded, parts, strict=True):
        histories.append(_rows_of(codes, history, file, example.number))
        _require_equal(prompt.joined(history), tokens, file, example.number)
        labels.append(_label_of(codes, tokenizer, example))
    return Derived(prompt=prompt, histories=tuple(histories), labels=tuple(labels), close=examples[0].close)


def _rows_of(codes: Codes, history: Sequence[tuple[int, ...]], file: str, number: int) -> np.ndarray:
    rows = [codes.row_of(code) for code in history]
    if None in rows:
        missing = history[rows.index(None)]
        problem = f"code {list(missing)} of the history belongs to no item"
        raise Refused(file, f"row {number}", problem, "give the index of the same training")
    return np.array(rows, dtype=np.int64)


def _require_equal(compiled: Sequence[int], tokens: Sequence[int], file: str, number: int) -> None:
    if tuple(compiled) == tuple(tokens):
        return
    pairs = zip(compiled, tokens, strict=False)
    first = next(
        (position for position, (first_token, other) in enumerate(pairs) if first_token != other),
        min(len(compiled), len(tokens)),
    )
    problem = f"its encoding differs from the other rows' prompt from token {first} on"
    fix = "give rows of one prompt format, or a template with --prompt"
    raise Refused(file, f"row {number}", problem, fix)


def _label_of(codes: Codes, tokenizer: Tokenizer, example: Example) -> int:
    tokens = example.answer_tokens or tokenizer.encode(example.answer, add_special_tokens=False).ids
    sids, _ = codes.split(tokens)
    row = codes.row_of(sids[0]) if sids else None
    return -1 if row is None else row


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A prompt file: text pieces with `{history}`, the text of an item, and search options."""

    pieces: tuple[str, ...]
    item: str
    separator: str
    special_tokens: bool
    max_items: int
    stride: int | None
    close: tuple[str, ...]
    beam_width: int | None
    scores: str | None
    count_close: bool


def read_template(path: Path, chat: ChatTemplate | None) -> Template:
    """Read a prompt file. Raises Refused naming the key."""
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(path.name, "", f"not readable as TOML ({error})", "see docs/bring-your-own-model.md") from error
    for section, values in raw.items():
        unknown = sorted(set(values) - _KEYS[section]) if section in _KEYS and isinstance(values, dict) else [""]
        if unknown:
            name = ".".join(filter(None, (section, unknown[0])))
            raise Refused(path.name, name, "unknown key", f"known are {', '.join(sorted(_KEYS.get(section, _KEYS)))}")
    prompt, codes, search = (raw.get(section, {}) for section in _KEYS)
    for section, values in raw.items():
        _check_types(path, section, values)
    pieces = _pieces(path, prompt, chat)
    if sum(piece.count(HISTORY) for piece in pieces) != 1:
        count = sum(piece.count(HISTORY) for piece in pieces)
        raise Refused(path.name, "prompt.user", f"{count} places for {HISTORY}", f"write {HISTORY} exactly once")
    if misplaced := next((name for name in sorted(_ITEM_FIELDS) if any(name in piece for piece in pieces)), None):
        raise Refused(path.name, "prompt.user", f"{misplaced} belongs to an item", f"write it in item, {HISTORY} here")
    item = prompt.get("item", "{code}")
    if "{code}" not in item or set(_PLACEHOLDER.findall(item)) - _ITEM_FIELDS:
        problem = f"{item!r:.60} is not an item; its fields are {', '.join(sorted(_ITEM_FIELDS))}"
        raise Refused(path.name, "prompt.item", problem, 'write "{code}", or "{code} {title}"')
    return Template(
        pieces=pieces,
        item=item,
        separator=prompt.get("separator", ""),
        special_tokens=prompt.get("special_tokens", not prompt.get("chat")),
        max_items=_count(path, raw, "prompt.max_items") or 20,
        stride=_count(path, raw, "prompt.stride"),
        close=_closing(path, codes.get("close", [])),
        beam_width=_count(path, raw, "search.beam_width"),
        scores=_scores(path, search.get("scores")),
        count_close=search.get("count_close", True),
    )


def _check_types(path: Path, section: str, values: Mapping[str, Any]) -> None:
    """Reject texts and flags of another type. Raises Refused naming the key."""
    for name, value in values.items():
        kind = _TYPES.get(name)
        if kind is not None and type(value) is not kind:
            example = "true" if kind is bool else '"..."'
            problem = f"{value!r:.60} is not {'true or false' if kind is bool else 'a text'}"
            raise Refused(path.name, f"{section}.{name}", problem, f"give for example {name} = {example}")


def _count(path: Path, raw: Mapping[str, Any], key: str) -> int | None:
    """Return a number of 1 to the manifest's limit; None if the key is absent."""
    section, name = key.split(".")
    given = raw.get(section, {}).get(name)
    most = MAX_BEAM_WIDTH if name == "beam_width" else MAX_PROMPT_ITEMS
    if given is None or (type(given) is int and 1 <= given <= most):
        return given
    raise Refused(path.name, key, f"{given!r:.60} is not a number of 1 to {most}", f"give for example {name} = 10")


def _texts(path: Path, key: str, given: Any) -> list[str]:
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        return given
    raise Refused(path.name, key, f"{given!r:.60} is not a list of texts", 'give for example ["a", "b"]')


def _closing(path: Path, given: Any) -> tuple[str, ...]:
    texts = _texts(path, "codes.close", given)
    if "" in texts:
        raise Refused(path.name, "codes.close", "an empty text", "give the texts that the decoder generates")
    return tuple(texts)


def _scores(path: Path, given: Any) -> str | None:
    if given is None or given in get_args(Scores):
        return None if given is None else str(given)
    raise Refused(path.name, "search.scores", f"{given!r:.60} is unknown", f"give one of {', '.join(get_args(Scores))}")


def _pieces(path: Path, prompt: Mapping[str, Any], chat: ChatTemplate | None) -> tuple[str, ...]:
    user = prompt.get("user")
    if not user:
        raise Refused(path.name, "prompt.user", "missing", f"write the text around {HISTORY}")
    answer = prompt.get("answer", "")
    if not prompt.get("chat"):
        pieces = [user] if isinstance(user, str) else _texts(path, "prompt.user", user)
        return (*pieces[:-1], pieces[-1] + answer)
    if chat is None:
        raise Refused(path.name, "prompt.chat", "the checkpoint has no chat template", "write the whole text as user")
    messages = [ChatMessage(role="system", content=prompt["system"])] if "system" in prompt else []
    return (render(chat, [*messages, ChatMessage(role="user", content=str(user))]) + answer,)


def compile_template(template: Template, tokenizer: Tokenizer, table: ItemCodeTable, file: str) -> Derived:
    """Return the prompt of a template. Without titles it is compiled, and proven on histories of several lengths."""
    if "{title}" in template.item or "{categories}" in template.item:
        return Derived(prompt=_as_text(template, tokenizer, table, file), close=template.close)
    names = _names(tokenizer, table, 512)
    draw, examples = np.random.default_rng(0), []
    for number, length in enumerate((*_PROVEN_LENGTHS, template.max_items), start=1):
        picked = draw.integers(0, len(names), length)
        written = template.separator.join(template.item.replace("{code}", names[row]) for row in picked)
        pieces = tuple(piece.replace(HISTORY, written) for piece in template.pieces)
        examples.append(Example(number=number, pieces=pieces, special_tokens=template.special_tokens))
    stride = template.stride or 1
    try:
        derived = derive(examples, tokenizer, table, file, template.max_items, stride)
        return Derived(prompt=derived.prompt, close=template.close)
    except Refused:  # pieces that the tokenizer joins: encode each request
        return Derived(prompt=_as_text(template, tokenizer, table, file), close=template.close)


def _names(tokenizer: Tokenizer, table: ItemCodeTable, num_items: int) -> list[str]:
    """Return the codes of the first items as text."""
    assert table.first_tokens is not None
    tokens_ID = table.codes[:num_items] + np.array(table.first_tokens)
    return ["".join(str(tokenizer.id_to_token(token)) for token in row) for row in tokens_ID.tolist()]


def _prove_text(template: Template, tokenizer: Tokenizer, table: ItemCodeTable, file: str) -> None:
    """Reject codes whose text is encoded as other tokens: ids of ordinary tokens have no text of their own."""
    names, codes = _names(tokenizer, table, _PROVEN_LENGTHS[-1]), Codes(table)
    items = [template.item.replace("{code}", name) for name in names]
    written = template.separator.join(_PLACEHOLDER.sub("", item) for item in items)
    pieces = tuple(piece.replace(HISTORY, written) for piece in template.pieces)
    sids, _ = codes.split(encode(tokenizer, Example(number=1, pieces=pieces, special_tokens=template.special_tokens)))
    rows = [codes.row_of(code) for code in sids]
    if [None if row is None else tuple(table.codes[row]) for row in rows] != [
        tuple(code) for code in table.codes[: len(names)]
    ]:
        problem = f"the text {names[0]!r:.60} of a code is encoded as other tokens than the code's"
        fix = "give --examples with prompt_token_ids, or add the codes' tokens with add_tokens before training"
        raise Refused(file, "prompt.item", problem, fix)


def _as_text(template: Template, tokenizer: Tokenizer, table: ItemCodeTable, file: str) -> Prompt:
    """Return a prompt that is encoded for each request. `tokens_per_item` allows a title of 32 tokens.

    Raises Refused if the text of a code is not encoded as its tokens.
    """
    _prove_text(template, tokenizer, table, file)
    fixed = sum(
        len(tokenizer.encode(piece.replace(HISTORY, ""), add_special_tokens=template.special_tokens).ids)
        for piece in template.pieces
    )
    has_words = template.item != "{code}"
    per_item = table.codes.shape[1] + len(tokenizer.encode(template.separator, add_special_tokens=False).ids)
    text = PromptText(
        pieces=template.pieces,
        item=template.item,
        between=template.separator,
        special_tokens=template.special_tokens,
        fixed_tokens=fixed,
        tokens_per_item=per_item + (32 if has_words else 2),
    )
    return Prompt(template.max_items, template.stride or 1, text=text)
