"""The residency of models in one process: which are loaded, which load next, which are unloaded for room. Pure.

A name is absent, loading, resident or draining:

    absent    --want, then room-->                        loading
    loading   --loaded-->  resident     --failed-->       absent
    resident  --room is needed, or idle-->                draining
    draining  --last reference released, unloaded-->      absent

Loading, resident and draining names occupy bytes, and their sum never exceeds the budget: a load starts only after the
names that it displaces are unloaded. Bytes that several names share, such as the decoder of their adapters, count once.
Displaced is the name that was used least recently, names in use last; pinned names and names that became resident less
than the minimum stay ago are never displaced. A waiting name displaces a model that was used lately only once it was
requested twice as often. A draining name takes no new references, and is unloaded when its last reference is released.
The waiting names of the tenants load in turn by their bytes, of a tenant the most wanted first, and `max_loading` names
load at a time, so that a name in demand overtakes rare names; a name that nobody wants any more is forgotten. Names of
a tenant that holds no more than an equal part of the budget are displaced last by the names of other tenants.

Time is an argument, in seconds. `next_actions` is called after each event and from time to time.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from services.contracts.fairness import FairOrder

FORGET_S = 10.0
"""A waiting name that no request wanted for this long is not loaded."""
_FORGET_EVERY_S = 1.0
"""While no memory can be free, waiting names are searched for such names only this often."""
_NUM_STAYS, _KEPT_ABOVE = 3.0, 2.0
"""A model's uses count for about three least stays. A waiting name displaces it when requested twice as often: names
that are used alike would take turns, and each load takes time from requests."""


class Residency(StrEnum):
    """The state of a name in this process."""

    ABSENT = "absent"
    WAITING = "waiting"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


class Eviction(StrEnum):
    """Why a name is unloaded."""

    ROOM = "room"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """The memory of a model: its own, and by key the parts that it shares with the models that have an equal key."""

    own: int
    shared: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The bytes of the model if no other model is loaded."""
        return self.own + sum(self.shared.values())

    @classmethod
    def of(cls, size: "int | ModelBytes") -> "ModelBytes":
        return cls(size) if isinstance(size, int) else size

    @classmethod
    def sum(cls, sizes: "Iterable[ModelBytes]") -> "ModelBytes":
        """Return the bytes of several models, each shared part counted once."""
        own, shared = 0, dict[str, int]()
        for size in sizes:
            own += size.own
            for key, num_bytes in size.shared.items():
                shared[key] = max(num_bytes, shared.get(key, 0))
        return cls(own, shared)


class TooLarge(ValueError):
    """A model that exceeds the budget even if all unpinned models are unloaded."""


