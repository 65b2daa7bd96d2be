"""Stage 8: for the users with the most traffic, the list that the LLM tier would answer now, made by the same engine.

    precomputed.parquet   user_id, item_ids (best first), scores, watermark_ms, bundle_version

Histories come from the online store, as a request would read them, and each list carries the newest event that it has seen:
one later event and the router asks the decoder again. A list holds no item of the user's history.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch

from models.catalogue import Catalogue
from models.prompt import prompt_tokens
from models.weights import load_decoder
from pipelines.fitting import Progress
from services.contracts.recommend import Filters
from services.features.rows import PrecomputedRow, UserHistory
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.trie import ItemCodes

_TABLE = "precomputed.parquet"
_RECENT_DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeOptions:
    """How many users get a list, and of what length at most."""

    num_users: int = 300
    list_len: int = 100


def busiest_users(events: pl.DataFrame, num_users: int) -> list[str]:
    """Name the users with the most events in the newest month of the data, then in all of it, then by id."""
    recent = pl.col("event_time") > pl.col("event_time").max() - pl.duration(days=_RECENT_DAYS)
    counted = events.with_columns(recent=recent).group_by("user_id").agg(pl.col("recent").sum(), total=pl.len())
    return counted.sort(["recent", "total", "user_id"], descending=[True, True, False])["user_id"][:num_users].to_list()


def precompute(
    decoder_dir: Path,
    catalogue: Catalogue,
    prompt: Mapping[str, int],
    histories: Sequence[UserHistory],
    bundle_version: str,
    options: PrecomputeOptions,
    out: Path,
    progress: Progress,
) -> None:
    """Rank for these histories and write the table."""
    decoder = load_decoder(decoder_dir, torch.float32, "cpu")
    items = ItemCodes(codes=catalogue.codes, level_sizes=catalogue.level_sizes, token_offsets=catalogue.token_offsets)
    config = EngineConfig(max_waiting=max(1, len(histories)))
    engine = Engine(decoder, config, items=items, bundle_version=bundle_version)
    by_user = {history.user_id: history for history in histories}
    for history in histories:
        prompt_ids = prompt_tokens(
            catalogue, catalogue.indices(history.item_ids), prompt["max_items"], prompt["stride"]
        )
        allowed = catalogue.allowed(Filters(), history.item_ids)
        engine.add_rank(history.user_id, prompt_ids, k=options.list_len, allowed=allowed)
    rows = []
    for row in _ranked(engine, catalogue, by_user, bundle_version):
        rows.append(row)
        progress(len(rows), len(histories), row.user_id)
    save_rows(rows, out)


def save_rows(rows: Sequence[PrecomputedRow], out: Path) -> None:
    """Write the table of lists."""
    columns = {
        "user_id": [row.user_id for row in rows],
        "item_ids": [list(row.item_ids) for row in rows],
        "scores": [list(row.scores) for row in rows],
        "bundle_version": [row.bundle_version for row in rows],
        "watermark_ms": [row.watermark_ms for row in rows],
    }
    pl.DataFrame(columns).write_parquet(out / _TABLE)


def read_rows(folder: Path) -> list[PrecomputedRow]:
    """Read the table of lists."""
    return [
        PrecomputedRow(
            user_id=row["user_id"],
            item_ids=tuple(row["item_ids"]),
            scores=tuple(row["scores"]),
            bundle_version=row["bundle_version"],
            watermark_ms=row["watermark_ms"],
        )
        for row in pl.read_parquet(folder / _TABLE).iter_rows(named=True)
    ]


def _ranked(
    engine: Engine, catalogue: Catalogue, by_user: Mapping[str, UserHistory], bundle_version: str
) -> Iterator[PrecomputedRow]:
    while engine.has_work:
        for outcome in engine.step(0.0):
            yield PrecomputedRow(
                user_id=outcome.request_id,
                item_ids=tuple(catalogue.item_ids[index] for index in outcome.item_indices.tolist()),
                scores=tuple(outcome.scores.tolist()),
                bundle_version=bundle_version,
                watermark_ms=by_user[outcome.request_id].newest_event_time_ms,
            )
