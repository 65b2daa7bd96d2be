"""Stage 3: assigns codes to items, and reads each row's history from the feature store as of the row's time.

    catalogue.parquet   every item, also those without events (models.catalogue)
    examples.parquet    user_id, split, history (item indices, oldest first), target (item index, null for training),
                        weights (training weight of each item of a training row, 0 for excluded items; null: all 1),
                        counts (the weight of each item in popularity and similar items; null: all 1),
                        dislikes (of a training row, {item, place, weight}: the item to learn against, its position
                        in the history, its weight; null without dislikes),
                        idle_s (seconds from the user's previous event to the target, null in training rows),
                        label_us (time of the target in Unix microseconds, null in training rows)
    split.json          the kind of the split, the cuts of global-time, and whether users repeat items
                        (pipelines.scoring.repeats)
    item_texts.parquet  the text of each item, in the catalogue's order
    codes.json          the codes' depth and why, their balance, dead codes and collisions
    code_book.safetensors   where the depth is above 1 (pipelines.codes)

Codes of depth 1 are one token per item. Later stages read the depth from the catalogue. The argument `read_histories`
reads the histories.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from models.catalogue import Catalogue
from pipelines.codes.code_book import CODE_BOOK, describe
from pipelines.codes.embedding import save_texts, texts_of
from pipelines.codes.options import CodesOptions
from pipelines.codes.reuse import KeptCodes, new_codes
from pipelines.data.examples import (
    DISLIKES,
    REFIT,
    SPLIT,
    Cuts,
    Split,
    as_of_rows,
    global_cuts,
    read_cases,
    read_sequences,
    read_split,
    refit_rows,
)
from pipelines.data.options import SplitKind
from pipelines.foreign.tokens import SIDS, ItemCodeTable
from pipelines.scoring.repeats import describe_repeats, find_repeats
from services.errors import StageFailed

LEFT_OUT = "left_out.json"
MAX_WITHOUT_CODE = 0.05
"""Maximum fraction of events of items without a code."""
ReadHistories = Callable[[pl.DataFrame], pl.DataFrame]
"""Point-in-time join: (user_id, event_timestamp in UTC µs) -> the rows with `history_item_ids`, oldest first."""


def tokenize(
    ingested: Path,
    read_histories: ReadHistories,
    max_items: int,
    out: Path,
    codes: CodesOptions | None = None,
    kept: KeptCodes | None = None,
    split: SplitKind = SplitKind.LEAVE_ONE_OUT,
    given: ItemCodeTable | None = None,
) -> None:
    """Write catalogue and examples. The feature store keeps `max_items` items of a history; `kept` codes do not change.

    With `given` codes, items without a code are excluded.

    Raises StageFailed where the global time split leaves nothing to learn from, to validate or to test.
    """
    events, items = pl.read_parquet(ingested / "events.parquet"), pl.read_parquet(ingested / "items.parquet")
    dislikes = pl.read_parquet(ingested / "dislikes.parquet")
    if given is not None:
        events, items, dislikes, left = with_code(events, items, dislikes, given)
        if given.catalogue is not None:
            items = items_of(given.catalogue)
        (out / LEFT_OUT).write_text(json.dumps(left, indent=1))
    cuts = global_cuts(events) if split == SplitKind.GLOBAL_TIME else None
    rows = as_of_rows(events, max_items, cuts)
    about = {"kind": split} | ({name: when.isoformat() for name, when in asdict(cuts).items()} if cuts else {})
    _require_all_parts(rows, about)
    both = rows if cuts else pl.concat([rows, refit_rows(events, max_items)])
    as_of = both["event_timestamp"]
    is_label = both["target_item_id"].is_not_null()
    both = with_labels(to_indices(with_histories(both, read_histories), items), as_of, events)
    times = pl.DataFrame({"is_label": is_label, "at": as_of.dt.epoch("us") + 1})
    both = both.with_columns(times.select(label_us=pl.when("is_label").then("at")).to_series())
    examples, of_refit = (
        with_dislikes(both[part], as_of[part], events, dislikes, items, cuts)
        for part in (slice(rows.height), slice(rows.height, None))
    )
    texts = texts_of(items.sort("item_id"))
    save_texts(texts, out)
    catalogue = _coded(build_catalogue(items, examples), texts, examples, codes or CodesOptions(), kept, out, given)
    catalogue.save(out / "catalogue.parquet")
    examples.write_parquet(out / "examples.parquet")
    repeats = find_repeats(read_sequences(out), read_cases(out, Split.VALID), len(catalogue.item_ids))
    (out / SPLIT).write_text(json.dumps(about | repeats, indent=1))
    if cuts is None:
        _save_refit(catalogue, of_refit, texts, out)


def _save_refit(catalogue: Catalogue, examples: pl.DataFrame, texts: list[str], out: Path) -> None:
    """Write the folder for the stages that learn from all events, with links to the shared files."""
    folder = out / REFIT
    folder.mkdir(exist_ok=True)
    save_texts(texts, folder)
    replace(catalogue, popularity=num_events(examples, len(texts))).save(folder / "catalogue.parquet")
    examples.write_parquet(folder / "examples.parquet")
    for name in (SPLIT, CODE_BOOK, SIDS):
        if (out / name).exists():
            shutil.copyfile(out / name, folder / name)


def describe_split(tokenized: Path) -> list[str]:
    """Return a sentence on the periods of a global time split, and a sentence on seen items."""
    about = read_split(tokenized)
    if about["kind"] == SplitKind.LEAVE_ONE_OUT:
        return [describe_repeats(about)]
    first, second = about["valid_from"], about["test_from"]
    times = (
        f"split {about['kind']}: events before {first} are learned, labels before {second} validate, later ones test"
    )
    return [times, describe_repeats(about)]


def _require_all_parts(rows: pl.DataFrame, about: dict[str, str]) -> None:
    missing = [part.value for part in Split if part not in rows["split"]]
    if missing and about["kind"] == SplitKind.GLOBAL_TIME:
        raise StageFailed(
            "tokenize",
            f"--split: {SplitKind.GLOBAL_TIME} with the cuts {about['valid_from']} and {about['test_from']} leaves no "
            f"row for {' and '.join(missing)}; give events over a longer time, or --split {SplitKind.LEAVE_ONE_OUT}",
        )


def read_codes_report(tokenized: Path) -> dict[str, Any]:
    """Read codes.json."""
    report: dict[str, Any] = json.loads((tokenized / "codes.json").read_text())
    return report


def describe_codes(tokenized: Path) -> str:
    """Return a sentence: the depth of the codes and why, and from 2 on their dead codes and collisions."""
    report = read_codes_report(tokenized)
    chosen = f"codes have depth {report['depth']} ({report['reason']})"
    if report["depth"] == 1:
        return chosen
    dead = "+".join(str(level["dead"]) for level in report["levels"])
    fullest = ", ".join(f"{level['fullest_to_mean']:.1f}" for level in report["levels"])
    sizes = " x ".join(str(level["size"]) for level in report["levels"])
    apart = f"{report['collisions_before_last_level']} items differ only in the last level"
    return f"{chosen}: {sizes}, {dead} dead, the most used of each level {fullest} times the mean; {apart}"


def with_histories(rows: pl.DataFrame, read_histories: ReadHistories) -> pl.DataFrame:
    """Join each row with the history as of its time, empty for a user that the store does not have."""
    histories = read_histories(rows.select("user_id", "event_timestamp").unique(maintain_order=True))
    answer = histories.select("user_id", "event_timestamp", "history_item_ids")
    joined = rows.join(answer, on=["user_id", "event_timestamp"], how="left", maintain_order="left")
    return joined.with_columns(pl.col("history_item_ids").fill_null([]))


def to_indices(rows: pl.DataFrame, items: pl.DataFrame) -> pl.DataFrame:
    """Replace item ids by indices in the catalogue's order; items outside the catalogue are dropped from histories."""
    ordered = items["item_id"].sort()
    index = pl.int_range(len(ordered), dtype=pl.Int32, eager=True)
    return rows.select(
        "user_id",
        "split",
        history=pl.col("history_item_ids").list.eval(
            pl.element().replace_strict(ordered, index, default=None).drop_nulls()
        ),
        target=pl.col("target_item_id").replace_strict(ordered, index, default=None),
        idle_s="idle_s",
    )


