"""How large decoder and student are: what of the decoder its student has to keep."""

from pathlib import Path

import torch
from torch import nn

from models.decoder.config import read_config
from models.decoder.decoder import Decoder
from models.student import read_student


def num_parameters(decoder_dir: Path, students_dir: Path) -> dict[str, dict[str, int]]:
    """Return, by model, the number of `all` parameters and of those outside the table of items."""
    with torch.device("meta"):
        decoder = Decoder(read_config(decoder_dir))
    student = read_student(students_dir / "student.safetensors")
    return {"decoder": _counts(decoder, decoder.embedding), "student": _counts(student, student.embedding)}


def _counts(model: nn.Module, table: nn.Embedding) -> dict[str, int]:
    total = sum(parameter.numel() for parameter in model.parameters())
    return {"all": total, "without_items": total - table.weight.numel()}
