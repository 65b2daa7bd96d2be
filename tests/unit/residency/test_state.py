"""The residency of models: a state machine against a record of everything that happened to each name."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.contracts.tenant import tenant_of_name
from services.residency.state import Actions, ModelBytes, Residency, ResidencyTable, TooLarge

BUDGET, MIN_STAY_S, IDLE_S, FORGET_S = 10, 3.0, 50.0, 10.0
SIZES = {
    "a": ModelBytes(4),
    "b": ModelBytes(1, {"decoder": 3}),
    "c": ModelBytes(0, {"decoder": 3}),
    "d": ModelBytes(2),
    "e": ModelBytes(1, {"decoder": 3, "slots": 1}),
    "pinned": ModelBytes(2),
}
PINNED = "pinned"
names = st.sampled_from(sorted(SIZES))


@dataclass
class Known:
    """The oracle's record of a name in memory."""

    size: ModelBytes
    resident_s: float | None = None
    used_s: float = 0.0
    num_references: int = 0
    is_unloading: bool = False


class TableMachine(RuleBasedStateMachine):
    """All events in any order; loads and unloads end whenever the machine likes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ResidencyTable(BUDGET, MIN_STAY_S, [PINNED], IDLE_S)
        self.known: dict[str, Known] = {}
        self.now_s = 0.0

    def act(self) -> None:
        """Take the next actions and check each against the record."""
        before = {name: self.table.state(name) for name in SIZES}
        self.check(self.table.next_actions(self.now_s), before)

    def check(self, actions: Actions, before: dict[str, Residency], requester: str = "") -> None:
        """Compare actions with the rules, one by one; a `requester` that grows is not displaced by itself."""
        drained = [
            name
            for name in SIZES
            if before[name] is Residency.RESIDENT and self.table.state(name) is Residency.DRAINING
        ]
        self.check_drained(drained, requester)
        for name in actions.unload:
            known = self.known[name]
            assert known.num_references == 0
            assert not known.is_unloading
            known.is_unloading = True
        for name in actions.load:
            assert name not in self.known
            self.known[name] = Known(SIZES[name])

    def check_drained(self, drained: list[str], requester: str) -> None:
        """A drained name is old, not pinned, and was used before every name that could have been drained instead."""
        candidates = [
            name
            for name, known in self.known.items()
            if known.resident_s is not None
            and name not in (PINNED, requester)
            and not known.is_unloading
            and self.now_s - known.resident_s >= MIN_STAY_S
        ]
        is_idle = {
            name
            for name in drained
            if not self.known[name].num_references and self.now_s - self.known[name].used_s >= IDLE_S
        }
        for name in set(drained) - is_idle:
            assert name in candidates
            spared = [candidate for candidate in candidates if self.table.state(candidate) is Residency.RESIDENT]
            assert all(self.order(name) <= self.order(other) for other in spared)

    def order(self, name: str) -> tuple[bool, float]:
        """Return the sort key for displacement."""
        known = self.known[name]
        return known.num_references > 0, known.used_s

    def memory(self, **changed: ModelBytes) -> int:
        """Return the bytes of all known names, shared parts once, with other sizes of some names."""
        sizes = [*({name: known.size for name, known in self.known.items()} | changed).values()]
        shared = {part for size in sizes for part in size.shared.items()}
        return sum(size.own for size in sizes) + sum(num_bytes for _, num_bytes in shared)

    def in_state(self, state: Residency) -> list[str]:
        return [name for name in SIZES if self.table.state(name) is state]

    @rule(name=names)
    def want(self, name: str) -> None:
        """A request for a name that is not in memory."""
        pinned = self.known[PINNED].size.own if PINNED in self.known else 0
        is_new = name not in self.known
        with pytest.raises(TooLarge) if is_new and SIZES[name].total > BUDGET - pinned else nullcontext():
            self.table.want(name, SIZES[name], self.now_s)
        self.table.still_wanted(name, self.now_s)
        self.act()

    @rule(name=names)
    def acquire(self, name: str) -> None:
        """A request acquires a name exactly if it is resident."""
        is_resident = self.table.state(name) is Residency.RESIDENT
        assert self.table.acquire(name, self.now_s) is is_resident
        if is_resident:
            self.known[name].num_references += 1
            self.known[name].used_s = self.now_s

    @rule(name=names)
    def use(self, name: str) -> None:
        """A request uses a name without a reference, exactly if it is resident."""
        is_resident = self.table.state(name) is Residency.RESIDENT
        assert self.table.use(name, self.now_s) is is_resident
        if is_resident:
            self.known[name].used_s = self.now_s

    @precondition(lambda self: any(known.num_references for known in self.known.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A request ends."""
        name = data.draw(st.sampled_from(sorted(name for name, known in self.known.items() if known.num_references)))
        self.table.release(name)
        self.known[name].num_references -= 1
        self.act()

    @precondition(lambda self: self.in_state(Residency.LOADING))
    @rule(data=st.data(), is_good=st.booleans())
    def end_load(self, data: st.DataObject, is_good: bool) -> None:
        """A load succeeds or fails."""
        name = data.draw(st.sampled_from(self.in_state(Residency.LOADING)))
        if is_good:
            self.table.loaded(name, self.now_s)
            self.known[name].resident_s = self.known[name].used_s = self.now_s
        else:
            self.table.failed(name)
            del self.known[name]
        self.act()

    @precondition(lambda self: any(known.is_unloading for known in self.known.values()))
    @rule(data=st.data())
    def end_unload(self, data: st.DataObject) -> None:
        """Memory is free again."""
        name = data.draw(st.sampled_from(sorted(name for name, known in self.known.items() if known.is_unloading)))
        self.table.unloaded(name)
        del self.known[name]
        self.act()

    @precondition(lambda self: self.in_state(Residency.RESIDENT))
    @rule(data=st.data(), num_bytes=st.integers(0, 7))
    def resize(self, data: st.DataObject, num_bytes: int) -> None:
        """A resident name takes more or fewer bytes, if they fit."""
        name = data.draw(st.sampled_from(self.in_state(Residency.RESIDENT)))
        before = {name: self.table.state(name) for name in SIZES}
        size = ModelBytes(num_bytes, self.known[name].size.shared)
        fits = self.table.resize(name, size, self.now_s)
        assert fits is (self.memory(**{name: size}) <= BUDGET)
        if fits:
            self.known[name].size = size
        self.check(Actions(), before, name)
        self.act()

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.act()

    @invariant()
    def the_budget_holds(self) -> None:
        """Loading, resident and draining names never exceed the budget."""
        assert self.memory() == self.table.num_bytes <= BUDGET
        alone = {name: self.memory() - self.memory(**{name: ModelBytes(0)}) for name in self.known}
        assert self.table.bytes_by_name() == alone
        assert self.table.shared_bytes == self.memory() - sum(alone.values())

    def teardown(self) -> None:
        """When requests end and time passes, a name that is wanted becomes resident."""
        for name, known in self.known.items():
            for _ in range(known.num_references):
                self.table.release(name)
            known.num_references = 0
        for _ in range(4 * len(SIZES)):
            self.now_s += MIN_STAY_S / 2
            self.want("d")
            for name in list(self.known):
                if self.table.state(name) is Residency.LOADING:
                    self.table.loaded(name, self.now_s)
                    self.known[name].resident_s = self.known[name].used_s = self.now_s
                elif self.known[name].is_unloading:
                    self.table.unloaded(name)
                    del self.known[name]
            if self.table.state("d") is Residency.RESIDENT:
                return
            self.act()
        raise AssertionError(f"d is {self.table.state('d')}")


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_model_larger_than_the_budget_is_refused() -> None:
    """A model that does not fit next to the pinned models is refused when it is wanted, and no model is unloaded."""
    table = ResidencyTable(10, pinned=["pinned"])
    table.want("pinned", 4, 0.0)
    table.next_actions(0.0)

    with pytest.raises(TooLarge, match="7 bytes"):
        table.want("a", 7, 0.0)
    table.want("a", 6, 0.0)
    assert table.next_actions(0.0) == Actions(load=("a",))


