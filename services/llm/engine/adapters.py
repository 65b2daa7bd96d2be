"""Which adapters are in an engine's slots: `ResidencyTable` decides, with bytes as the budget.

All adapters that may be asked for stay in the host's memory; those in use, and of the others the most recently used,
are in slots. A request holds its adapter's slot until it ends. A request whose adapter finds no free slot is refused,
and the adapter gets the next slot that becomes free.
"""

from collections.abc import Callable

import torch

from models.decoder.adapter import Adapter
from models.decoder.config import DecoderConfig
from services.errors import ConfigError, InvalidRequest, Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.forward.adapters import AdapterSlots, slot_bytes
from services.residency.state import ResidencyTable

_RETRY_AFTER_S = 0.1


def slots_of(config: EngineConfig, decoder: DecoderConfig, rank: int, number_bytes: int) -> tuple[int, int]:
    """Return the number of slots of an engine of this decoder and the bytes of a slot, for an adapter of this rank.

    Raises ConfigError naming the setting if the engine cannot hold it.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError("tensor_parallel_size: adapters run on one rank; set it to 1")
    if rank > config.adapter_rank:
        raise ConfigError(f"adapter_rank: {config.adapter_rank} is below an adapter's rank {rank}; set it to {rank}")
    size = slot_bytes(decoder, config.adapter_rank, number_bytes)
    num_slots = min(config.max_running, config.adapter_memory_mib * 2**20 // size)
    if not num_slots:
        needed = -(-size // 2**20)
        raise ConfigError(f"adapter_memory_mib: {config.adapter_memory_mib} holds no adapter; give {needed}")
    return num_slots, size


class AdapterPool:
    """The adapters of one engine by key. The slots' memory is held while any adapter is loaded or in use."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        use: Callable[[AdapterSlots | None], object] = lambda slots: None,
    ) -> None:
        """`use` is called with the slots before an adapter is in use, and with None before their memory is freed."""
        self._config, self._decoder = config, decoder
        self._dtype, self._device = dtype, device
        self._use = use
        self._known: dict[str, Adapter] = {}
        self._num_held = 0
        self.slots: AdapterSlots | None = None
        self._slot_bytes, self._free = 0, list[int]()
        self._table = ResidencyTable()
        self._in_slot: dict[str, int] = {}

    def add(self, key: str, adapter: Adapter) -> None:
        """Add an adapter, whose content the key identifies. Raises ConfigError if it does not fit."""
        num_slots, self._slot_bytes = slots_of(self._config, self._decoder, adapter.rank, self._dtype.itemsize)
        if self.slots is None:
            self.slots = AdapterSlots(self._decoder, num_slots, self._config.adapter_rank, self._dtype, self._device)
            self._free = list(range(num_slots))
            self._table = ResidencyTable(num_slots * self._slot_bytes)
            self._use(self.slots)
        self._known.setdefault(key, adapter)

    def remove(self, key: str) -> None:
        """Forget an adapter. Requests that hold its slot finish; later requests are refused."""
        self._known.pop(key, None)
        self._free_unused()

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
        self._num_held += 1
        return self._in_slot[key]

    def release(self, key: str, now_s: float) -> None:
        """Give a slot back."""
        self._table.release(key)
        self._num_held -= 1
        self._settle(now_s)
        self._free_unused()

    def _free_unused(self) -> None:
        if not self._known and not self._num_held:
            self.slots = None
            self._in_slot.clear()
            self._use(None)

    def _settle(self, now_s: float) -> None:
        """Empty and write the slots that the table names, until it names no more."""
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
        assert self.slots is not None, "a known adapter has slots"
        self.slots.write(slot, adapter)
        self._table.loaded(key, now_s)
