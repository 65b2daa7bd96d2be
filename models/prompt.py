"""Converts a history to a prompt, identically in training and in serving.

A history grows at its end. Truncating it to the newest `max_items` at every event would shift every position and
invalidate the prefix cache each time. So it is truncated by whole strides: the start is fixed for `stride` events,
during which each prompt is a prefix of the next prompt (without its `tail`).

The prompt of our own decoder is the beginning token and the tokens of the items. A decoder that was trained elsewhere
has tokens before, between and after its items, or a text template that is encoded for each request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.catalogue import BOS_TOKEN, Catalogue

STRIDE_ITEMS = 50
"""Stride in items of the truncation of histories, the same in prompts and in stored rows."""
HISTORY = "{history}"
"""Place of the items in a text template."""

Encode = Callable[[str, bool], list[int]]
"""(text, whether to add special tokens) -> tokens."""


def window_start(num_items: int, max_items: int, stride: int) -> int:
    """Return the index of the first item kept: the smallest multiple of `stride` that keeps at most `max_items`."""
    overflow = max(0, num_items - max_items)
    return -(-overflow // stride) * stride


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """A prompt as text, for tokenizers that join a template and its items.

    Args:
        pieces: Parts that are encoded one by one; exactly one has `{history}`.
        item: Text of an item with `{code}`, `{title}` and `{categories}`.
        between: Text between two items.
        special_tokens: Whether the tokenizer adds its special tokens to the first piece.
        fixed_tokens: Number of tokens without items, for size estimates.
        tokens_per_item: Upper estimate of the tokens of an item and the text after it.
    """

    pieces: tuple[str, ...]
    item: str
    between: str
    special_tokens: bool
    fixed_tokens: int
    tokens_per_item: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one decoder: `head`, the items' tokens with `between` in between, `tail`.

    With `text`, `encoder` encodes each request and `name_of` returns the text of a token.
    """

    max_items: int = 200
    stride: int = STRIDE_ITEMS
    head: tuple[int, ...] = (BOS_TOKEN,)
    between: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    text: PromptText | None = None
    encoder: Encode | None = field(default=None, compare=False, repr=False)
    name_of: Callable[[int], str] | None = field(default=None, compare=False, repr=False)

    def window(self, num_items: int) -> tuple[int, int]:
        """Return the index of the first history item in the prompt, and the number of items in the prompt."""
        start = window_start(num_items, self.max_items, self.stride)
        return start, num_items - start

    def tokens(self, catalogue: Catalogue, history: Sequence[int]) -> list[int]:
        """Return the prompt of item indices, oldest first."""
        kept = history[self.window(len(history))[0] :]
        if self.text is not None:
            return self._encoded(self.text, catalogue, kept)
        codes, depth = catalogue.tokens(kept), catalogue.depth
        if not self.between:
            return [*self.head, *codes, *self.tail]
        return self.joined([codes[start : start + depth] for start in range(0, len(codes), depth)])

    def joined(self, items: Sequence[Sequence[int]]) -> list[int]:
        """Return the prompt of items by their codes' tokens, oldest first."""
        codes = [token for number, item in enumerate(items) for token in (*(self.between if number else ()), *item)]
        return [*self.head, *codes, *self.tail]

    def num_tokens(self, num_items: int, depth: int) -> int:
        """Return the length of a prompt of this many items; an upper estimate for a text template."""
        if self.text is not None:
            return self.text.fixed_tokens + num_items * self.text.tokens_per_item
        fixed = len(self.head) + len(self.tail)
        return fixed + num_items * depth + max(0, num_items - 1) * len(self.between)

    def record(self) -> dict[str, Any]:
        """Return the manifest's value (JSON). Our own prompt is its two limits."""
        limits: dict[str, Any] = {"max_items": self.max_items, "stride": self.stride}
        if self.text is not None:
            return limits | {"text": {name: getattr(self.text, name) for name in self.text.__slots__}}
        own = Prompt()
        if (self.head, self.between, self.tail) == (own.head, own.between, own.tail):
            return limits
        return limits | {"head": list(self.head), "between": list(self.between), "tail": list(self.tail)}

    def _encoded(self, text: PromptText, catalogue: Catalogue, kept: Sequence[int]) -> list[int]:
        assert self.encoder is not None, "a text template needs the decoder's tokenizer"
        written = text.between.join(self._item(text.item, catalogue, index) for index in kept)
        tokens: list[int] = []
        for number, piece in enumerate(text.pieces):
            whole = piece.replace(HISTORY, written)
            tokens += self.encoder(whole, text.special_tokens and number == 0)
        return tokens

    def _item(self, template: str, catalogue: Catalogue, index: int) -> str:
        assert self.name_of is not None
        fields = {
            "{code}": "".join(map(self.name_of, catalogue.tokens([index]))),
            "{title}": catalogue.titles[index],
            "{categories}": ", ".join(catalogue.categories[index]),
        }
        for name, value in fields.items():
            template = template.replace(name, value)
        return template


def prompt_of(manifest: Mapping[str, Any], decoder_dir: Path | None = None) -> Prompt:
    """Return a bundle's prompt. Without `decoder_dir` a text template has sizes but no encoder.

    Raises OSError or ValueError for an unreadable tokenizer.
    """
    given = manifest.get("prompt", {})
    limits = int(given.get("max_items", 200)), int(given.get("stride", STRIDE_ITEMS))
    if (text := given.get("text")) is None:
        own = Prompt()
        head, between, tail = (
            tuple(given[name]) if given.get(name) is not None else getattr(own, name)
            for name in ("head", "between", "tail")
        )
        return Prompt(*limits, head, between, tail)
    fields = {name: text[name] for name in PromptText.__slots__}
    template = PromptText(**{**fields, "pieces": tuple(text["pieces"])})
    if decoder_dir is None:
        return Prompt(*limits, text=template)
    encoder, name_of = text_encoder(decoder_dir)
    return Prompt(*limits, text=template, encoder=encoder, name_of=name_of)


def text_encoder(decoder_dir: Path) -> tuple[Encode, Callable[[int], str]]:
    """Return the encoder of a checkpoint's `tokenizer.json`, and the name of each token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(decoder_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str, special_tokens: bool) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    return encode, lambda token: str(tokenizer.id_to_token(token) or "")
