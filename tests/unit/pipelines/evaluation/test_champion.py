"""New models against the live bundle's models on the same users."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from pipelines.evaluation.champion import MappedScorer, compare
from pipelines.evaluation.held_out import HeldOut
from tests.support.training.bundles import build_catalogue
from tests.unit.pipelines.conftest import Built


def published(built: Built, root: Path) -> Bundle:
    """Publish the trained models."""
    prompt = {"max_items": built.trained.max_items, "stride": built.trained.stride}
    return BundleStore(root).publish(built.assembled / "bundle", "v1", {"prompt": prompt})


def held_out(built: Built, folder: Path) -> HeldOut:
    return HeldOut(built.trained.tokenized, folder, "tailrace pipeline")


def test_equal_models_differ_by_nothing(built: Built, tmp_path: Path) -> None:
    """A bundle with the same models has the same ranks for every user."""
    rows = compare(built.trained, held_out(built, tmp_path), built.evaluated, published(built, tmp_path))

    assert [row["model"] for row in rows] == ["decoder", "student"]
    assert all(row["low"] == row["high"] == 0 and row["champion_ndcg"] == row["challenger_ndcg"] > 0 for row in rows)


def test_a_damaged_champion_is_not_compared(built: Built, tmp_path: Path) -> None:
    """A live bundle with a truncated student does not stop a publication."""
    bundle = published(built, tmp_path)
    (bundle.path / "student.safetensors").write_bytes(b"")

    assert compare(built.trained, held_out(built, tmp_path), built.evaluated, bundle) == []


def test_items_are_matched_by_id() -> None:
    """Scores of the old catalogue map to the new catalogue by item id; items that the old model lacks rank last."""
    before = replace(build_catalogue(2), item_ids=("c", "a"))
    now = replace(build_catalogue(3), item_ids=("a", "b", "c"))
    asked = []

    def scorer(histories: list[np.ndarray]) -> np.ndarray:
        asked.extend(history.tolist() for history in histories)
        return np.array([[3.0, 1.0]] * len(histories))

    scores = MappedScorer(scorer, before, now)([np.array([2, 1, 0]), np.array([1])])

    assert asked == [[0, 1], []]
    assert scores.tolist() == [[1.0, -np.inf, 3.0]] * 2
