"""The joined table as sums by day, variant and user: all inputs of a report, with one day in memory at a time.

Lists are the unit of exposure; users (for a visitor: the session, else the request) are the unit of randomisation.
Novelty is the mean self-information of a list's items in bits, -log2 of the fraction of all lists that show the item
(Zhou et al., PNAS 107, 2010). Values and latencies are clipped at the quantile `CUT` of the positive ones, over all
variants; otherwise one purchase or one stalled call would decide a mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from pipelines.experiments.join import unit
from pipelines.experiments.user_sums import UserSums
from services.errors import DataError, InvalidRequest

CUT = 0.999
METRICS = {
    "clicks": ("clicks", "lists"),
    "value": ("value", "lists"),
    "latency_ms": ("latency_ms", "timed"),
    "novelty_bits": ("novelty", "lists"),
}
"""By metric: the sum of its totals, and the sum of its exposure."""
_SUMS = ("lists", "clicks", "value", "latency_ms", "timed", "novelty")
_LIST = ["request_id", "user_id", "shown_time_ms"]
_CONSEQUENCES = frozenset(
    {
        "variant",
        "tier",
        "reason",
        "elapsed_ms",
        "position",
        "item_id",
        "score",
        "propensity",
        "clicks",
        "value",
        "clicked_time_ms",
    }
)
"""The variant column and its consequences: in such a segment, the variants' users are not comparable."""
_OF_LISTS = frozenset({*_LIST, "session"})


@dataclass(frozen=True, slots=True)
class Lists:
    """Sums of all days.

    Args:
        days: In order, as YYYY-MM-DD.
        users: Rows (day, variant, user, each segment, sums); `day` is an index into `days`, `user` a number.
        tiers: Rows (variant, tier, lists).
        cuts: Clipping points of values and latencies.
        num_outside: Number of lists without a variant.
    """

    days: Sequence[str]
    users: pl.DataFrame
    tiers: pl.DataFrame
    cuts: dict[str, float | None]
    num_outside: int

    @property
    def variants(self) -> list[str]:
        return sorted(self.users["variant"].unique().to_list())


def read_lists(
    table: Path, *, by: str = "variant", experiment: str | None = None, segments: Sequence[str] = ()
) -> Lists:
    """Read a joined table.

    Args:
        table: The folder that `join` writes, or one file of it.
        by: The column that names the compared variants: `variant`, or for example `bundle_version`.
        experiment: The experiment to read if `by` is `variant`; None: the whole column.
        segments: Columns that divide users into separately reported segments.

    Raises:
        DataError: A file or a column is missing, or no list is in a variant.
        InvalidRequest: A segment is a consequence of the variant.
    """
    files = sorted(table.glob("*.parquet")) if table.is_dir() else [table]
    if not files or not files[0].is_file():
        raise DataError("", f"{table} has no Parquet file", "the folder that `tailrace experiment join` wrote")
    there = pl.scan_parquet(files[0]).collect_schema().names()
    for name in (by, *segments):
        if name in _CONSEQUENCES - {by} or name in _OF_LISTS:
            raise InvalidRequest(
                name,
                "is the variant, a consequence of it, or not a property of users",
                "choose a column that is known before, such as surface",
            )
        if name not in there:
            raise DataError(name, f"{table} lacks it", f"one of {', '.join(there)}")
    whole = pl.scan_parquet(files)
    num_lists, shown = sum(map(_num_lists, files)), _times_shown(files)
    cuts = {name: _cut(whole, name) for name in ("value", "elapsed_ms")}
    parts, tiers, outside = [], [], 0
    for day, file in enumerate(files):
        lists = _lists_of(file, by, experiment, segments, shown, num_lists, cuts)
        outside += lists["variant"].null_count()
        lists = lists.drop_nulls("variant")
        keys = ["variant", "user", *segments]
        parts.append(lists.group_by(keys).agg(pl.col(_SUMS).sum()).with_columns(day=pl.lit(day)))
        tiers.append(lists.group_by("variant", "tier").agg(pl.col("lists").sum()))
    users = pl.concat(parts)
    if users.is_empty():
        raise DataError(
            by,
            f"no list of {table} is in a variant{f' of {experiment}' if experiment else ''}",
            "fresh, or fresher=fresh",
        )
    users = users.with_columns(user=pl.col("user").rank("dense").cast(pl.Int64) - 1)
    mix = pl.concat(tiers).group_by("variant", "tier").agg(pl.col("lists").sum()).sort("variant", "tier")
    return Lists([file.stem for file in files], users, mix, cuts, outside)


