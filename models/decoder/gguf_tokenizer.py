"""Builds a tokenizer of the `tokenizers` library from a GGUF file's vocabulary.

Two kinds: byte-level BPE (`gpt2`) with its family's pre-tokenizer, and SentencePiece BPE with byte fallback (`llama`),
whose merges are derived from its scores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from models.decoder.end_tokens import named_ends
from models.decoder.gguf_config import Metadata, need
from models.errors import CheckpointError

_CONTROL, _USER_DEFINED, _NORMAL = 3, 4, 1
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": "{1,3}", "qwen2": ""}
"""Number of digits per word, in the families that split by `_WORDS`."""
_WORD_START = "▁"


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer. Raises CheckpointError naming the missing or unsupported part."""
    kind = need(metadata, "tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata)
    else:
        raise CheckpointError(f"tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' or 'llama'")
    _add_special(tokenizer, metadata)
    _add_bos(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Metadata) -> Tokenizer:
    family = metadata.get("tokenizer.ggml.pre", "")
    merges = [tuple(merge.split(" ", 1)) for merge in need(metadata, "tokenizer.ggml.merges")]
    try:
        model = models.BPE(_vocabulary(metadata), merges, fuse_unk=False, ignore_merges=family == "llama-bpe")
    except Exception as error:  # the library raises bare Exception for a merge of an unknown token
        raise CheckpointError(f"tokenizer.ggml.merges do not fit the tokens ({error})") from error
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    if family in _DIGITS:
        words = pre_tokenizers.Split(Regex(_WORDS % _DIGITS[family]), "isolated")
        byte_map = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_map])
    elif family in ("gpt-2", "smollm"):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if family == "smollm" else byte_level
    else:
        raise CheckpointError(f"tokenizer.ggml.pre {family!r} is not supported, only gpt-2, llama-bpe, qwen2 or smollm")
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(metadata: Metadata) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocabulary,
        _merges_of(metadata, vocabulary),
        unk_token=metadata["tokenizer.ggml.tokens"][int(unknown)],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _WORD_START)
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_START), spaces])
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _merges_of(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins to a piece, most probable piece first: SentencePiece's merge order."""
    scores: Sequence[float] = need(metadata, "tokenizer.ggml.scores")
    kinds: Sequence[int] = need(metadata, "tokenizer.ggml.token_type")
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in vocabulary.items():
        if kinds[token_id] != _NORMAL:
            continue
        for end in range(1, len(piece)):
            left, right = piece[:end], piece[end:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(need(metadata, "tokenizer.ggml.tokens"))}


def _add_special(tokenizer: Tokenizer, metadata: Metadata) -> None:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = need(metadata, "tokenizer.ggml.token_type")
    ends = named_ends(enumerate(tokens))
    added = [
        AddedToken(token, special=kind == _CONTROL or token in ends, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) or token in ends
    ]
    tokenizer.add_tokens(added)


def _add_bos(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Prepend the BOS token to texts if the model was trained with it."""
    bos: Any = metadata.get("tokenizer.ggml.bos_token_id")
    is_llama = metadata["tokenizer.ggml.model"] == "llama"
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", is_llama):
        return
    token = metadata["tokenizer.ggml.tokens"][int(bos)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, int(bos))]
    )
