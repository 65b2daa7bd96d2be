"""Stage 9: stores, for the most active users, the list that the LLM tier would return now, ranked by the same engine.

    precomputed.parquet   the columns of the view user_recommendations

Histories come from the online store, as a request would read them, and each list carries the version of its history
row: after any further event the decoder ranks again. A list excludes the user's dislikes, and the user's history unless
users repeat items.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl
import torch

from models.catalogue import Catalogue
from models.decoder.weights import load_decoder
from models.mixer import DECODER, Mixer
from models.prompt import Prompt, prompt_of
from models.registry.bundle import Bundle, learned_repeats, lists_version
from models.search import OWN_SEARCH, Search, search_of
from pipelines.options import PrecomputeOptions
from pipelines.runner.stage import Progress, content_key
from services.features import schema
from services.features.schema import USER_RECOMMENDATIONS, PrecomputedRow, UserHistory
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig, WeightKind
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome

_TABLE = "precomputed.parquet"
_RECENT_DAYS = 30


def busiest_users(events: pl.DataFrame, num_users: int) -> list[str]:
    """Return the users with the most events in the newest month of the data, then in all of it, then by ID."""
    recent = pl.col("event_time") > pl.col("event_time").max() - pl.duration(days=_RECENT_DAYS)
    counted = events.with_columns(recent=recent).group_by("user_id").agg(pl.col("recent").sum(), total=pl.len())
    return counted.sort(["recent", "total", "user_id"], descending=[True, True, False])["user_id"][:num_users].to_list()


@dataclass(frozen=True, slots=True)
class BatchRanker:
    """Inputs of an offline ranking: the checkpoint, its catalogue, their bundle, and the prompt."""

    decoder_dir: Path
    catalogue: Catalogue
    bundle_version: str
    prompt: Prompt
    repeats: bool = False
    """Whether lists contain seen items too."""
    weight_kind: WeightKind = "model"
    """How the serving engine stores the decoder's weights."""
    search: Search = OWN_SEARCH
    mixer: Mixer | None = None
    """Sources that requests mix with the decoder's scores."""

    def num_ranked(self, k: int) -> int:
        """Return the number of items that the engine ranks for a list of `k`: as many as for a request."""
        if self.mixer is None or not self.mixer.blends.get(DECODER):
            return k
        width = self.search.beam_width or EngineConfig().default_beam_width
        return min(len(self.catalogue.item_ids), max(k, width))

    def mixed(
        self, history: Sequence[int], outcome: EngineOutcome, allowed: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` items for a history, best first, and their scores, as the LLM tier answers."""
        added = None if self.mixer is None else self.mixer.added(DECODER, history)
        if added is None:
            return outcome.item_indices[:k], outcome.scores[:k]
        return added.best_ranked(outcome.item_indices, outcome.scores, allowed, k)


def ranker_of(live: Bundle) -> BatchRanker:
    """Return a ranker that ranks as a published bundle serves."""
    catalogue = live.catalogue()
    return BatchRanker(
        live.decoder_dir,
        catalogue,
        lists_version(live.manifest, live.version),
        prompt_of(live.manifest, live.decoder_dir),
        repeats=learned_repeats(live.manifest),
        weight_kind=cast("WeightKind", live.weight_kind),
        search=search_of(live.manifest),
        mixer=live.mixer(catalogue),
    )


def key(bundle_version: str, histories: Sequence[UserHistory], options: PrecomputeOptions) -> str:
    """Return the content key of these users' lists."""
    inputs = [bundle_version, *(f"{row.user_id}@{row.row_time_us}" for row in histories)]
    return content_key(asdict(options), inputs, [sys.modules[__name__], schema])


def precompute(
    ranker: BatchRanker, histories: Sequence[UserHistory], options: PrecomputeOptions, out: Path, progress: Progress
) -> None:
    """Rank for these histories and write the table."""
    engine, catalogue = batch_engine(ranker, len(histories)), ranker.catalogue
    requests: dict[str, tuple[list[int], np.ndarray]] = {}
    for history in histories:
        items = catalogue.indices(history.item_ids)
        prompt = ranker.prompt.tokens(catalogue, items)
        seen = () if ranker.repeats else history.item_ids
        allowed = catalogue.allowed(excluded_item_ids=seen + history.disliked_item_ids)
        requests[history.user_id] = items, allowed
        engine.add_rank(history.user_id, prompt, k=ranker.num_ranked(options.list_len), allowed=allowed)
    row_times_us = {history.user_id: history.row_time_us for history in histories}
    rows = []
    for outcome in outcomes_of(engine):
        items, allowed = requests.pop(outcome.request_id)
        indices, scores = ranker.mixed(items, outcome, allowed, options.list_len)
        rows.append(
            PrecomputedRow(
                user_id=outcome.request_id,
                item_ids=tuple(catalogue.item_ids[index] for index in indices.tolist()),
                scores=tuple(scores.tolist()),
                bundle_version=ranker.bundle_version,
                made_from_row_us=row_times_us[outcome.request_id],
            )
        )
        progress(len(rows), len(histories), "")
    save_rows(rows, out)


def save_rows(rows: Sequence[PrecomputedRow], out: Path) -> None:
    pl.DataFrame(USER_RECOMMENDATIONS.to_columns(rows)).write_parquet(out / _TABLE)


def read_rows(folder: Path) -> list[PrecomputedRow]:
    return USER_RECOMMENDATIONS.from_columns(pl.read_parquet(folder / _TABLE).to_dict(as_series=False))


def batch_engine(ranker: BatchRanker, num_requests: int) -> Engine:
    """Return an engine with capacity for this many waiting requests."""
    decoder = load_decoder(ranker.decoder_dir, torch.float32, "cpu")
    items = ItemCodes.of(ranker.catalogue, ranker.search)
    config = EngineConfig(max_waiting=max(1, num_requests), weight_kind=ranker.weight_kind)
    if ranker.search.beam_width is not None:
        config = replace(config, default_beam_width=ranker.search.beam_width)
    return Engine(decoder, config, items=items, bundle_version=ranker.bundle_version)


def outcomes_of(engine: Engine) -> Iterator[EngineOutcome]:
    while engine.has_work:
        yield from engine.step(0.0)
