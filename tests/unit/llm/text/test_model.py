"""A text checkpoint whose files do not fit each other, or are broken, is refused before it serves."""

import json
from pathlib import Path

import pytest
import torch

from models.decoder.weights import load_decoder
from services.errors import CheckpointError
from services.llm.engine.config import EngineConfig
from services.llm.text.model import RequestLimits, load_text
from tests.support.engine.checkpoints import write_checkpoint

LIMITS = RequestLimits(max_tokens=20, max_choices=1)


def load(folder: Path) -> None:
    """Load for the CPU in fp32, into a small engine."""
    load_text(folder, "tiny", EngineConfig(num_blocks=64, cpu_kernels="torch"), torch.float32, "cpu", LIMITS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint."""
    return write_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        *(("generation_config.json", broken, r"generation_config\.json") for broken in (b"{", b"[]", b"\xff")),
        *(("tokenizer_config.json", broken, r"tokenizer_config\.json") for broken in (b"{", b"[]", b"\xff")),
        ("generation_config.json", b'{"eos_token_id": "<|end|>"}', r"eos_token_id .* is no token id"),
        ("generation_config.json", b'{"eos_token_id": [1.5]}', r"eos_token_id .* is no token id"),
        ("generation_config.json", b'{"eos_token_id": [[1]]}', r"eos_token_id .* is no token id"),
        ("generation_config.json", b'{"eos_token_id": 1000000}', r"do not fit together .*1000000"),
    ],
)
def test_an_optional_file_that_is_wrong_is_refused(folder: Path, name: str, content: bytes, reason: str) -> None:
    """It must be a JSON object, and the end a token of the vocabulary: the error names the file or the value."""
    (folder / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=reason):
        load(folder)


def test_a_tokenizer_with_more_tokens_than_the_decoder_is_refused(folder: Path) -> None:
    """Prompts could hold tokens without an embedding row, as after tokens were added to a tokenizer alone."""
    vocab_size = load_decoder(folder, torch.float32, "cpu").config.vocab_size
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][0], "id": vocab_size, "content": "<|new|>"}
    tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(CheckpointError, match=f"do not fit together .*{vocab_size} vs {vocab_size + 1}"):
        load(folder)