def _cut(table: pl.LazyFrame, name: str) -> float | None:
    """Return the value at which a column is clipped; None without clipping."""
    column = pl.col(name)
    cut, most = table.filter(column > 0).select(at=column.quantile(CUT), most=column.max()).collect().row(0)
    return None if cut == most else float(cut)


def _num_lists(file: Path) -> int:
    return int(pl.scan_parquet(file).select(_LIST).unique().select(pl.len()).collect().item())


def _times_shown(files: Sequence[Path]) -> pl.DataFrame:
    """Return (item_id, times) over all days."""
    counts = [pl.scan_parquet(file).group_by("item_id").agg(times=pl.len()).collect() for file in files]
    return pl.concat(counts).group_by("item_id").agg(pl.col("times").sum())


def _lists_of(
    file: Path,
    by: str,
    experiment: str | None,
    segments: Sequence[str],
    shown: pl.DataFrame,
    num_lists: int,
    cuts: dict[str, float | None],
) -> pl.DataFrame:
    """Return a row for each list of a day: variant (null: none), user (a hash), tier, segments and its sums."""
    variant = pl.col(by).cast(pl.String)
    if experiment is not None:
        variant = ("," + variant).str.extract(f",{_escaped(experiment)}=([^,]*)")
    value, elapsed = (
        pl.col(name).clip(upper_bound=math.inf if cuts[name] is None else cuts[name])
        for name in ("value", "elapsed_ms")
    )
    items = pl.read_parquet(file).join(shown, on="item_id", how="left")
    information = -(pl.col("times") / num_lists).clip(upper_bound=1.0).log(2)
    first = [pl.col(name).first() for name in segments if name != by]
    return (
        items.with_columns(variant=variant, information=information)
        .group_by(_LIST)
        .agg(
            pl.col("variant").first(),
            pl.col("tier").first(),
            pl.col("session").first(),
            *first,
            lists=pl.lit(1, pl.Int64),
            clicks=pl.col("clicks").sum(),
            value=value.sum(),
            latency_ms=elapsed.first().fill_null(0.0),
            timed=pl.col("elapsed_ms").first().is_not_null().cast(pl.Int64),
            novelty=pl.col("information").mean(),
        )
        .with_columns(user=unit().hash(seed=0))
    )


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def sums_by_day(lists: Lists, metric: str, users: pl.DataFrame | None = None) -> list[dict[str, UserSums]]:
    """Return each variant's cumulative sums by day, for the rows `users` of `lists.users` or for all.

    Users without exposure are skipped.
    """
    rows, names = lists.users if users is None else users, METRICS[metric]
    sums: list[dict[str, UserSums]] = [{} for _ in lists.days]
    for (variant,), part in rows.group_by("variant"):
        places, user = np.unique(part["user"].to_numpy(), return_inverse=True)
        totals, exposures = (np.zeros((len(lists.days), len(places))) for _ in names)
        for grown, name in ((totals, names[0]), (exposures, names[1])):
            np.add.at(grown, (part["day"].to_numpy(), user), part[name].to_numpy().astype(float))
            np.cumsum(grown, axis=0, out=grown)
        for day, (total, exposure) in enumerate(zip(totals, exposures, strict=True)):
            sums[day][str(variant)] = UserSums.of(total[exposure > 0], exposure[exposure > 0])
    return sums
