"""The erasure of a user: the event in the log of interactions, and the receipt with the progress by store.

The event's key is the user id, so it is in order with the user's own events: earlier events are removed from every
store, later events begin a new history. A receipt names no user. Knows no store.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from services.contracts.events import Interaction, check_written_time, decode_interaction
from services.contracts.message import Answer, Id, Message, convert, decode_object, encode
from services.contracts.tenant import StoredId, check_stored_id, prefix_of, tenant_of

_DAY_MS = 86_400_000


class ErasureStore(StrEnum):
    """A store that an erasure removes a user from. Its value is the name in receipts."""

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
"""The stores that requests read."""
STORE_MEANINGS: Mapping[ErasureStore, str] = {
    ErasureStore.FEATURES: "history and dislikes in Redis",
    ErasureStore.LISTS: "stored lists of every bundle",
    ErasureStore.SHOWN: "memory of impressions",
    ErasureStore.EXPLANATIONS: "explanations of the user's requests until then",
    ErasureStore.INTERACTIONS: "offline log of events, merged files and their parts too",
    ErasureStore.IMPRESSIONS: "offline log of impressions",
    ErasureStore.BASE_HISTORIES: "the histories that rebuild a lost store",
    ErasureStore.OFFLINE_FEATURES: "the point-in-time table of histories",
    ErasureStore.STAGE_CACHE: "outputs of the pipeline's stages with the user, and copies that killed imports left; "
    "waits while a run uses them",
    ErasureStore.STORE_FILES: "Redis' append-only file; waits while Redis refuses to rewrite it",
}


def precedes(time_ms: int, erased_ms: int, now_ms: int) -> bool:
    """Return whether a record of this time was made before an erasure (all Unix ms).

    A time later than now was read before the clock was set back, so its record is from before the erasure too.
    """
    return not erased_ms < time_ms <= now_ms


class Remaining(Answer, frozen=True):
    """Data that an erasure does not remove, and until when."""

    what: str
    until: str
    until_unix_ms: Annotated[int | None, Meta(description="Null: only `until` describes it")] = None


class Erasure(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The event.

    `accepted_time_ms` (Unix ms) is when a door accepted it; impressions and answers up to then are removed too. With
    `is_of_visitors` it erases the anonymous visitors of the user's tenant in its partition, and not the user.
    """

    erasure_id: Id
    user_id: StoredId
    accepted_time_ms: int
    is_of_visitors: bool = False

    def __post_init__(self) -> None:
        """Check texts and numbers. Raises InvalidField."""
        super().__post_init__()
        check_stored_id("user_id", self.user_id)

    def encode(self) -> bytes:
        """Return the record's value: compact JSON."""
        return encode(self)

    @property
    def key(self) -> bytes:
        return self.user_id.encode()

    @property
    def erased_id(self) -> str:
        """The id whose records are erased: the user's, or the prefix of the tenant's ids for its visitors."""
        return prefix_of(tenant_of(self.user_id)) if self.is_of_visitors else self.user_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureProgress:
    """The receipt of an erasure: when each store was done, in Unix ms (None: not yet), and what remains until when."""

    erasure_id: str
    accepted_time_ms: int
    stores: Mapping[ErasureStore, int | None]
    remaining: tuple[Remaining, ...] = ()

    @property
    def is_done(self) -> bool:
        return all(done is not None for done in self.stores.values())

    @property
    def is_done_online(self) -> bool:
        """Whether no request reads data from before the erasure any more."""
        return all(self.stores[store] is not None for store in ONLINE_STORES)


class ErasedStore(Answer, frozen=True):
    """One store that a user is removed from."""

    store: Annotated[str, Meta(examples=["features"])]
    meaning: Annotated[str, Meta(description="The user's data that it held")]
    done_time_ms: Annotated[int | None, Meta(description="Unix milliseconds; null: not done yet")]


class ReceiptBody(Answer, frozen=True):
    """The progress of an erasure. Names no user."""

    erasure_id: Id
    accepted_time_ms: Annotated[int, Meta(description="Unix milliseconds")]
    is_done_online: Annotated[bool, Meta(description="No answer depends on the user's past any more")]
    is_done: Annotated[bool, Meta(description="Every store is done")]
    stores: tuple[ErasedStore, ...]
    remaining: Annotated[tuple[Remaining, ...], Meta(description="Data that remains, and until when")]

    @classmethod
    def of(cls, receipt: ErasureProgress) -> "ReceiptBody":
        return cls(
            receipt.erasure_id,
            receipt.accepted_time_ms,
            receipt.is_done_online,
            receipt.is_done,
            tuple(ErasedStore(store, STORE_MEANINGS[store], done) for store, done in receipt.stores.items()),
            receipt.remaining,
        )


class UserDataBody(Answer, frozen=True):
    """All data about one user."""

    user_id: str
    history: Annotated[dict[str, Any] | None, Meta(description="Null: none")]
    shown: Annotated[tuple[dict[str, Any], ...], Meta(description="Remembered impressions")]
    lists: Annotated[tuple[dict[str, Any], ...], Meta(description="Stored lists, by bundle")]
    explanations: Annotated[tuple[dict[str, Any], ...], Meta(description="Of the user's recent requests")]
    events: Annotated[
        tuple[dict[str, Any], ...] | None, Meta(description="Of the offline log; null: this gateway has no access")
    ]
    impressions: Annotated[tuple[dict[str, Any], ...] | None, Meta(description="As events")]


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
        Remaining("a salted digest of the id: readers of tables use it to skip the user's rows", "for good"),
        Remaining("tables given to the pipeline, and the operator's own copies and backups", "the operator's care"),
    )


def decode_record(value: bytes | None) -> Interaction | Erasure:
    """Read a record's value. Raises InvalidRequest with the field that is wrong."""
    if b"erasure_id" not in (value or b""):
        return decode_interaction(value)
    fields = decode_object(value or b"", "value")
    if "erasure_id" not in fields:  # a text of an interaction
        return convert(Interaction, fields)
    erasure = convert(Erasure, fields)
    check_written_time("accepted_time_ms", erasure.accepted_time_ms)
    return erasure
