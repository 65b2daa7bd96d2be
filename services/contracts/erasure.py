"""The erasure of a user: the event in the log of interactions, and the receipt with the progress by store.

The event's key is the user id, so it is in order with the user's own events: earlier events are removed from every
store, later events begin a new history. A receipt names no user. Knows no store.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from services.contracts.events import Interaction, check_written_time, interaction_from, parse_value, refuse_unknown
from services.contracts.recommend import check_id
from services.errors import InvalidRequest

_DAY_MS = 86_400_000
_FIELDS = frozenset({"erasure_id", "user_id", "accepted_time_ms"})


class ErasureStore(StrEnum):
    """A store from which an erasure removes a user. Its value is the name in receipts."""

    FEATURES = "features"
    LISTS = "lists"
    SHOWN = "shown"
    EXPLANATIONS = "explanations"
    INTERACTIONS = "interactions"
    IMPRESSIONS = "impressions"
    BASE_HISTORIES = "base_histories"
    OFFLINE_FEATURES = "offline_features"
    STAGE_CACHE = "stage_cache"
    STORE_FILES = "store_files"


ONLINE_STORES = (ErasureStore.FEATURES, ErasureStore.LISTS, ErasureStore.SHOWN, ErasureStore.EXPLANATIONS)
"""What requests read."""
STORE_MEANINGS: Mapping[ErasureStore, str] = {
    ErasureStore.FEATURES: "history and dislikes in Redis",
    ErasureStore.LISTS: "stored lists of every bundle",
    ErasureStore.SHOWN: "memory of what was shown",
    ErasureStore.EXPLANATIONS: "explanations of the user's requests until then",
    ErasureStore.INTERACTIONS: "offline log of events, merged files and their parts too",
    ErasureStore.IMPRESSIONS: "offline log of impressions",
    ErasureStore.BASE_HISTORIES: "the histories from which a lost store is rebuilt",
    ErasureStore.OFFLINE_FEATURES: "the point-in-time table of histories",
    ErasureStore.STAGE_CACHE: "outputs of the pipeline's stages with the user's rows; waits while a run uses them",
    ErasureStore.STORE_FILES: "Redis' append-only file, where Redis lets itself be asked to rewrite it",
}


@dataclass(frozen=True, slots=True)
class Remaining:
    """Data that an erasure does not remove, why, and until when: Unix ms, or None if only `until` describes it."""

    what: str
    until: str
    until_unix_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """The event.

    `accepted_time_ms` (Unix ms) is when a door accepted it; impressions and answers up to then are removed too.
    """

    erasure_id: str
    user_id: str
    accepted_time_ms: int

    def __post_init__(self) -> None:
        """Check the fields. Raises InvalidRequest naming the field."""
        check_id("erasure_id", self.erasure_id)
        check_id("user_id", self.user_id)

    def encode(self) -> bytes:
        """Return the record's value: compact JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def key(self) -> bytes:
        """The record's key: the user id."""
        return self.user_id.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureReceipt:
    """The receipt of an erasure: when each store was done, in Unix ms (None: not yet), and what remains until when."""

    erasure_id: str
    accepted_time_ms: int
    stores: Mapping[ErasureStore, int | None]
    remaining: tuple[Remaining, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether every store is done."""
        return all(done is not None for done in self.stores.values())

    @property
    def is_done_online(self) -> bool:
        """Whether no request reads data from before the erasure any more."""
        return all(self.stores[store] is not None for store in ONLINE_STORES)


def remaining_after(accepted_ms: int, events_keep_ms: int, dead_letters_keep_ms: int) -> tuple[Remaining, ...]:
    """Return the data that remains after an erasure accepted then (Unix ms), given the broker's retention."""
    return (
        Remaining("records in the broker's topics", "the topics' retention", accepted_ms + events_keep_ms),
        Remaining("unreadable records in the dead-letter topic", "its retention", accepted_ms + dead_letters_keep_ms),
        Remaining("weights that learned from the events; they hold no id", "a bundle trained after this is live"),
        Remaining(
            "cached keys and values of prompts, by items and without a user", "they are displaced, or the next bundle"
        ),
        Remaining("counts of popularity, without a user", "their longest window", accepted_ms + 7 * _DAY_MS),
        Remaining("Redis' own files, where Redis lets nobody ask for a rewrite", "Redis writes them again"),
        Remaining(
            "tables that `tailrace experiment join` wrote, with user ids", "their days are joined again or removed"
        ),
        Remaining("a salted digest of the id, by which tables that hold the user are read without them", "for good"),
        Remaining("tables given to the pipeline, and the operator's own copies and backups", "the operator's care"),
    )


def decode_record(value: bytes | None) -> Interaction | Erasure:
    """Read a record's value. Raises InvalidRequest with the field that is wrong."""
    fields = parse_value(value)
    return _erasure_from(fields) if "erasure_id" in fields else interaction_from(fields)


def _erasure_from(fields: Mapping[str, Any]) -> Erasure:
    refuse_unknown(fields, _FIELDS)
    for name in ("erasure_id", "user_id"):
        if not isinstance(fields.get(name), str):
            raise InvalidRequest(name, "not a string", "send a string")
    accepted = fields.get("accepted_time_ms")
    if not isinstance(accepted, int) or isinstance(accepted, bool):
        raise InvalidRequest("accepted_time_ms", "not an integer", "send Unix milliseconds")
    check_written_time("accepted_time_ms", accepted)
    return Erasure(**fields)
