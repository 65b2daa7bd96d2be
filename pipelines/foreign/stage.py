"""Stage `import`: takes the place of training where the decoder was trained elsewhere.

    decoder/       the checkpoint
    import.json    the import's description, with prompt and search as this run uses them
    training.json, speed.json   as the stage `train` writes them, without a training

If the import had no labelled examples, scores and strides are compared on the run's own validation labels.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from pipelines.foreign.measure import Labelled, compare
from pipelines.foreign.model import ABOUT, ImportedModel

_MAX_MEASURED = 500


def import_stage(model: ImportedModel, tokenized: Path, cases: Labelled, distil_positions: int, out: Path) -> None:
    """Write the stage. `cases` are validation labels by the catalogue of `tokenized`."""
    copy_linked(model.decoder_dir, out / "decoder")
    about: dict[str, Any] = {**model.about, "distil_positions": distil_positions}
    cases = cases.sample(_MAX_MEASURED)
    if about["measured"] is None and len(cases.labels):
        decoder = load_decoder(model.decoder_dir, torch.float32, "cpu")
        catalogue = load_catalogue(tokenized / "catalogue.parquet")
        measured = compare(decoder, catalogue, model.prompt, model.search, cases)
        about["measured"] = measured
        if not about.get("stride_given"):
            about["prompt"] = {**about["prompt"], "stride": measured["stride"]}
    (out / ABOUT).write_text(json.dumps(about, indent=1))
    training = {"num_parameters": about["num_parameters"], "num_tokens": 0, "started_from": None}
    (out / "training.json").write_text(json.dumps(training))
    (out / "speed.json").write_text("{}")


def imported_beside(decoder_dir: Path) -> ImportedModel | None:
    """Return the import that this decoder folder belongs to; None for our own decoder."""
    path = decoder_dir.parent / ABOUT
    return ImportedModel(path.parent, json.loads(path.read_text())) if path.is_file() else None


def copy_linked(folder: Path, target: Path) -> None:
    """Copy a folder whose files are never changed in place, with hard links where possible."""

    def link(source: str, destination: str) -> None:
        try:
            os.link(source, destination)
        except OSError:
            shutil.copyfile(source, destination)

    shutil.copytree(folder, target, copy_function=link)


def judged_labels(model: ImportedModel, label_us: np.ndarray | None, num_cases: int) -> np.ndarray:
    """Return which labels (num_cases,) the decoder cannot have seen: those after its date. None without a date."""
    if model.seen_until is None or label_us is None:
        return np.zeros(num_cases, dtype=bool)
    return label_us >= model.seen_until_us
