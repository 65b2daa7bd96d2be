"""Precomputed lists equal the ranking of all items."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from models.decoder.weights import load_decoder
from models.files import file_sha256
from models.prompt import Prompt
from models.registry.store import BundleStore
from pipelines.options import PrecomputeOptions
from pipelines.publication.bundle import publish
from pipelines.publication.precompute import BatchRanker, busiest_users, key, precompute, read_rows
from pipelines.runner import stage
from pipelines.runner.stage import silent
from pipelines.scoring.dense import DecoderScorer
from services.contracts.rank import RankRequest
from services.llm.engine.config import EngineConfig
from services.llm.ranking.model import load_bundle
from tests.support.gateway.rows import history_row
from tests.unit.pipelines.conftest import Built

OPTIONS = PrecomputeOptions(num_users=3, list_len=5)
HISTORIES = [
    history_row("all", tuple(f"i{index:02d}" for index in range(28))),
    history_row("ann", ("i03", "i04", "i05")),
    history_row("bob", tuple(f"i{index:02d}" for index in range(20))),
    history_row("new", ()),
]


@pytest.fixture(scope="module")
def ranker(built: Built) -> BatchRanker:
    """The built bundle as a ranker."""
    bundle = BundleStore(built.assembled / "bundles")
    published = publish(bundle, built.assembled / "bundle", "v1", {"prompt": {"max_items": 10, "stride": 5}})
    return BatchRanker(published.decoder_dir, published.catalogue(), "v1", Prompt(10, 5))


@pytest.mark.native
def test_lists_are_what_scoring_everything_would_give_and_the_llm_tier_answers(
    built: Built, ranker: BatchRanker, tmp_path: Path
) -> None:
    """Lists equal sorted dense scores without seen items, and a replica's engine returns the same lists."""
    precompute(ranker, HISTORIES, OPTIONS, tmp_path, silent)

    catalogue = ranker.catalogue
    scorer = DecoderScorer(load_decoder(ranker.decoder_dir, torch.float32, "cpu"), catalogue, Prompt(10, 5))
    loaded = load_bundle(BundleStore(built.assembled / "bundles").open("v1"), EngineConfig(), torch.float32, "cpu")
    rows = {row.user_id: row for row in read_rows(tmp_path)}
    for history in HISTORIES:
        row, seen = rows[history.user_id], catalogue.indices(history.item_ids)
        (scores,) = scorer([np.array(seen, dtype=np.int64)])
        scores[seen] = -np.inf
        best = np.argsort(-scores, kind="stable")[: min(5, len(catalogue.item_ids) - len(seen))]
        assert row.item_ids == tuple(catalogue.item_ids[index] for index in best)
        assert (row.bundle_version, row.made_from_row_us) == ("v1", history.row_time_us)
        request = RankRequest(
            request_id=row.user_id,
            user_id=row.user_id,
            bundle_version="v1",
            history_item_ids=history.item_ids,
            k=5,
            budget_ms=1e9,
            excluded_item_ids=history.item_ids,
        )
        loaded.engine_call(request, 1e12)(loaded.engine, row.user_id, 0.0)
        (outcome,) = loaded.engine.step(0.0)
        assert tuple(catalogue.item_ids[index] for index in outcome.item_indices) == row.item_ids
        np.testing.assert_allclose(outcome.scores, row.scores, rtol=1e-4)


def test_key_changes_with_any_user_s_row_and_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's new event, another version, or changed code invalidates the lists."""
    before, changed = key("v1", HISTORIES, OPTIONS), [*HISTORIES[:-1], history_row("new", ("i01",), 2)]

    assert before not in {key("v1", changed, OPTIONS), key("v2", HISTORIES, OPTIONS)}
    monkeypatch.setattr(
        stage, "file_sha256", lambda path: path.name if path.name == "precompute.py" else file_sha256(path)
    )
    assert key("v1", HISTORIES, OPTIONS) != before


def test_busiest_users_are_those_with_the_most_events_of_late() -> None:
    """Users are ordered by events in the newest month, then by all events, then by id."""
    now = datetime(2026, 6, 1, tzinfo=UTC)
    days_ago = [("old", 90), ("old", 91), ("old", 92), ("bob", 1), ("bob", 60), ("ann", 2), ("new", 0), ("new", 1)]
    times = [now - timedelta(days=days) for _, days in days_ago]
    events = pl.DataFrame({"user_id": [user for user, _ in days_ago], "event_time": times})

    assert busiest_users(events, 3) == ["new", "bob", "ann"]
