"""The joined bytes of tokens equal the text decoded by the tokenizers library."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from services.errors import CheckpointError
from services.llm.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.engine.checkpoints import EOS_ID, build_tokenizer

BYTE_LEVEL = build_tokenizer()
NUM_TOKENS = BYTE_LEVEL.get_vocab_size()


def build_sentence_piece() -> Tokenizer:
    """Build a Llama 2 style tokenizer: words begin with a mark, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "é"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


SENTENCE_PIECE = build_sentence_piece()


@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=30))
def test_byte_level_tokens_add_up_to_the_decoded_text(token_ids) -> None:
    """Any tokens, including incomplete characters, decode like in the library."""
    tokenizer = TextTokenizer(BYTE_LEVEL)

    joined = b"".join(tokenizer.shown_bytes(token_id) for token_id in token_ids)

    assert joined.decode(errors="replace") == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


@given(st.text("ab é日🎉", max_size=20))
def test_sentence_piece_tokens_add_up_to_the_text(text) -> None:
    """Words and byte fallback decode to the text, after the first word's space."""
    library = SENTENCE_PIECE
    tokenizer = TextTokenizer(library)
    token_ids = tokenizer.encode(text, with_special_tokens=False)

    joined = b"".join(tokenizer.shown_bytes(token_id) for token_id in token_ids).decode()

    assert joined.removeprefix(" ") == library.decode(token_ids) == text.removeprefix("" if text else " ")


def test_special_tokens_have_a_name_and_no_text() -> None:
    """A special token's bytes are its name, its shown bytes are empty; unknown ids have empty bytes."""
    tokenizer = TextTokenizer(BYTE_LEVEL)

    assert tokenizer.bytes_of(EOS_ID) == b"<|end|>"
    assert tokenizer.shown_bytes(EOS_ID) == b""
    assert tokenizer.bytes_of(NUM_TOKENS + 7) == b""


def test_an_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    """A missing, corrupt or unsupported tokenizer is rejected with its file or decoder."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not readable"):
        load_tokenizer(tmp_path)
    wordpiece = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder WordPiece is not supported"):
        TextTokenizer(wordpiece)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_an_older_tokenizer_names_its_conversion(tmp_path: Path, name: str) -> None:
    """A folder with only SentencePiece's file, or a vocabulary and merges, needs a converted `tokenizer.json`."""
    (tmp_path / name).write_bytes(b"x")

    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: missing; convert {name} with .*from_pretrained"):
        load_tokenizer(tmp_path)
