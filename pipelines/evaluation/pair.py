"""A decoder and its student in one folder, as a bundle, its judged pair and a refit keep them: copied, read, scored."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from models.catalogue import Catalogue
from models.decoder.adapter import ADAPTER
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.search import OWN_SEARCH, Search
from models.student import StudentModel, read_student
from pipelines.evaluation.evaluate import EvaluatedModels
from pipelines.foreign.stage import copy_linked
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import Scorer
from pipelines.scoring.student import StudentScorer
from pipelines.training.start.text_rows import ITEM_TEXT
from pipelines.training.target.teacher import TEACHER


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models, in fp32."""

    decoder: Decoder
    student: StudentModel

    @property
    def models(self) -> dict[str, nn.Module]:
        return {"decoder": self.decoder, "student": self.student}

    def scorers(self, catalogue: Catalogue, prompt: Prompt, search: Search = OWN_SEARCH) -> dict[str, Scorer]:
        """Return what scores histories of this catalogue, which the pair was trained on, by the name of the model."""
        return {
            "decoder": decoder_scorer(self.decoder, catalogue, prompt, search),
            "student": StudentScorer(self.student),
        }


def load_pair(folder: Path, device: torch.device) -> Pair:
    """Read the folder's `decoder/` and student. Raises CheckpointError."""
    return Pair(
        load_decoder(folder / "decoder", torch.float32, device), read_student(folder / "student.safetensors").to(device)
    )


def save_pair(trained: EvaluatedModels, folder: Path) -> None:
    """Copy decoder, student, catalogue and, if present, the decoder's teacher and text rows in a bundle's layout."""
    if trained.imported is None and not (trained.decoder_dir / ADAPTER).is_dir():
        shutil.copytree(trained.decoder_dir, folder / "decoder")
    else:
        copy_linked(trained.decoder_dir, folder / "decoder")
    shutil.copyfile(trained.tokenized / "catalogue.parquet", folder / "catalogue.parquet")
    shutil.copyfile(trained.students_dir / "student.safetensors", folder / "student.safetensors")
    beside = trained.decoder_dir.parent
    if (beside / TEACHER).exists():
        shutil.copytree(beside / TEACHER, folder / TEACHER)
    if (beside / ITEM_TEXT).exists():
        shutil.copyfile(beside / ITEM_TEXT, folder / ITEM_TEXT)
