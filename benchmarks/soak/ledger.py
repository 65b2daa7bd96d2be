"""Accounts for every event that was sent: acknowledged ones must have had their effect once, refused ones once or never. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from services.features.schema import UserHistory
from services.stream.aggregate import HistoryLimits, apply
from services.stream.decode import LoggedInteraction


@dataclass(slots=True)
class Ledger:
    """Event ids by what the callers were told. A refused event may have arrived all the same."""

    acknowledged: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def unlogged(self, logged: Iterable[LoggedInteraction]) -> set[str]:
        """Return the acknowledged events that are not in the log."""
        return self.acknowledged - {one.interaction.event_id for one in logged}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The result: `num_lost` of the acknowledged, `num_doubled` of all; `different_rows` are users whose row is not the log's replay."""

    num_acknowledged: int
    num_refused: int
    num_refused_recorded: int
    num_lost: int
    num_doubled: int
    num_users: int
    different_rows: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every acknowledged event had its effect exactly once, in the order of the log."""
        return not (self.num_lost or self.num_doubled or self.different_rows)

    def fields(self) -> dict[str, Any]:
        """Return it for a results file."""
        return {**asdict(self), "different_rows": list(self.different_rows)}


def account_for(
    ledger: Ledger, logged: Sequence[LoggedInteraction], rows: Mapping[str, UserHistory], limits: HistoryLimits
) -> Account:
    """Compare what callers were told with the log, and each user's row with the replay of the log in its order."""
    by_user: dict[str, list[LoggedInteraction]] = defaultdict(list)
    for one in logged:
        by_user[one.interaction.user_id].append(one)
    replayed = {user: apply(None, [one.event for one in own], limits).row for user, own in by_user.items()}
    surplus = {
        user: rows[user].num_events - len({one.interaction.event_id for one in own}) if user in rows else -len(own)
        for user, own in by_user.items()
    }
    arrived = {one.interaction.event_id for one in logged}
    return Account(
        num_acknowledged=len(ledger.acknowledged),
        num_refused=len(ledger.refused),
        num_refused_recorded=len(ledger.refused & arrived),
        num_lost=len(ledger.acknowledged - arrived) + sum(max(0, -extra) for extra in surplus.values()),
        num_doubled=sum(max(0, extra) for extra in surplus.values()),
        num_users=len(by_user),
        different_rows=tuple(sorted(user for user, row in replayed.items() if rows.get(user) != row)),
    )
