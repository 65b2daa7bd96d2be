"""Moves of people and of the canary analysis on one name, in any order, and the expected record, for each storage."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from models.errors import BundleError, CanaryError, InvalidRequest
from models.registry.canary import Canary, CanaryStage
from models.registry.store import BundleStore

STAGES = (CanaryStage(0.1, 0.0), CanaryStage(0.5, 0.0), CanaryStage(1.0, 0.0))
VERSIONS = ("old", "live", "new", "other")


def release(store: BundleStore, version: str = "new") -> Canary:
    return store.release(version, STAGES, 0, by="ann")


def _release_again(store: BundleStore) -> None:
    store.end_canary("new", by="ann")
    release(store)


PEOPLE: dict[str, Callable[[BundleStore], Any]] = {
    "stop": lambda store: store.end_canary("new", by="ann"),
    "promote by hand": lambda store: store.promote("new", by="ann"),
    "promote another": lambda store: store.promote("other", by="ann", force=True),
    "rollback": lambda store: store.rollback(by="ann"),
    "withdraw": lambda store: store.withdraw("new", by="ann"),
    "stop and release again": _release_again,
    "next": lambda store: store.move_canary("new", 1, 5, 5, by="ann"),
    "pause": lambda store: store.pause_canary("new", by="ann"),
}
"""A person's possible moves between the look and the move of an analysis."""
ANALYSIS: dict[str, Callable[[BundleStore, Canary], None]] = {
    "promote": lambda store, seen: store.promote(seen.version, "live", by="release", release=seen),
    "move on": lambda store, seen: store.move_canary(seen.version, seen.stage + 1, 9, 9, by="release", release=seen),
    "withdraw": lambda store, seen: store.reject_canary(seen, by="release", reason="worse"),
    "report": lambda store, seen: store.report_canary(seen.version, "fine", 9, release=seen),
}
"""The consequence of a look at a release."""


class Moves(RuleBasedStateMachine):
    """An analysis looks, people move, and the analysis acts on its look.

    Subclasses provide `open_store`: versions of `VERSIONS`, `live` after `old`.
    """

    open_store: Callable[[], BundleStore]

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).open_store()
        self.seen: Canary | None = None

    @rule(version=st.sampled_from(["new", "other"]))
    def begin(self, version: str) -> None:
        with suppress(BundleError):
            release(self.store, version)

    @rule()
    def look(self) -> None:
        self.seen = self.store.record().canary or self.seen

    @rule(name=st.sampled_from(sorted(PEOPLE)))
    def move(self, name: str) -> None:
        with suppress(BundleError):
            PEOPLE[name](self.store)

    @precondition(lambda self: self.seen is not None)
    @rule(name=st.sampled_from(sorted(ANALYSIS)))
    def act(self, name: str) -> None:
        """The analysis acts only on the same release in the same stage as at its last look."""
        assert self.seen is not None
        before = self.store.record()
        is_same = before.canary is not None and before.canary.identity == self.seen.identity
        if not is_same:
            with pytest.raises(CanaryError):
                ANALYSIS[name](self.store, self.seen)
            assert self.store.record() == before
            return
        if name == "move on" and self.seen.stage + 1 == len(self.seen.stages):
            with pytest.raises(InvalidRequest, match="out of range"):
                ANALYSIS[name](self.store, self.seen)
            assert self.store.record() == before
            return
        with suppress(BundleError):  # another version may be live
            ANALYSIS[name](self.store, self.seen)

    @invariant()
    def is_consistent(self) -> None:
        """Versions withdrawn by people do not serve, and a canary accompanies another live version."""
        record = self.store.record()
        assert record.live not in record.withdrawn
        assert record.canary is None or record.canary.version not in {record.live, *record.withdrawn}