def with_labels(examples: pl.DataFrame, as_of: pl.Series, events: pl.DataFrame) -> pl.DataFrame:
    """Add `weights` and `counts`.

    A history holds the newest of its user's events as of its row's time, so its figures are the last as many.
    """
    columns = {"weights": "weight", "counts": "count"}
    labels: dict[str, list[list[float] | None]] = {name: [None] * examples.height for name in columns}
    uneven = [name for name, of in columns.items() if not (events[of] == 1).all()]
    if uneven:
        of_user = {
            user_id: (
                own["event_time"].dt.epoch("us").to_numpy(),
                {name: own[columns[name]].to_list() for name in uneven},
            )
            for (user_id,), own in events.group_by("user_id", maintain_order=True)
        }
        rows = zip(
            examples["user_id"], examples["split"], examples["history"].list.len(), as_of.dt.epoch("us"), strict=True
        )
        for number, (user_id, split, num_items, time_us) in enumerate(rows):
            times_us, figures = of_user[user_id]
            end = int(np.searchsorted(times_us, time_us, side="right"))
            for name in uneven:
                own = figures[name][end - num_items : end]
                if split == Split.TRAIN and any(figure != 1 for figure in own):
                    labels[name][number] = own
    return examples.with_columns(
        **{name: pl.Series(values, dtype=pl.List(pl.Float32)) for name, values in labels.items()}
    )


