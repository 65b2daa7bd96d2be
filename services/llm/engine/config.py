"""The engine's knobs, all on one screen."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from services.errors import ConfigError

KvKind = Literal["model", "int8", "fp8"]
WeightKind = Literal["model", "int8"]
CpuKernels = Literal["compiled", "torch"]
_KINDS = {"kv_kind": get_args(KvKind), "weight_kind": get_args(WeightKind), "cpu_kernels": get_args(CpuKernels)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine. Tokens of prefill and text decode share one budget per step, beam rows have their own."""

    block_tokens: int = 16
    """Tokens of one KV block: the unit of memory and of the prefix cache."""
    num_blocks: int = 1_024
    kv_kind: KvKind = "model"
    """How keys and values are kept: in the model's dtype, or in one byte a number."""
    weight_kind: WeightKind = "model"
    """How the layers' matrices are kept: in the model's dtype, or in int8. On a CPU with compiled kernels alone."""
    cpu_kernels: CpuKernels = "compiled"
    """What runs on a CPU. Compiled kernels are built at the first start; without a compiler torch runs, with a warning."""
    kernel_cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "tailrace")
    """Where compiled kernels are kept."""
    max_num_batched_tokens: int = 1_024
    max_chunk_tokens: int = 512
    """What one request may prefill in one step, so that a long prompt leaves room for others."""
    max_beam_rows: int = 1_024
    max_running: int = 32
    max_waiting: int = 128
    default_beam_width: int = 32
    """Beams of a request that names none and asks for fewer items than this."""
    uses_graphs: bool = True
    """Whether decode and beam steps are recorded and replayed, where the device is CUDA."""
    is_asynchronous: bool | None = None
    """Whether the next step is planned while one runs, and `step` gives what the one before brought. None: where the device is CUDA."""
    ageing_s: float = 1.0
    """Waiting this long is worth one priority class, so that nothing waits for ever."""
    tile_tokens: int = 512
    """Context tokens that attention looks at in one go."""
    tile_queries: int = 256
    """Query rows that attention handles in one go."""

    def __post_init__(self) -> None:
        """Refuse what could never run. Raises ConfigError naming the key."""
        for name, kinds in _KINDS.items():
            if getattr(self, name) not in kinds:
                raise ConfigError(f"{name}: must be {' or '.join(kinds)}, got {getattr(self, name)!r}")
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"{name}: must be positive, got {value}")
        if self.tile_tokens % self.block_tokens:
            raise ConfigError(
                f"tile_tokens: must be whole blocks of {self.block_tokens} tokens, got {self.tile_tokens}"
            )
