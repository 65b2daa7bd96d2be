"""A text checkpoint with inconsistent or corrupt files is rejected before it serves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.decoder.weights import load_decoder
from services.errors import CheckpointError
from services.llm.engine.config import EngineConfig
from services.llm.text.chat_template import ChatTemplate, read_eos_ids
from services.llm.text.model import RequestLimits, load_text
from services.llm.text.tokenizer import load_tokenizer
from tests.support.engine.checkpoints import EOS_ID, overflowing, write_checkpoint

LIMITS = RequestLimits(max_tokens=20, max_choices=1)


def load(folder: Path) -> None:
    load_text(folder, "tiny", EngineConfig(num_blocks=64, cpu_kernels="torch"), torch.float32, "cpu", LIMITS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        *(("generation_config.json", broken, r"generation_config\.json") for broken in (b"{", b"[]", b"\xff")),
        *(("tokenizer_config.json", broken, r"tokenizer_config\.json") for broken in (b"{", b"[]", b"\xff")),
        ("generation_config.json", b'{"eos_token_id": "<|end|>"}', r"eos_token_id .* is not a token id"),
        ("generation_config.json", b'{"eos_token_id": [1.5]}', r"eos_token_id .* is not a token id"),
        ("generation_config.json", b'{"eos_token_id": [[1]]}', r"eos_token_id .* is not a token id"),
        ("generation_config.json", b'{"eos_token_id": 1000000}', r"do not fit together .*1000000"),
    ],
)
def test_an_optional_file_that_is_wrong_is_refused(folder: Path, name: str, content: bytes, reason: str) -> None:
    """The file must be a JSON object and EOS a vocabulary token; the error names the file or the value."""
    (folder / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=reason):
        load(folder)


def test_a_tokenizer_with_more_tokens_than_the_decoder_is_refused(folder: Path) -> None:
    """Prompts could contain tokens without an embedding row, as after adding tokens only to the tokenizer."""
    vocab_size = load_decoder(folder, torch.float32, "cpu").config.vocab_size
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][0], "id": vocab_size, "content": "<|new|>"}
    tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(CheckpointError, match=f"do not fit together .*{vocab_size} vs {vocab_size + 1}"):
        load(folder)


def not_a_number(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with one number replaced by NaN."""
    tensors["model.embed_tokens.weight"][3, 3] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("break_weights", "reason"),
    [(overflowing, "logits that are not finite"), (not_a_number, r"not finite: model\.embed_tokens\.weight")],
)
def test_weights_that_give_no_numbers_are_refused(
    folder: Path, break_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]], reason: str
) -> None:
    """Non-finite weights are reported by name; an overflow is detected by the warm-up's logits."""
    path = folder / "model.safetensors"
    save_file(break_weights(load_file(path)), path)

    with pytest.raises(CheckpointError, match=reason):
        load(folder)


@pytest.mark.parametrize(
    ("end", "in_template", "is_special", "is_end"),
    [
        ("<|im_end|>", True, True, True),
        ("<|im_end|>", False, True, False),
        ("<|im_end|>", True, False, False),
        ("<|turn_over|>", True, True, False),
    ],
)
def test_the_end_of_a_turn_in_the_template_ends_a_text(
    folder: Path, end: str, in_template: bool, is_special: bool, is_end: bool
) -> None:
    """A special token with a known name in the chat template ends a text, in addition to `eos`."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token = {**tokenizer["added_tokens"][0], "id": 5, "content": end, "special": is_special}
    tokenizer["added_tokens"].append(token)
    tokenizer["model"]["vocab"] = {
        (end if token_id == 5 else piece): token_id for piece, token_id in tokenizer["model"]["vocab"].items()
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = ChatTemplate("{{ messages }}" + end * in_template, {})

    assert read_eos_ids(folder, load_tokenizer(folder), template) == {EOS_ID, *([5] if is_end else [])}
