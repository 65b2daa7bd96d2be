"""The KV memory of one replica: the cache's tensors and the block pool over them, shared by successive engines.

A bundle's engine is created while the previous engine serves. If both have the same KV layout, the new engine shares
the old engine's memory: each block is held by one engine at a time, free blocks are available to both, and prefix
hashes include the version. Engines run in separate threads: a thread that changes the pool holds `lock`. A block may be
freed while a kernel still reads it, so each engine orders its steps on the device after the steps that the other
engines have started.
"""

import threading
from dataclasses import dataclass
from weakref import WeakSet

import torch

from models.decoder.decoder import Decoder
from services.llm.engine.config import EngineConfig, KvKind
from services.llm.engine.device import DeviceStream
from services.llm.engine.kv.block_pool import BlockPool
from services.llm.engine.kv.cache import KvCache


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout properties that two engines must share to use the same memory."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    kind: KvKind
    block_tokens: int
    num_blocks: int


class KvMemory:
    """The memory for one layout of keys and values."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self._layout = _layout_of(decoder, config)
        self._streams: WeakSet[DeviceStream] = WeakSet()
        self.lock = threading.Lock()
        self.pool = BlockPool(config.num_blocks)
        self.cache = KvCache(
            decoder.config,
            config.num_blocks + 1,
            config.block_tokens,
            self._layout.dtype,
            self._layout.device,
            config.kv_kind,
        )  # one more block: padding rows write there, and it replaces blocks behind a window in block tables

    def fits(self, decoder: Decoder, config: EngineConfig) -> bool:
        """Whether an engine of this decoder and configuration can use the memory."""
        return self._layout == _layout_of(decoder, config)

    def join(self, stream: DeviceStream) -> None:
        """Add an engine's stream to the users of the memory, until the stream is deleted."""
        with self.lock:
            self._streams.add(stream)

    def order(self, stream: DeviceStream) -> None:
        """Order this stream's later work after the steps that other engines have started. Does not wait."""
        with self.lock:
            others = [other for other in self._streams if other is not stream]
        stream.follow(others)


def _layout_of(decoder: Decoder, config: EngineConfig) -> _Layout:
    shape, head_VD = decoder.config, decoder.head_weight_VD
    return _Layout(
        shape.num_hidden_layers,
        shape.num_key_value_heads,
        shape.head_dim,
        head_VD.dtype,
        head_VD.device,
        config.kv_kind,
        config.block_tokens,
        config.num_blocks,
    )
