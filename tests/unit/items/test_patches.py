"""Changes of items at several gateways, in any order, have the result of the same changes one after the other.

Run: pytest tests/unit/items/test_patches.py
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.contracts.items import MAX_ATTRIBUTES, ItemPatch, ItemState
from services.errors import InvalidRequest, NotFound
from services.gateway.events.items import ItemOperations
from services.items.live_items import LiveItems
from services.items.patches import PATCH_HEADER, PatchMerger
from tests.unit.gateway.world import catalogue_of

TOPIC_ID = "topic"
ITEMS = ("i00", "i01", "new")
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "title": st.sampled_from([None, "A", "B"]),
        "available": st.booleans(),
        "value": st.sampled_from([None, 1.0, 2.0]),
        "attributes": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([None, "x", 1.0]), max_size=2),
    },
)
Fields = dict[str, Any]


@dataclass
class Request:
    """A request at a gateway: the merge patch of a PATCH, or the fields of a PUT, None for a DELETE."""

    item_id: str
    changes: Fields | None = None
    fields: Fields | None = None
    is_written: bool = False


@dataclass
class Sent:
    """A record on its way to the broker."""

    request: Request
    record: SimpleNamespace
    done: "asyncio.Future[Sequence[tuple[int, int]]]"


@dataclass
class Gateway:
    """A gateway's states, read from the log; its records wait in `network`."""

    log: list[SimpleNamespace]
    network: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Lay out the states."""
        self.items, self.merger, self.num_read = LiveItems(), PatchMerger(), 0
        self.items.lay(catalogue_of(2))
        self.merger.begin(TOPIC_ID, {0: 0})
        self.operations = ItemOperations(self, self, self.items, no_names)
        self.requests: dict[asyncio.Task[Any], Request] = {}

    def read(self, until: int | None = None) -> None:
        """Apply the log's records."""
        for record in self.log:
            if self.num_read <= record.offset < (len(self.log) if until is None else until):
                with contextlib.suppress(InvalidRequest):
                    self.items.apply([self.merger.change(record, self.items.stated)])
                self.num_read = record.offset + 1

    def begin_again(self) -> None:
        """Continue as a new process that starts with this process's snapshot."""
        self.merger = PatchMerger()
        self.merger.begin(TOPIC_ID, {0: self.num_read})

    async def catch_up(self, timeout_s: float) -> None:
        """Read the log."""
        self.read()

    def start(self, timeout_s: float) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def patch_of(self, changes: Mapping[str, Any]) -> ItemPatch:
        """Return the header of a patch."""
        return ItemPatch(dict(changes), TOPIC_ID, {0: self.num_read})

    def is_unsettled(self, item_id: str) -> bool:
        """Return whether the last record is not the state."""
        return item_id in self.merger.unsettled

    async def record(
        self, records: Sequence[tuple[bytes, bytes | None]], headers: Sequence[tuple[str, bytes]] = ()
    ) -> Sequence[tuple[int, int]]:
        """Send a record, and wait until the broker has it."""
        task = asyncio.current_task()
        assert task is not None
        ((key, value),) = records
        record = SimpleNamespace(key=key, value=value, headers=headers, partition=0, offset=-1)
        sent = Sent(self.requests[task], record, asyncio.get_running_loop().create_future())
        self.network.append(sent)
        return await sent.done

    def states(self) -> dict[str, ItemState | None]:
        """The known states."""
        return {item_id: self.items.stated(item_id) for item_id in ITEMS}


async def no_names(_tenant: str, _timeout_s: float) -> AsyncIterator[None]:
    """All names are loaded."""
    return
    yield


