"""Detects end-of-text and end-of-turn tokens by name. Pure.

A checkpoint's `eos` often differs from the token that its chat template writes at the end of a turn.
"""

from collections.abc import Iterable

_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001 - DeepSeek's
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
        *("<REPO>", "<reponame>", "<|file_sep|>"),
    }
)
"""Names of tokens that end a text in addition to `eos`: llama.cpp's list (src/llama-vocab.cpp, special_eog_ids)."""
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})
"""If the vocabulary has these tokens, `<|end|>` ends only a part of an answer, as in llama.cpp."""


def named_ends(tokens: Iterable[tuple[int, str]]) -> dict[str, int]:
    """Return the ids of the tokens whose names end a text."""
    ends = {token: token_id for token_id, token in tokens if token in _NAMES}
    if any(names <= ends.keys() for names in _HARMONY):
        ends.pop("<|end|>", None)
    if "<|tool_response>" in ends:
        ends.pop("</s>", None)
    return ends
