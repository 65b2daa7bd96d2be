"""Chooses the depth of codes: of two possible decoders, that with the higher validation NDCG@10 as served.

depth.json   ndcg10 by depth, the number of cases, and the chosen depth
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from pipelines.data.examples import Split, read_cases, sample_cases
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import ndcg, rank_labels

_DEPTH = "depth.json"
_NUM_CASES = 2_000
_AT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOfDepth:
    """A decoder of one depth: its tokens, its weights and its prompt."""

    tokenized: Path
    decoder_dir: Path
    max_items: int
    stride: int

    def validation_ndcg(self, *, repeats: bool, device: torch.device) -> float:
        """Return NDCG@10 over at most 2,000 validation cases, the same for every depth."""
        decoder = load_decoder(self.decoder_dir, torch.float32, device)
        catalogue = load_catalogue(self.tokenized / "catalogue.parquet")
        scorer = decoder_scorer(decoder, catalogue, Prompt(self.max_items, self.stride))
        cases = sample_cases(read_cases(self.tokenized, Split.VALID), _NUM_CASES)
        return ndcg(rank_labels(scorer, cases).as_served(repeats=repeats), _AT)


def compare(candidates: Mapping[int, DecoderOfDepth], *, repeats: bool, device: torch.device, out: Path) -> None:
    """Write the validation NDCG@10 of each depth, and the best depth; equal depths are resolved to the smallest."""
    ndcg_by_depth = {
        depth: candidates[depth].validation_ndcg(repeats=repeats, device=device) for depth in sorted(candidates)
    }
    about = {
        "depth": max(ndcg_by_depth, key=lambda depth: ndcg_by_depth[depth]),
        "ndcg10": ndcg_by_depth,
        "most_cases": _NUM_CASES,
    }
    (out / _DEPTH).write_text(json.dumps(about, indent=1))


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read what `compare` wrote; depths are strings in `ndcg10`."""
    about: dict[str, Any] = json.loads((folder / _DEPTH).read_text())
    return about


def describe(folder: Path) -> str:
    """Return a sentence: the depth that was chosen, and why."""
    about = read_comparison(folder)
    measured = ", ".join(f"{value:.4f} at depth {depth}" for depth, value in about["ndcg10"].items())
    return f"codes of depth {about['depth']} are chosen: validation NDCG@10 is {measured}"
