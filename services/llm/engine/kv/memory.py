"""The KV memory of one replica: the cache's tensors and the block pool over them, shared by the engines that follow one another.

A bundle's engine is made while the one before it serves. Where both lay out keys and values alike, the new one takes the old one's
memory: each block is held by one of them at a time, blocks that nobody holds are free to both, and prefix hashes carry the version.
Engines run in threads of their own: whoever changes the pool holds `lock`. A block may be freed while a kernel still reads it, so
each engine orders its steps on the device after those that the others have started.
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
    """What two engines must have in common to share memory."""

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
        """Add an engine's stream to those that use the memory, until it is gone."""
        with self.lock:
            self._streams.add(stream)

    def order(self, stream: DeviceStream) -> None:
        """Order what this stream starts next after the steps that other engines have started. Does not wait."""
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
