"""A text checkpoint whose files do not fit each other, or are broken, is refused before it serves."""

import json
from pathlib import Path

import pytest
import torch

from models.decoder.weights import load_decoder
from services.errors import CheckpointError
from services.llm.engine.config import EngineConfig
from services.llm.text.model import RequestLimits, load_text, read_eos_ids
from services.llm.text.tokenizer import load_tokenizer
from tests.support.engine.checkpoints import write_checkpoint

LIMITS = RequestLimits(max_tokens=20, max_choices=1)


def load(folder: Path) -> None:
    """Load for the CPU in fp32, into a small engine."""
    load_text(folder, "tiny", EngineConfig(num_blocks=64, cpu_kernels="torch"), torch.float32, "cpu", LIMITS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint."""
    return write_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_broken_config_file_is_refused_by_its_path(folder: Path, name: str, content: bytes) -> None:
    """The optional files must be JSON objects."""
    (folder / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_eos_ids(folder, load_tokenizer(folder))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        *((value, r"eos_token_id .* is no token id") for value in ("<|end|>", [1.5], [[1]])),
        (10**6, r"do not fit together .*1000000"),
    ],
)
def test_an_eos_id_that_is_no_token_is_refused(folder: Path, given: object, reason: str) -> None:
    """The error names the file and the value, one beyond the vocabulary too."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))

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
