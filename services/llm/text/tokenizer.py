"""A checkpoint's tokenizer: text to tokens, and each token to its bytes.

Decoding is by bytes: a text is the concatenated bytes of its tokens, read as UTF-8. That holds for byte-level BPE
(GPT-2, Llama 3, Qwen, SmolLM) and for SentencePiece with byte fallback (Llama 2), and it makes decoding token by token
equal to decoding all at once. It does not know requests.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from models.decoder.end_tokens import named_ends
from services.errors import CheckpointError

_WORD_START = "▁"


class TextTokenizer:
    """One checkpoint's vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raise CheckpointError if the kind of decoder is not supported."""
        self._tokenizer = tokenizer
        self._raw: dict[str, Any] = json.loads(tokenizer.to_str())
        self._bytes_of = _bytes_of(self._raw)
        self._pieces = {token_id: piece for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
        added = {token["id"]: token for token in self._raw.get("added_tokens", ())}
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token["special"])
        """Special tokens, which add no text."""

    @cached_property
    def as_json(self) -> str:
        return str(self._tokenizer.to_str())

    @property
    def special_ends(self) -> dict[str, int]:
        """The special tokens that end a text or a turn, by name."""
        return named_ends((token_id, self._pieces[token_id]) for token_id in self.special_ids)

    def id_of(self, piece: str) -> int | None:
        """Return the id of a token by its name, or None."""
        token_id: int | None = self._tokenizer.token_to_id(piece)
        return token_id

    def encode(self, text: str, *, with_special_tokens: bool) -> list[int]:
        """Return the tokens of a text, with the checkpoint's special tokens around it if `with_special_tokens`.

        Uses the batch call, because only that releases the interpreter lock.
        """
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special_tokens)[0].ids
        return ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, special tokens included. Empty for an id without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            return b""
        return piece.encode() if token_id in self._added_ids else self._bytes_of(piece)

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: none for a special token."""
        return b"" if token_id in self.special_ids else self.bytes_of(token_id)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read `tokenizer.json`. Raises CheckpointError naming the missing or unsupported part."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path}: missing; {_fix_for(folder)}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any unreadable file
        raise CheckpointError(f"{path}: not readable as a tokenizer ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer)


def _fix_for(folder: Path) -> str:
    """Return how to get a `tokenizer.json`: by conversion if the folder has a tokenizer in an older form."""
    older = next((name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).exists()), None)
    if older is None:
        return "put the tokenizer into the folder"
    return (
        f'convert {older} with python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def _bytes_of(raw: dict[str, Any]) -> Any:
    """Return the function from a token's written form to its bytes, by the kind of decoder."""
    decoder = raw.get("decoder") or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return _from_byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _from_sentence_piece
    raise CheckpointError(
        f"tokenizer.json: decoder {decoder.get('type')} is not supported, only ByteLevel and ByteFallback"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE (Radford et al. 2019); printable characters are unchanged."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _from_byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


def _from_sentence_piece(piece: str) -> bytes:
    if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_WORD_START, " ").encode()