def with_dislikes(
    examples: pl.DataFrame,
    as_of: pl.Series,
    events: pl.DataFrame,
    dislikes: pl.DataFrame,
    items: pl.DataFrame,
    cuts: Cuts | None = None,
) -> pl.DataFrame:
    """Add `dislikes` to the row with the user's previous event, so that no row learns from events after its label.

    A dislike is skipped if a later positive event of the training rows revokes it. Dislikes before all events of a user
    are in the first row.
    """
    if cuts is not None:
        dislikes = dislikes.filter(pl.col("event_time") < cuts.valid_from)
    train = examples.select("user_id", "split", as_of=as_of).filter(pl.col("split") == Split.TRAIN)
    learned_until = train.group_by("user_id").agg(pl.col("as_of").max())
    is_over = (pl.col("until") <= pl.col("as_of")).fill_null(value=False)
    ordered = items["item_id"].sort()
    index = dict(zip(ordered, range(len(ordered)), strict=True))
    own: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for user_id, item_id, time_us, weight in (
        dislikes.join(learned_until, on="user_id", maintain_order="left")
        .filter(~is_over)
        .select("user_id", "item_id", pl.col("event_time").dt.epoch("us"), "weight")
        .iter_rows()
    ):
        own[user_id].append((time_us, index[item_id], weight))
    of_them = events.filter(pl.col("user_id").is_in([*own])).group_by("user_id", maintain_order=True)
    times_of = {user_id: rows["event_time"].dt.epoch("us").to_numpy() for (user_id,), rows in of_them}
    dislikes_of_rows: list[list[dict[str, float]] | None] = [None] * examples.height
    rows = zip(
        examples["user_id"], examples["split"], examples["history"].list.len(), as_of.dt.epoch("us"), strict=True
    )
    for number, (user_id, split, num_items, as_of_us) in enumerate(rows):
        if split == Split.TRAIN and user_id in own:
            end = int(np.searchsorted(times_of[user_id], as_of_us, side="right"))
            start = end - num_items
            dislikes_of_rows[number] = [
                {"item": item, "place": position - start, "weight": weight}
                for time_us, item, weight in own[user_id]
                if start < (position := int(np.searchsorted(times_of[user_id], time_us))) <= end
                or position == start == 0
            ] or None
    return examples.with_columns(dislikes=pl.Series(dislikes_of_rows, dtype=DISLIKES))


def build_catalogue(items: pl.DataFrame, examples: pl.DataFrame) -> Catalogue:
    """Return the catalogue: one token per item, in item-id order, with its count of training events."""
    ordered = items.sort("item_id")
    return Catalogue(
        item_ids=tuple(ordered["item_id"]),
        titles=tuple(ordered["title"]),
        categories=tuple(tuple(names) for names in ordered["categories"].to_list()),
        codes=np.arange(ordered.height, dtype=np.int32).reshape(-1, 1),
        level_sizes=(ordered.height,),
        popularity=num_events(examples, ordered.height),
    )


