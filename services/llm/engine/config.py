"""The configuration of an engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from services.errors import ConfigError

KvKind = Literal["model", "int8", "fp8"]
WeightKind = Literal["model", "int8", "int8_all", "int4"]
"""How weights are stored: in the model's dtype; the layers' matrices in int8; the embedding and the head in int8 too; the matrices in 4 bits, those two in int8."""
CpuKernels = Literal["compiled", "torch"]
MATRIX_BITS: dict[WeightKind, int | None] = {"model": None, "int8": 8, "int8_all": 8, "int4": 4}
"""Bits of a weight in the layers' matrices, without its scales; None: in the model's dtype."""
TABLE_BITS: dict[WeightKind, int | None] = {"model": None, "int8": None, "int8_all": 8, "int4": 8}
"""The same of the embedding and the head."""
_MULTIPLIER_BYTES = 1 / 32
"""Of a 4-bit weight: its share in its group's multiplier (`services.llm.engine.cpu.quantise`)."""
INTERNAL_FIELDS = {
    "cpu_kernels": "compiled kernels fall back to torch by themselves; torch alone is for comparison in tests and benchmarks",
    "kernel_cache": "one folder per user, shared by all stacks; images carry kernels that were compiled ahead",
    "uses_graphs": "graphs are always faster on CUDA; off is for comparison",
    "is_asynchronous": "follows from the device; set in tests of both ways",
    "ageing_s": "part of the scheduling policy, like its order of priorities",
    "tile_queries": "a tile of the torch reference kernels, chosen by measurement",
}
"""The fields of EngineConfig that no setting reaches, and why. Every other field is reached by a setting."""

_KINDS = {"kv_kind": get_args(KvKind), "weight_kind": get_args(WeightKind), "cpu_kernels": get_args(CpuKernels)}


def weight_bytes(weight_kind: WeightKind, number_bytes: float) -> tuple[float, float]:
    """Return the bytes of a weight in the layers' matrices, and in the embedding and the head, of a decoder whose dtype has `number_bytes`. Scales, one a row, are not counted."""
    matrix_bits, table_bits = MATRIX_BITS[weight_kind], TABLE_BITS[weight_kind]
    matrix = number_bytes if matrix_bits is None else matrix_bits / 8 + (_MULTIPLIER_BYTES if matrix_bits == 4 else 0)
    return matrix, number_bytes if table_bits is None else table_bits / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine. Tokens of prefill and text decode share one budget per step, beam rows have their own."""

    block_tokens: int = 16
    """Tokens of one KV block: the unit of memory and of the prefix cache."""
    num_blocks: int = 1_024
    kv_kind: KvKind = "model"
    """How keys and values are stored: in the model's dtype, or in one byte per number."""
    weight_kind: WeightKind = "model"
    """How weights are stored. Kinds other than the model's dtype: CPU with compiled kernels only."""
    cpu_kernels: CpuKernels = "compiled"
    """The kernels on a CPU. Compiled ones are built at the first start; without a compiler torch runs, with a warning."""
    kernel_cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "tailrace")
    """The folder of compiled kernels."""
    max_num_batched_tokens: int = 1_024
    max_chunk_tokens: int = 512
    """The most tokens of one prompt in one step, so that a long prompt leaves room for others."""
    max_beam_rows: int = 1_024
    target_step_s: float | None = None
    """How long a step may take: its tokens and its beams are bounded by their measured time. None: by the two limits above only."""
    max_running: int = 32
    max_waiting: int = 128
    default_beam_width: int = 32
    """Beams of a request that names no beam width and asks for fewer items than this."""
    uses_graphs: bool = True
    """Whether decode and beam steps are captured in CUDA graphs, where the device is CUDA."""
    is_asynchronous: bool | None = None
    """Whether the next step is planned while one runs, and `step` returns the results of the previous one. None: on CUDA only."""
    ageing_s: float = 1.0
    """Waiting this long raises a request by one priority class, so that nothing waits for ever."""
    tile_tokens: int = 512
    """Context tokens in one tile of attention."""
    tile_queries: int = 256
    """Query rows in one tile of attention."""

    def __post_init__(self) -> None:
        """Check the values. Raises ConfigError naming the field."""
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
