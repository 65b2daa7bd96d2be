"""Counts of one release stage: sums by user of each version.

Impressions and clicks may be late, repeated or unordered. The release's hash assigns users to versions independently of
the answering version, so neither version chooses its users. Requests without a list count too. Impressions of visitors,
whose returns are unknown, and of other versions are excluded. An impression may draw clicks for half an hour: its row
is kept that long, afterwards only its user's sums. If rows or users become too many, a random half of one version's
users, by a separate hash, is excluded.

Variety is the fraction of a list that is absent from the previous list of the same version to another user: the
inter-list distance of Zhou et al. (PNAS 107, 2010). Knows no topic, store or clock.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from models.registry.canary import Canary
from models.registry.name_record import DEFAULT_NAME
from pipelines.experiments.join import IMPRESSION, SKEW_MS, WINDOW_MS, earliest, exploded, followed
from pipelines.experiments.user_sums import UserSums
from pipelines.experiments.verdict import Affected, Counts, Means
from services.contracts.events import Impression, Interaction
from services.contracts.experiments import place_of
from services.contracts.recommend import Reason, Tier
from services.errors import ErrorKind

FAILURES = frozenset({Reason.STUDENT_FAILED, Reason.LLM_FAILED, Reason.LLM_UNAVAILABLE, Reason.BUNDLE_MISMATCH})
"""Reasons that mark a failed answer; other reasons are load, remaining time, or the kind of user."""
TIMED_TIERS = (Tier.LLM, Tier.STUDENT, Tier.PRECOMPUTED)
GRACE_MS = 120_000
"""How long after its window an impression or a click may still arrive."""
MAX_ROWS = 150_000
"""Maximum number of impressions, and of clicks, that are kept: about 3,000 bytes each during the join."""
MAX_USERS = 1_000_000
"""Maximum users of both versions whose sums are kept, at about 200 bytes each."""
FAULTS = frozenset({ErrorKind.INTERNAL, ErrorKind.UNAVAILABLE, ErrorKind.LATE, "gone"})
"""Error codes of requests without a list that are our failures, or that the caller did not wait for; other codes are
refusals."""
_CLICK_TYPE = "click"
_LONGEST_MS = 5_000.0
_SUMS = (
    *("requests", "lists", "new", "stray", "late", "failed", "refused", "missing", "popular"),
    *("timed", "latency", "varied", "variety", "clicks"),
)
_BY_TIER = tuple(f"{what}:{tier}" for tier in TIMED_TIERS for what in ("timed", "latency"))
_ROW: dict[str, Any] = {
    "request_id": pl.UInt64,
    "user_id": pl.UInt64,
    "shown_time_ms": pl.Int64,
    "is_candidate": pl.Boolean,
    "is_new": pl.Boolean,
    "failure": pl.String,
    "is_stray": pl.Boolean,
    "is_late": pl.Boolean,
    "is_failed": pl.Boolean,
    "tier": pl.String,
    "latency_ms": pl.Float64,
    "item_id": pl.List(pl.UInt64),
}
_CLICK = {
    "event_id": pl.UInt64,
    "user_id": pl.UInt64,
    "item_id": pl.UInt64,
    "event_time_ms": pl.Int64,
    "value": pl.Float64,
    "request_id": pl.UInt64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResults:
    """The counts so far, and measures of their trustworthiness.

    Args:
        counts: By guard.
        share: The candidate's traffic fraction among the counted users.
        num_users: Of candidate and control.
        num_lists: Of candidate and control.
        stray_share: Fraction of the lists to the candidate's users that the candidate did not make.
        num_new: Users of both who arrived and did not have the candidate in an earlier stage, so that it cannot have
            driven them away.
        new_share: The candidate's fraction of these users.
        num_halvings: How often users were excluded to bound memory.
    """

    counts: Counts
    share: float
    num_users: tuple[int, int]
    num_lists: tuple[int, int]
    stray_share: float
    num_new: tuple[int, int] = (0, 0)
    new_share: float = 0.5
    num_halvings: int = 0


@dataclass(slots=True)
class StageCounts:
    """Counts one stage of a canary and the live version, under one name.

    `max_rows`, `max_users`: see `MAX_ROWS`, `MAX_USERS`.
    """

    name: str
    canary: Canary
    live: str
    window_ms: int = WINDOW_MS
    grace_ms: int = GRACE_MS
    max_rows: int = MAX_ROWS
    max_users: int = MAX_USERS
    num_late: int = 0
    """Impressions that arrived after their window was closed, and are not counted."""
    _kept: dict[bool, float] = field(default_factory=lambda: {True: 1.0, False: 1.0})
    _new_rows: list[tuple[Any, ...]] = field(default_factory=list)
    _new_clicks: list[tuple[Any, ...]] = field(default_factory=list)
    _rows: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_ROW))
    _clicks: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_CLICK))
    _closed: pl.DataFrame | None = None
    _closed_ms: int = 0

    @property
    def _share(self) -> float:
        return self.canary.stages[self.canary.stage].share

    @property
    def _share_before(self) -> float:
        return self.canary.stages[self.canary.stage - 1].share if self.canary.stage else 0.0

    def add(self, impressions: Iterable[Impression], interactions: Iterable[Interaction]) -> None:
        """Add records; repeated records do no harm."""
        self._new_rows += [row for impression in impressions if (row := self._row(impression)) is not None]
        self._new_clicks += [
            (
                _number(interaction.event_id),
                user,
                _number(interaction.item_id),
                interaction.event_time_ms,
                float(interaction.value),
                None if interaction.request_id is None else _number(interaction.request_id),
            )
            for interaction in interactions
            if interaction.event_type == _CLICK_TYPE
            and interaction.event_time_ms >= max(self.canary.since_ms, self._closed_ms) - SKEW_MS
            and self._keeps(user := _number(interaction.user_id), self._is_candidate(interaction.user_id))
        ]
        if max(len(self._new_rows), len(self._new_clicks)) > self.max_rows // 8:
            self._take_in()

    def look(self, now_ms: int) -> StageResults:
        """Return the counts, complete up to this time (Unix ms). Impressions older than window and grace are closed."""
        self._take_in()
        sums = self._sums()
        by_user = _by_user(
            sums if self._closed is None else pl.concat([self._closed, sums.select(self._closed.columns)])
        )
        until_ms = now_ms - self.window_ms - self.grace_ms
        if until_ms > self._closed_ms:
            self._close(sums, until_ms)
        while by_user.height > self.max_users:
            candidates = int(by_user["is_candidate"].sum())
            self._halve(candidates > by_user.height - candidates)
            by_user = self._of_kept(by_user)
        return self._seen(by_user)

    def _row(self, impression: Impression) -> tuple[Any, ...] | None:
        if (
            impression.user_id is None
            or (impression.name or DEFAULT_NAME) != self.name
            or impression.shown_time_ms < self.canary.since_ms
        ):
            return None
        if impression.bundle_version not in (self.canary.version, self.live):
            return None
        if impression.shown_time_ms < self._closed_ms:
            self.num_late += 1
            return None
        point = place_of(self.canary.salt, impression.user_id)
        user, is_candidate = _number(impression.user_id), point < self._share
        if not self._keeps(user, is_candidate):
            return None
        limit_ms = impression.deadline_ms or _LONGEST_MS
        return (
            _number(impression.request_id),
            user,
            impression.shown_time_ms,
            is_candidate,
            point >= self._share_before,
            impression.failure,
            impression.failure is None and (impression.bundle_version == self.canary.version) is not is_candidate,
            impression.elapsed_ms is not None and impression.elapsed_ms > limit_ms,
            impression.reason in FAILURES or impression.failure in FAULTS,
            impression.tier,
            None if impression.elapsed_ms is None else min(impression.elapsed_ms, limit_ms),
            [_number(item) for item in dict.fromkeys(impression.item_ids)],
        )

    def _is_candidate(self, user_id: str) -> bool:
        return place_of(self.canary.salt, user_id) < self._share

    def _keeps(self, user: int, is_candidate: bool) -> bool:
        return user < self._kept[is_candidate] * 2.0**64

    def _take_in(self) -> None:
        """Add new rows to the kept rows, each impression and event once.

        Exclude users until the number is within bounds.
        """
        rows = pl.concat([self._rows, pl.DataFrame(self._new_rows, schema=_ROW, orient="row")])
        clicks = pl.concat([self._clicks, pl.DataFrame(self._new_clicks, schema=_CLICK, orient="row")])
        self._new_rows, self._new_clicks = [], []
        self._rows = rows.unique(IMPRESSION, keep="first", maintain_order=True).sort("shown_time_ms", "request_id")
        self._clicks = earliest(clicks)
        while self._rows.height > self.max_rows or self._clicks.height > self.max_rows:
            candidates = int(self._rows["is_candidate"].sum())
            self._halve(candidates > self._rows.height - candidates)

    def _halve(self, is_candidate: bool) -> None:
        """Exclude half of one version's users from all kept data."""
        self._kept[is_candidate] /= 2
        self._rows = self._of_kept(self._rows)
        self._clicks = self._clicks.filter(pl.col("user_id") < max(self._kept.values()) * 2.0**64)
        if self._closed is not None:
            self._closed = self._of_kept(self._closed)

    def _of_kept(self, table: pl.DataFrame) -> pl.DataFrame:
        bound = pl.when("is_candidate").then(self._kept[True] * 2.0**64).otherwise(self._kept[False] * 2.0**64)
        return table.filter(pl.col("user_id") < bound)

    def _sums(self) -> pl.DataFrame:
        """Return a row of sums for each open impression, with its clicks so far."""
        items = exploded(
            self._rows.filter(pl.col("item_id").list.len() > 0).select(*IMPRESSION, "item_id"), ["item_id"]
        )
        clicks = followed(items, self._clicks, self.window_ms)
        clicked = clicks.group_by(IMPRESSION).agg(clicks=pl.len().cast(pl.Float64))
        is_answered = pl.col("failure").is_null()
        before, user_before = (
            pl.when(is_answered).then(pl.col(name)).forward_fill().shift(1).over("is_candidate")
            for name in ("item_id", "user_id")
        )
        of_another = (user_before != pl.col("user_id")) & is_answered
        new = pl.col("item_id").list.set_difference(before).list.len() / pl.col("item_id").list.len().clip(1)
        is_timed, latency = pl.col("latency_ms").is_not_null(), pl.col("latency_ms").fill_null(0.0)
        is_tier = {tier: pl.col("tier") == tier.value for tier in TIMED_TIERS}
        return (
            self._rows.join(clicked, on=IMPRESSION, how="left", maintain_order="left")
            .with_columns(
                requests=pl.lit(1.0),
                lists=is_answered.cast(pl.Float64),
                new=pl.col("is_new").cast(pl.Float64),
                refused=(pl.col("failure").is_not_null() & ~pl.col("is_failed")).cast(pl.Float64),
                missing=(is_answered & (pl.col("item_id").list.len() == 0)).cast(pl.Float64),
                stray=pl.col("is_stray").cast(pl.Float64),
                late=pl.col("is_late").cast(pl.Float64),
                failed=pl.col("is_failed").cast(pl.Float64),
                popular=(pl.col("tier") == Tier.POPULAR.value).cast(pl.Float64),
                timed=is_timed.cast(pl.Float64),
                latency=latency,
                varied=of_another.fill_null(value=False).cast(pl.Float64),
                variety=pl.when(of_another.fill_null(value=False)).then(new).otherwise(0.0).fill_null(0.0),
                clicks=pl.col("clicks").fill_null(0.0),
                **{f"timed:{tier}": (is_timed & there).cast(pl.Float64) for tier, there in is_tier.items()},
                **{f"latency:{tier}": pl.when(there).then(latency).otherwise(0.0) for tier, there in is_tier.items()},
            )
            .select("user_id", "is_candidate", *_SUMS, *_BY_TIER)
        )

    def _close(self, sums: pl.DataFrame, until_ms: int) -> None:
        """Close impressions before that time: keep only their users' sums.

        `sums` has a row for each open impression.
        """
        is_old = self._rows["shown_time_ms"] < until_ms
        old = sums.filter(is_old)
        self._closed = _by_user(
            old if self._closed is None else pl.concat([self._closed, old.select(self._closed.columns)])
        )
        self._rows = self._rows.filter(~is_old)
        self._clicks = self._clicks.filter(pl.col("event_time_ms") >= until_ms - SKEW_MS)
        self._closed_ms = until_ms

    def _seen(self, by_user: pl.DataFrame) -> StageResults:
        candidate, control = (by_user.filter(pl.col("is_candidate") == of) for of in (True, False))
        pairs = {"latency": ("latency", "timed"), "variety": ("variety", "varied"), "clicks": ("clicks", "lists")}
        pairs |= {f"latency:{tier}": (f"latency:{tier}", f"timed:{tier}") for tier in TIMED_TIERS}
        means = {name: Means(*(_user_sums(of, *pair) for of in (candidate, control))) for name, pair in pairs.items()}
        affected = {
            guard: Affected(
                _num_hit(candidate, column),
                _num_hit(control, column),
                Means(*(_user_sums(of, column, exposure) for of in (candidate, control))),
            )
            for guard, column, exposure in (
                ("errors", "failed", "requests"),
                ("refusals", "refused", "requests"),
                ("missing", "missing", "lists"),
                ("deadline_misses", "late", "lists"),
                ("popular", "popular", "lists"),
            )
        }
        shares = self._kept[True] * self._share, self._kept[False] * (1 - self._share)
        new_shares = self._kept[True] * (self._share - self._share_before), shares[1]
        lists = tuple(int(of["lists"].sum()) for of in (candidate, control))
        return StageResults(
            counts={**means, **affected},
            share=shares[0] / sum(shares),
            num_users=(candidate.height, control.height),
            num_lists=(lists[0], lists[1]),
            stray_share=float(candidate["stray"].sum()) / max(1, lists[0]),
            num_new=(_num_hit(candidate, "new"), _num_hit(control, "new")),
            new_share=new_shares[0] / sum(new_shares),
            num_halvings=-round(math.log2(self._kept[True] * self._kept[False])),
        )


def _by_user(table: pl.DataFrame) -> pl.DataFrame:
    return table.group_by("user_id", "is_candidate").agg(pl.col(*_SUMS, *_BY_TIER).sum())


def _num_hit(users: pl.DataFrame, column: str) -> int:
    """Return the number of users affected at least once."""
    return int((users[column] > 0).sum())


def _user_sums(users: pl.DataFrame, total: str, exposure: str) -> UserSums:
    there = users.filter(pl.col(exposure) > 0)
    return UserSums.of(*(np.asarray(there[column].to_numpy(), dtype=np.float64) for column in (total, exposure)))


def _number(text: str) -> int:
    """Return a 64-bit hash of an ID, uniformly distributed, which is kept instead of the ID."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