def test_a_waiting_name_is_refused_once_pinned_names_leave_it_no_room() -> None:
    """A name that fitted when it was wanted is refused, not forgotten, when a pinned name has taken its room."""
    table = ResidencyTable(10, pinned=["pinned"], max_loading=1)
    table.want("pinned", 4, 0.0)
    table.want("a", 7, 0.0)
    assert table.next_actions(0.0) == Actions(load=("pinned",))

    refused = table.next_actions(0.0).refused
    assert [*refused] == ["a"]
    assert "7 bytes" in str(refused["a"])
    assert table.state("a") is Residency.ABSENT
    assert table.next_actions(0.0) == Actions()


def test_a_name_that_shares_what_is_loaded_needs_room_for_its_own_part() -> None:
    """Adapters of a loaded decoder fit next to it; its memory is free again when the last of them is unloaded."""
    table = ResidencyTable(10)
    for number in range(5):
        table.want(f"adapter {number}", ModelBytes(1, {"decoder": 5}), float(number))
        for name in table.next_actions(float(number)).load:
            table.loaded(name, float(number))
    assert (table.num_bytes, table.shared_bytes, len(table.names(Residency.RESIDENT))) == (10, 5, 5)

    table.want("large", 6, 5.0)
    unloads = table.next_actions(5.0).unload
    assert len(unloads) == 5
    for name in unloads:
        assert not table.next_actions(5.0).load
        table.unloaded(name)
    assert table.next_actions(5.0) == Actions(load=("large",))


def test_a_name_in_use_drains_before_it_is_unloaded() -> None:
    """If every name is in use, the least recently used takes no new requests and is unloaded after its last."""
    table = ResidencyTable(10)
    for now_s, name in enumerate(("a", "b")):
        table.want(name, 5, 0.0)
        table.next_actions(0.0)
        table.loaded(name, 0.0)
        assert table.acquire(name, float(now_s))
    table.want("c", 5, 2.0)

    assert table.next_actions(2.0) == Actions()
    assert not table.acquire("a", 2.0)
    assert table.acquire("b", 2.0)
    table.release("a")
    assert table.next_actions(2.0) == Actions(unload=("a",))
    table.unloaded("a")
    assert table.next_actions(2.0) == Actions(load=("c",))


