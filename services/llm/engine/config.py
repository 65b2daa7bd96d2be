"""The engine's knobs, all on one screen."""

from dataclasses import dataclass
from typing import Literal, get_args

from services.errors import ConfigError

KvKind = Literal["model", "int8", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine. Tokens of prefill and text decode share one budget per step, beam rows have their own."""

    block_tokens: int = 16
    """Tokens of one KV block: the unit of memory and of the prefix cache."""
    num_blocks: int = 1_024
    kv_kind: KvKind = "model"
    """How keys and values are kept: in the model's dtype, or in one byte a number."""
    max_step_tokens: int = 1_024
    max_chunk_tokens: int = 512
    """What one request may prefill in one step, so that a long prompt leaves room for others."""
    max_beam_rows: int = 1_024
    max_running: int = 32
    max_waiting: int = 128
    default_beam_width: int = 32
    """Beams of a request that names none and asks for fewer items than this."""
    ageing_s: float = 1.0
    """Waiting this long is worth one priority class, so that nothing waits for ever."""
    tile_tokens: int = 512
    """Context tokens that attention looks at in one go."""
    tile_queries: int = 256
    """Query rows that attention handles in one go."""

    def __post_init__(self) -> None:
        """Refuse what could never run. Raises ConfigError naming the key."""
        for name in self.__slots__:
            if name != "kv_kind" and getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)}")
        if self.kv_kind not in get_args(KvKind):
            raise ConfigError(f"kv_kind: must be {' or '.join(get_args(KvKind))}, got {self.kv_kind!r}")
        if self.tile_tokens % self.block_tokens:
            raise ConfigError(
                f"tile_tokens: must be whole blocks of {self.block_tokens} tokens, got {self.tile_tokens}"
            )