class Changes(RuleBasedStateMachine):
    """Two gateways, a log, and the sequential model: each request takes effect as its first record is written."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.log: list[SimpleNamespace] = []
        self.network: list[Sent] = []
        self.gateways = [Gateway(self.log, self.network) for _ in range(2)]
        self.model: dict[str, Fields | None] = {item_id: {} for item_id in ITEMS}
        self.deleted: set[str] = set()
        self.tasks: list[tuple[Request, asyncio.Task[Any]]] = []

    def run(self) -> None:
        """Let all tasks run until they wait for the network."""

        async def steps() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(steps())

    def request(self, gateway: int, request: Request) -> None:
        """Begin a request at a gateway."""
        at = self.gateways[gateway]
        call: Any
        if request.changes is not None:
            call = at.operations.patch(request.item_id, request.changes)
        elif request.fields is not None:
            call = at.operations.put_one(request.item_id, request.fields)
        else:
            call = at.operations.delete([request.item_id])
        task = self.loop.create_task(call)
        at.requests[task] = request
        self.tasks.append((request, task))
        self.run()

    @rule(gateway=st.integers(0, 1), item_id=st.sampled_from(ITEMS), changes=CHANGES)
    def patch(self, gateway: int, item_id: str, changes: Fields) -> None:
        """Begin a PATCH."""
        self.request(gateway, Request(item_id, changes=changes))

    @rule(gateway=st.integers(0, 1), item_id=st.sampled_from(ITEMS), fields=CHANGES)
    def put(self, gateway: int, item_id: str, fields: Fields) -> None:
        """Begin a PUT."""
        whole = {name: value for name, value in fields.items() if value is not None}
        whole["attributes"] = {name: value for name, value in fields.get("attributes", {}).items() if value is not None}
        self.request(gateway, Request(item_id, fields=whole))

    @rule(gateway=st.integers(0, 1), item_id=st.sampled_from(ITEMS))
    def delete(self, gateway: int, item_id: str) -> None:
        """Begin a DELETE."""
        self.request(gateway, Request(item_id))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def deliver(self, data: Any) -> None:
        """Write a record on its way to the log."""
        self.write(data.draw(st.integers(0, len(self.network) - 1)))

    def write(self, index: int) -> None:
        """Write a record to the log, and acknowledge it."""
        sent = self.network.pop(index)
        sent.record.offset = len(self.log)
        self.log.append(sent.record)
        if not sent.request.is_written:
            sent.request.is_written = True
            self.apply(sent.request)
        sent.done.set_result([(0, sent.record.offset)])
        self.run()

    def apply(self, request: Request) -> None:
        """Apply a request to the model."""
        before = self.model[request.item_id]
        if request.changes is None:
            self.model[request.item_id] = None if request.fields is None else dict(request.fields)
            if request.fields is None:
                self.deleted.add(request.item_id)
        elif before is not None:
            after = before | request.changes
            if "attributes" in request.changes:
                after["attributes"] = before.get("attributes", {}) | request.changes["attributes"]
            self.model[request.item_id] = after

    @rule(gateway=st.integers(0, 1))
    def restart(self, gateway: int) -> None:
        """Continue a gateway from its snapshot."""
        self.gateways[gateway].begin_again()

    @rule(gateway=st.integers(0, 1))
    def read(self, gateway: int) -> None:
        """Read the log at a gateway, at any time."""
        self.gateways[gateway].read()

    def expected(self) -> dict[str, ItemState | None]:
        """The model's states."""
        return {
            item_id: None if fields is None else ItemState(item_id=item_id).patched(fields)
            for item_id, fields in self.model.items()
        }

    @invariant()
    def every_reader_knows_the_model_s_states(self) -> None:
        """A process that follows the log, from its beginning or from a snapshot, has the model's states."""
        for middle in (0, len(self.log) // 2):
            reader = Gateway(self.log)
            reader.read(middle)
            if middle:
                reader.begin_again()
            reader.read()
            assert reader.states() == self.expected()

    def teardown(self) -> None:
        """End all requests; compaction then loses no change, and each answer is right."""
        while self.network:
            self.write(0)
        for request, task in self.tasks:
            assert task.done()
            if isinstance(error := task.exception(), NotFound):
                assert request.changes is not None
                assert request.item_id in self.deleted | {"new"}
            else:
                assert error is None
        for gateway in self.gateways:
            gateway.read()
            assert gateway.states() == self.expected()
        last = {record.key: record for record in self.log}
        late = Gateway([record for record in self.log if last[record.key] is record])
        late.read(len(self.log))
        assert late.states() == self.expected()
        self.loop.close()


Changes.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestChanges = Changes.TestCase


def test_changes_that_exceed_a_limit_together_are_refused_one_by_one() -> None:
    """Two patches that add too many attributes together: the later patch is refused, and the item stays readable."""
    machine = Changes()
    half = MAX_ATTRIBUTES // 2 + 1
    for gateway, name in enumerate("ab"):
        added = {f"{name}{number}": 1.0 for number in range(half)}
        machine.request(gateway, Request("i00", changes={"attributes": added}))
    while machine.network:
        machine.write(0)
    (_, first), (_, second) = machine.tasks

    assert set(first.result().attributes) == {f"a{number}" for number in range(half)}
    with pytest.raises(InvalidRequest, match="attributes"):
        second.result()
    late = Gateway(machine.log[-1:])
    late.read(len(machine.log))
    assert late.items.stated("i00") == first.result()
    machine.loop.close()


@pytest.mark.parametrize("header", [b"", b"{", b"\xff", b'{"changes":[]}', b'{"changes":{},"topic_id":"t"}'])
def test_an_unreadable_header_is_refused(header: bytes) -> None:
    """A record whose header cannot be read is refused like a record whose value cannot be read."""
    record = SimpleNamespace(key=b"i00", value=b"{}", headers=[(PATCH_HEADER, header)], partition=0, offset=0)
    with pytest.raises(InvalidRequest, match="patch"):
        PatchMerger().change(record, LiveItems().stated)
