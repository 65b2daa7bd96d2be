"""Tokenizers of GGUF files: SentencePiece merges follow the scores, and each family splits words in its own way."""

import pytest

from models.decoder.gguf_tokenizer import build_tokenizer
from models.errors import CheckpointError

PIECES = {"▁": -9.0, "t": -8.0, "h": -8.0, "e": -8.0, "th": -2.0, "he": -1.0, "▁t": -3.5}


def sentence_piece(**changed) -> dict:
    """Return the metadata of a SentencePiece vocabulary with byte fallback."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(PIECES.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changed,
    }


def byte_level(way: str) -> dict:
    """Return the metadata of a byte-level vocabulary of digits with a single merge."""
    tokens = [*"0123456789Ġa", "12", "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": way,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.token_type": [1] * 13 + [3],
    }


def test_sentence_piece_joins_the_most_probable_first() -> None:
    """The highest-scored merge comes first; BOS token and leading space are added unless the file disables them."""
    tokenizer = build_tokenizer(sentence_piece())
    switched_off = {f"tokenizer.ggml.{flag}": False for flag in ("add_bos_token", "add_space_prefix")}

    assert tokenizer.encode("the").tokens == ["<s>", "▁t", "he"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("the é</s>").ids) == "the é"
    assert build_tokenizer(sentence_piece(**switched_off)).encode("the").tokens == ["t", "he"]


@pytest.mark.parametrize(
    ("way", "tokens"),
    [
        ("gpt-2", ["12", "12", "Ġ", "a"]),
        ("smollm", ["1", "2", "1", "2", "Ġ", "a"]),
        ("qwen2", ["1", "2", "1", "2", "Ġ", "a"]),
        ("llama-bpe", ["12", "1", "2", "Ġ", "a"]),
    ],
)
def test_digits_make_words_as_in_their_family(way: str, tokens: list[str]) -> None:
    """GPT-2 keeps a number whole, SmolLM and Qwen split every digit, Llama 3 splits into groups of three."""
    assert build_tokenizer(byte_level(way)).encode("1212 a").tokens == tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_type": None}, "key tokenizer.ggml.token_type is missing"),
        ({"merges": ["1 9"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ({"merges": ["12"]}, "tokenizer.ggml.merges do not fit the tokens"),
    ],
)
def test_damaged_metadata_is_refused_by_its_key(change: dict, message: str) -> None:
    """A missing key, or a merge that does not produce a token, is named."""
    changed = byte_level("smollm") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}

    with pytest.raises(CheckpointError, match=message):
        build_tokenizer({key: value for key, value in changed.items() if value is not None})