def test_a_waiting_name_that_nobody_wants_any_more_is_forgotten() -> None:
    """A name waits for room as long as requests want it."""
    table = ResidencyTable(5, min_stay_s=60.0)
    for name in ("a", "b", "c"):
        table.want(name, 5, 0.0)
    table.next_actions(0.0)
    table.loaded("a", 0.0)
    table.still_wanted("c", 9.0)
    table.next_actions(9.0 + FORGET_S / 2)

    assert table.state("b") is Residency.ABSENT
    assert table.state("c") is Residency.WAITING


def test_of_the_waiting_names_the_most_wanted_loads_first() -> None:
    """With one load at a time, a name that more requests wait for overtakes names that were wanted before it."""
    table = ResidencyTable(5, max_loading=1)
    order: list[str] = []
    for index, name in enumerate(("first", "rare", "hot", "hot", "hot", "rare")):
        table.want(name, 1, float(index))
        table.still_wanted(name, float(index))
        order += table.next_actions(float(index)).load
    for _ in range(2):
        table.loaded(order[-1], 6.0)
        order += table.next_actions(6.0).load

    assert order == ["first", "hot", "rare"]


def test_a_tenant_that_wants_many_names_does_not_delay_another() -> None:
    """The tenants' loads take turns by their bytes, however many requests wait for one tenant's names."""
    table, loaded = ResidencyTable(max_loading=1, tenant_of=tenant_of_name), []
    for number in range(20):
        table.want(f"acme.{number}", 3, 0.0)
        for _ in range(50):
            table.still_wanted(f"acme.{number}", 0.0)
    for name in ("bolt.one", "bolt.two"):
        table.want(name, 3, 0.0)
    for _ in range(6):
        (name,) = table.next_actions(0.0).load
        table.loaded(name, 0.0)
        loaded.append(name)

    assert {name for name in loaded[:4] if name.startswith("bolt")} == {"bolt.one", "bolt.two"}


def test_a_tenant_that_wants_many_names_does_not_displace_another_within_its_share() -> None:
    """A flood of cold names displaces names of its own tenant, and a tenant above its share gives memory back."""
    table = ResidencyTable(budget_bytes=10, tenant_of=tenant_of_name)

    def load(name: str, now_s: float) -> None:
        """Load a name, and unload what it displaces."""
        table.want(name, 1, now_s)
        for _ in range(2):
            actions = table.next_actions(now_s)
            for other in actions.unload:
                table.unloaded(other)
            for other in actions.load:
                table.loaded(other, now_s)

    for number in range(3):
        load(f"bolt.{number}", 0.0)
    for number in range(50):
        load(f"acme.{number}", 1.0 + number)
    flooded = {name for name in table.bytes_by_name() if name.startswith("bolt")}
    for number in range(50):
        load(f"bolt.{number}", 100.0 + number)
    shared = sum(name.startswith("acme") for name in table.bytes_by_name())

    assert flooded == {"bolt.0", "bolt.1", "bolt.2"}
    assert shared == 5


def full_table(tenant_of: Callable[[str], str] = lambda name: "") -> ResidencyTable:
    """Return a full table of a, used ten times, and b, used once; their least stay ends at 10 s."""
    table = ResidencyTable(8, min_stay_s=10.0, tenant_of=tenant_of)
    for name in ("a", "b"):
        table.want(name, 4, 0.0)
        table.next_actions(0.0)
        table.loaded(name, 0.0)
    for second in range(10):
        table.use("a", float(second))
    table.use("b", 8.5)
    return table


def test_a_waiting_name_displaces_a_model_once_it_is_requested_twice_as_often() -> None:
    """A name that is requested once does not displace models in use, and gets its turn when its requests add up."""
    table = full_table()
    table.want("c", 4, 10.0)
    first = table.next_actions(10.0)
    for _ in range(4):
        table.still_wanted("c", 10.5)
    then = table.next_actions(11.5)

    assert first == Actions()
    assert then == Actions(unload=("b",))


def test_a_model_that_is_no_longer_used_gives_way_to_the_first_request() -> None:
    """The uses of long ago do not count."""
    table = full_table()
    table.want("c", 4, 200.0)

    assert table.next_actions(200.0) == Actions(unload=("b",))


def test_a_tenant_within_its_share_displaces_used_models_of_a_tenant_above_its_share() -> None:
    """Nor does a busier tenant's name that waits too delay it."""
    table = full_table(tenant_of=lambda name: "bolt" if name == "c" else "acme")
    table.want("d", 4, 10.0)
    assert table.next_actions(10.0) == Actions()
    table.want("c", 4, 10.0)

    assert table.next_actions(11.5) == Actions(unload=("b",))