def num_events(examples: pl.DataFrame, num_items: int) -> np.ndarray:
    """Return each item's weighted number of training events (num_items,)."""
    rows = examples.filter((pl.col("split") == Split.TRAIN) & (pl.col("history").list.len() > 0))
    trained = rows["history"].explode().to_numpy()
    if not rows["counts"].is_not_null().any():
        return np.bincount(trained, minlength=num_items).astype(np.float64)
    counts = rows.select(pl.coalesce("counts", pl.lit(1.0).repeat_by(pl.col("history").list.len())))
    return np.bincount(trained, counts.to_series().explode().to_numpy(), minlength=num_items)


def _coded(
    catalogue: Catalogue,
    texts: list[str],
    examples: pl.DataFrame,
    options: CodesOptions,
    kept: KeptCodes | None,
    out: Path,
    given: ItemCodeTable | None = None,
) -> Catalogue:
    """Return the catalogue with codes of the chosen depth, and write how good they are."""
    if given is not None:
        return _with_given(catalogue, given, out)
    num_items = len(catalogue.item_ids)
    depth = options.depth_for(num_items)
    report: dict[str, Any] = {"depth": depth, "reason": options.reason_for(num_items)}
    if depth > 1:
        trained = examples.filter(pl.col("split") == Split.TRAIN)["history"].to_list()
        sequences = [np.array(history, dtype=np.int64) for history in trained]
        book, codes = new_codes(catalogue.item_ids, texts, sequences, depth, options, kept)
        book.save(out / CODE_BOOK)
        catalogue = replace(catalogue, codes=codes, level_sizes=book.level_sizes)
        report |= describe(codes, book.level_sizes)
    (out / "codes.json").write_text(json.dumps(report, indent=1))
    return catalogue


def with_code(
    events: pl.DataFrame, items: pl.DataFrame, dislikes: pl.DataFrame, given: ItemCodeTable
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame, dict[str, int | float]]:
    """Return the rows of items with a code, and counts of the excluded items.

    Raises StageFailed if excluded items have more than 5 % of the events.
    """
    has_code = pl.col("item_id").is_in(list(given.item_ids))
    kept = events.filter(has_code)
    share = 1 - kept.height / max(1, events.height)
    left = {
        "items_without_code": items.filter(~has_code).height,
        "events_without_code": share,
        "codes_without_item": len(set(given.item_ids) - set(items["item_id"])),
    }
    if share > MAX_WITHOUT_CODE:
        named = ", ".join(items.filter(~has_code)["item_id"].sort().head(3))
        raise StageFailed(
            "tokenize",
            f"{left['items_without_code']} of {items.height} items have no code in the index, such as {named}, with "
            f"{share:.1%} of the events, above {MAX_WITHOUT_CODE:.0%}; give an index with the item ids of these tables",
        )
    return kept, items.filter(has_code), dislikes.filter(has_code), left


def items_of(catalogue: Catalogue) -> pl.DataFrame:
    """Return the items of a bundle's catalogue as the stage `ingest` writes them; no text of theirs is known."""
    columns = {"item_id": catalogue.item_ids, "title": catalogue.titles, "categories": catalogue.categories}
    return pl.DataFrame(
        {
            name: [list(value) if isinstance(value, tuple) else value for value in rows]
            for name, rows in columns.items()
        },
        schema_overrides={"categories": pl.List(pl.String)},
    ).with_columns(text=pl.lit(None, pl.String))


def describe_left_out(tokenized: Path) -> list[str]:
    """Return a sentence on items without a code and codes without an item, if the codes were given."""
    path = tokenized / LEFT_OUT
    if not path.exists():
        return []
    left = json.loads(path.read_text())
    return [
        (
            f"{left['items_without_code']} items without a code are excluded "
            f"({left['events_without_code']:.1%} of events); "
            f"{left['codes_without_item']} codes without an item stay out of the catalogue"
        )
    ]


def _with_given(catalogue: Catalogue, given: ItemCodeTable, out: Path) -> Catalogue:
    """Return the catalogue with given codes, and write how good they are."""
    codes = given.codes[given.of(catalogue.item_ids)]
    report = {"depth": codes.shape[1], "reason": "as given"} | describe(codes, given.level_sizes)
    (out / "codes.json").write_text(json.dumps(report, indent=1))
    if given.level_names:
        (out / SIDS).write_text(json.dumps(given.level_names))
    return replace(catalogue, codes=codes, level_sizes=given.level_sizes, first_tokens=given.first_tokens)