@dataclass(frozen=True, slots=True)
class Actions:
    """Names to load and to unload now, and waiting names that fit no longer. Each is returned once."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    refused: Mapping[str, TooLarge] = field(default_factory=dict)


@dataclass(slots=True)
class _Model:
    """A name that occupies bytes. `since_s`: start of its state; `used_s`: last use."""

    state: Residency
    size: ModelBytes
    since_s: float
    used_s: float
    uses: float = 0.0
    """Uses until the last use, weighted less with age; see `ResidencyTable._recent_uses`."""
    num_references: int = 0
    eviction: Eviction | None = None
    is_unloading: bool = False


@dataclass(slots=True)
class _Wanted:
    size: ModelBytes
    wanted_s: float
    tenant: str
    num_requests: int = 1


class ResidencyTable:
    """The models of one process."""

    def __init__(
        self,
        budget_bytes: int | None = None,
        min_stay_s: float = 0.0,
        pinned: Collection[str] = (),
        idle_s: float | None = None,
        max_loading: int | None = None,
        tenant_of: Callable[[str], str] = lambda name: "",
    ) -> None:
        """Create an empty table.

        Args:
            budget_bytes: Most bytes of all models together; None for no limit.
            min_stay_s: A resident model is not unloaded for room before it has been resident this long.
            pinned: Names that are never unloaded.
            idle_s: A model that was not used for this long is unloaded; None for never.
            max_loading: Most names that load at once; None for no limit.
            tenant_of: Returns a name's tenant; by default all names have the same.
        """
        self._tenant_of = tenant_of
        self._max_loading = max_loading
        self._budget_bytes = budget_bytes
        self._min_stay_s = min_stay_s
        self.pinned = frozenset(pinned)
        self.idle_s = idle_s
        self._models: dict[str, _Model] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._order = FairOrder()
        self._seen_pinned = ModelBytes(0)
        self._forgotten_s = -math.inf
        self._least_own = 0
        """At most the own bytes of any waiting name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all loading, resident and draining models."""
        return ModelBytes.sum(model.size for model in self._models.values()).total

    @property
    def shared_bytes(self) -> int:
        """The bytes that several names use."""
        return self.num_bytes - sum(self.bytes_by_name().values())

    def state(self, name: str) -> Residency:
        """Return the state of a name."""
        if (model := self._models.get(name)) is not None:
            return model.state
        return Residency.WAITING if name in self._wanted else Residency.ABSENT

    def bytes_by_name(self) -> Mapping[str, int]:
        """Return the bytes of each loading, resident and draining name that no other name uses."""
        users = Counter(key for model in self._models.values() for key in model.size.shared)
        return {
            name: model.size.own + sum(part for key, part in model.size.shared.items() if users[key] == 1)
            for name, model in self._models.items()
        }

    def names(self, state: Residency) -> tuple[str, ...]:
        """Return the names in this state."""
        if state is Residency.WAITING:
            return tuple(self._wanted)
        return tuple(name for name, model in self._models.items() if model.state is state)

    def requests_waiting(self, tenant: str) -> list[int]:
        """Return for each waiting name of a tenant how many requests have asked for it."""
        return [wanted.num_requests for wanted in self._wanted.values() if wanted.tenant == tenant]

    def want(self, name: str, size: int | ModelBytes, now_s: float, num_requests: int = 1) -> None:
        """Ask for a name that takes this many bytes; no effect unless it is absent. Raises TooLarge."""
        if name in self._models:
            return
        wanted = ModelBytes.of(size)
        if not self._can_fit(wanted):
            raise self._too_large(name, wanted)
        self._least_own = min(wanted.own, self._least_own if self._wanted else wanted.own)
        self._wanted.setdefault(name, _Wanted(wanted, now_s, self._tenant_of(name), num_requests))

    def still_wanted(self, name: str, now_s: float) -> None:
        """Record that a request wanted a name, so that it is not forgotten while it waits."""
        if name in self._wanted:
            self._wanted[name].wanted_s = now_s
            self._wanted[name].num_requests += 1

    def acquire(self, name: str, now_s: float | None) -> bool:
        """Reference a resident name, so that it is not unloaded until `release`. Return whether it is resident.

        `now_s` None does not count as a use.
        """
        model = self._models.get(name)
        if model is None or model.state is not Residency.RESIDENT:
            return False
        model.num_references += 1
        if now_s is not None:
            self._count_use(model, now_s)
        return True

    def use(self, name: str, now_s: float) -> bool:
        """Record a use of a resident name; return whether it is resident. Needs no lock."""
        model = self._models.get(name)
        if model is None or model.state is not Residency.RESIDENT:
            return False
        self._count_use(model, now_s)
        return True

    def release(self, name: str) -> None:
        """Give a reference back."""
        model = self._models[name]
        assert model.num_references > 0, f"{name} has no reference to release"
        model.num_references -= 1

    def loaded(self, name: str, now_s: float) -> None:
        """Record the end of a load."""
        self._enter(name, Residency.LOADING, Residency.RESIDENT, now_s).used_s = now_s

    def failed(self, name: str) -> None:
        """Record that a load failed: its bytes are free again."""
        assert self._models[name].state is Residency.LOADING, f"{name} is not loading"
        del self._models[name]

    def unloaded(self, name: str) -> Eviction:
        """Record that a name's memory is free again; return why it was unloaded."""
        model = self._models[name]
        assert model.is_unloading, f"{name} is not being unloaded"
        assert model.eviction is not None, f"{name} drains for a reason"
        del self._models[name]
        return model.eviction

    def resize(self, name: str, size: int | ModelBytes, now_s: float) -> bool:
        """Change the bytes of a resident name, as for another version; return whether they fit.

        If not, other names begin to drain, and a later call may succeed.
        """
        if not self._make_room(name, ModelBytes.of(size), now_s):
            return False
        self._models[name].size = ModelBytes.of(size)
        return True

    def next_actions(self, now_s: float) -> Actions:
        """Return the loads and unloads that may start now."""
        self._drain_idle(now_s)
        refused = self._refuse_larger()
        load = tuple(self._start_loads(now_s))
        return Actions(load, tuple(self._start_unloads()), refused)

    def _refuse_larger(self) -> Mapping[str, TooLarge]:
        """Forget the waiting names that fit no longer next to the pinned names, which have loaded or grown since."""
        if self._budget_bytes is None or not self._wanted:
            return {}
        before, self._seen_pinned = self._seen_pinned, self._pinned_bytes()
        if self._seen_pinned == before:
            return {}
        larger = {name: wanted.size for name, wanted in self._wanted.items() if not self._can_fit(wanted.size)}
        for name in larger:
            del self._wanted[name]
        return {name: self._too_large(name, size) for name, size in larger.items()}

    def _start_loads(self, now_s: float) -> Iterable[str]:
        is_recent = now_s - self._forgotten_s < _FORGET_EVERY_S
        if not self._wanted or (is_recent and self._is_full(now_s)):
            return
        self._forgotten_s = now_s
        for waiting, wanted in list(self._wanted.items()):
            if now_s - wanted.wanted_s > FORGET_S and waiting not in self.pinned:
                del self._wanted[waiting]
        num_free = math.inf if self._max_loading is None else self._max_loading - len(self.names(Residency.LOADING))
        refused = set[str]()
        """Tenants whose most wanted name displaces no model now."""
        while num_free > 0 and not self._is_full(now_s) and (name := self._next_wanted(refused)) is not None:
            size = self._wanted[name].size
            if not self._make_room(name, size, now_s):
                if self.names(Residency.DRAINING):
                    return
                refused.add(self._wanted[name].tenant)
                continue
            uses = float(self._wanted.pop(name).num_requests)
            before = self.num_bytes
            self._models[name] = _Model(Residency.LOADING, size, now_s, now_s, uses)
            self._order.charge(self._tenant_of(name), 1, self.num_bytes - before)
            num_free -= 1
            yield name

    def _is_full(self, now_s: float) -> bool:
        """Return whether no waiting name has room, and none can be made. Spares a search for the next of many names."""
        if self._budget_bytes is None or self._old(now_s):
            return False
        return self.num_bytes + self._least_own > self._budget_bytes

    def _next_wanted(self, refused: Collection[str]) -> str | None:
        """Return the waiting name that loads next: a pinned name, or the most wanted of the tenant whose turn it is.

        None if only `refused` tenants have waiting names.
        """
        able = [name for name, one in self._wanted.items() if one.tenant not in refused]
        wanted = [name for name in able if name in self.pinned] or able
        if not wanted:
            return None
        tenant = self._order.next(dict.fromkeys(self._wanted[name].tenant for name in wanted))
        own = (name for name in wanted if self._wanted[name].tenant == tenant)
        return max(own, key=lambda name: self._wanted[name].num_requests)

    def _can_fit(self, size: ModelBytes) -> bool:
        """Return whether a model fits next to the pinned names."""
        return self._budget_bytes is None or ModelBytes.sum([self._pinned_bytes(), size]).total <= self._budget_bytes

    def _too_large(self, name: str, size: ModelBytes) -> TooLarge:
        pinned = self._pinned_bytes()
        needed = ModelBytes.sum((pinned, size)).total - pinned.total
        return TooLarge(
            f"{name}: needs {needed:,} bytes more; of {self._budget_bytes:,} bytes for models "
            f"pinned names take {pinned.total:,}"
        )

    def _pinned_bytes(self) -> ModelBytes:
        """Return the memory of the pinned names that are in memory."""
        return ModelBytes.sum(self._models[name].size for name in self.pinned & self._models.keys())

    def _start_unloads(self) -> Iterable[str]:
        for name, model in self._models.items():
            if model.state is Residency.DRAINING and not model.num_references and not model.is_unloading:
                model.is_unloading = True
                yield name

    def _make_room(self, requester: str, size: ModelBytes, now_s: float) -> bool:
        """Return whether a name fits with this size.

        If not, drain as many other names as are needed, if they suffice.
        """
        if self._budget_bytes is None:
            return True
        others = {name: model for name, model in self._models.items() if name != requester}
        if ModelBytes.sum([size, *(model.size for model in others.values())]).total <= self._budget_bytes:
            return True
        if not (displaceable := self._displaceable(requester, now_s)):
            return False
        kept = {name: model.size for name, model in others.items() if model.state is not Residency.DRAINING}
        victims = list[str]()
        for name in displaceable:
            if ModelBytes.sum([size, *kept.values()]).total <= self._budget_bytes:
                break
            if name != requester:
                victims.append(name)
                del kept[name]
        if ModelBytes.sum([size, *kept.values()]).total <= self._budget_bytes:
            for name in victims:
                self._drain(name, Eviction.ROOM, now_s)
        return False

    def _displaceable(self, requester: str, now_s: float) -> list[str]:
        """Return the names that may be unloaded for this name, first those displaced first.

        A waiting name displaces no model that was used more than it was requested, unless its tenant is within its
        share and the model's tenant is not.
        """
        if not (old := self._old(now_s)):
            return old
        tenant, within = self._tenant_of(requester), self._within_share()
        wanted = None if requester in self.pinned else self._wanted.get(requester)

        def turn(name: str) -> tuple[bool, bool, float]:
            is_spared = self._tenant_of(name) in within - {tenant}
            return is_spared, self._models[name].num_references > 0, self._models[name].used_s

        def gives_way(name: str) -> bool:
            if wanted is None or (tenant in within and self._tenant_of(name) not in within):
                return True
            return _KEPT_ABOVE * self._recent_uses(self._models[name], now_s) < wanted.num_requests

        return list(takewhile(gives_way, sorted(old, key=turn)))

    def _count_use(self, model: _Model, now_s: float) -> None:
        model.uses, model.used_s = self._recent_uses(model, now_s) + 1.0, now_s

    def _recent_uses(self, model: _Model, now_s: float) -> float:
        """Return the uses of a model during a few least stays; 0 without a least stay, when any model may give way."""
        if not self._min_stay_s:
            return 0.0
        return model.uses * math.exp((model.used_s - now_s) / (_NUM_STAYS * self._min_stay_s))

    def _old(self, now_s: float) -> list[str]:
        """Return the names that may be unloaded for room."""
        return [
            name
            for name, model in self._models.items()
            if model.state is Residency.RESIDENT
            and name not in self.pinned
            and now_s - model.since_s >= self._min_stay_s
        ]

    def _within_share(self) -> set[str]:
        """Return the tenants that hold at most an equal part of the budget, among tenants that hold or want memory.

        A shared part belongs to its users in equal parts.
        """
        users = Counter(key for model in self._models.values() for key in model.size.shared)
        num_bytes: dict[str, float] = dict.fromkeys((wanted.tenant for wanted in self._wanted.values()), 0)
        for name, model in self._models.items():
            tenant = self._tenant_of(name)
            parts = sum(part / users[key] for key, part in model.size.shared.items())
            num_bytes[tenant] = num_bytes.get(tenant, 0) + model.size.own + parts
        return {tenant for tenant, held in num_bytes.items() if held * len(num_bytes) <= (self._budget_bytes or 0)}

    def _drain_idle(self, now_s: float) -> None:
        if self.idle_s is None:
            return
        for name, model in self._models.items():
            is_idle = model.state is Residency.RESIDENT and not model.num_references
            if is_idle and name not in self.pinned and now_s - model.used_s >= self.idle_s:
                self._drain(name, Eviction.IDLE, now_s)

    def _drain(self, name: str, why: Eviction, now_s: float) -> None:
        self._enter(name, Residency.RESIDENT, Residency.DRAINING, now_s).eviction = why

    def _enter(self, name: str, before: Residency, after: Residency, now_s: float) -> _Model:
        model = self._models[name]
        assert model.state is before, f"{name} is {model.state}, not {before}"
        model.state, model.since_s = after, now_s
        return model
