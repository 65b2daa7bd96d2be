"""Which adapters are in an engine's slots: `ResidencyTable` decides, with bytes as the budget.

All adapters that may be asked for stay in the host's memory; those in use, and of the others the most recently used,
are in slots. A request holds its adapter's slot until it ends. A request whose adapter finds no free slot is refused,
and the adapter gets the next slot that becomes free.
"""

from models.decoder.adapter import Adapter
from services.errors import ConfigError, InvalidRequest, Overloaded
from services.llm.engine.forward.adapters import AdapterSlots
from services.residency.state import ResidencyTable

_RETRY_AFTER_S = 0.1


class AdapterPool:
    """The adapters of one engine by key."""

    def __init__(self, slots: AdapterSlots, slot_bytes: int) -> None:
        self.slots = slots
        self._slot_bytes = slot_bytes
        self._free = list(range(len(slots.ranks)))
        self._table = ResidencyTable(slot_bytes * len(self._free))
        self._known: dict[str, Adapter] = {}
        self._in_slot: dict[str, int] = {}

    def add(self, key: str, adapter: Adapter) -> None:
        """Add an adapter, whose content the key identifies. Raises ConfigError if its rank exceeds the slots'."""
        if adapter.rank > self.slots.rank:
            raise ConfigError(
                f"adapter_rank: {self.slots.rank} is below the rank {adapter.rank} of adapter {key:.100}; set it to "
                f"{adapter.rank}"
            )
        self._known.setdefault(key, adapter)

    def remove(self, key: str) -> None:
        """Forget an adapter. Requests that hold its slot finish; later requests are refused."""
        self._known.pop(key, None)

    def acquire(self, key: str, now_s: float) -> int:
        """Return the slot of an adapter, held until `release`.

        Raises InvalidRequest for an unknown adapter, Overloaded if requests hold all slots.
        """
        if key not in self._known:
            raise InvalidRequest("adapter", f"{key:.100} is not loaded", "load it, or send a request for the base")
        if not self._table.acquire(key, now_s):
            self._table.want(key, self._slot_bytes, now_s)
            self._table.still_wanted(key, now_s)
            self._settle(now_s)
            if not self._table.acquire(key, now_s):
                raise Overloaded("the engine's adapter slots", _RETRY_AFTER_S)
        return self._in_slot[key]

    def release(self, key: str, now_s: float) -> None:
        """Give a slot back."""
        self._table.release(key)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Empty and write the slots that the table names, until nothing is left to do."""
        while (actions := self._table.next_actions(now_s)).load or actions.unload:
            for key in actions.unload:
                self._free.append(self._in_slot.pop(key))
                self._table.unloaded(key)
            for key in actions.load:
                self._load(key, now_s)

    def _load(self, key: str, now_s: float) -> None:
        adapter = self._known.get(key)
        if adapter is None:  # removed while it waited
            self._table.failed(key)
            return
        slot = self._in_slot[key] = self._free.pop()
        self.slots.write(slot, adapter)
        self._table.loaded(key, now_s)
