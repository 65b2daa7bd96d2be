"""The configuration of an engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from services.errors import ConfigError

KvKind = Literal["model", "int8", "fp8"]
WeightKind = Literal["model", "int8", "int8_all", "int4"]
"""Storage format of weights.

In order: the model's dtype; the layers' matrices in int8; the embedding and the head in int8 too; the matrices in 4
bits with embedding and head in int8."""
CpuKernels = Literal["compiled", "torch"]
MATRIX_BITS: dict[WeightKind, int | None] = {"model": None, "int8": 8, "int8_all": 8, "int4": 4}
"""Bits per weight in the layers' matrices, without scales; None for the model's dtype."""
TABLE_BITS: dict[WeightKind, int | None] = {"model": None, "int8": None, "int8_all": 8, "int4": 8}
"""Bits per weight in the embedding and the head."""
_MULTIPLIER_BYTES = 1 / 32
"""Additional bits per 4-bit weight for its group's multiplier (`services.llm.engine.cpu.quantise`)."""
INTERNAL_FIELDS = {
    "cpu_kernels": "compiled kernels fall back to torch; only tests and benchmarks choose torch, for comparison",
    "kernel_cache": "one folder per user, shared by all stacks; images carry kernels that were compiled ahead",
    "uses_graphs": "graphs are always faster on CUDA; off is for comparison",
    "is_asynchronous": "follows from the device; set in tests of both ways",
    "ageing_s": "part of the scheduling policy, like its order of priorities",
    "tile_queries": "a tile of the torch reference kernels, chosen by measurement",
}
"""The fields of EngineConfig without a setting, and why. Every other field has a setting."""

_LEAST = {"num_speculative_tokens": 0}
_KINDS = {"kv_kind": get_args(KvKind), "weight_kind": get_args(WeightKind), "cpu_kernels": get_args(CpuKernels)}


def weight_bytes(weight_kind: WeightKind, number_bytes: float) -> tuple[float, float]:
    """Return the bytes per weight in the layers' matrices, and in embedding and head.

    `number_bytes` is the size of the decoder's dtype. Scales, one per row, are not counted.
    """
    matrix_bits, table_bits = MATRIX_BITS[weight_kind], TABLE_BITS[weight_kind]
    matrix = number_bytes if matrix_bits is None else matrix_bits / 8 + (_MULTIPLIER_BYTES if matrix_bits == 4 else 0)
    return matrix, number_bytes if table_bits is None else table_bits / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine.

    Prefill and text decode share one token budget per step; beam rows have a separate budget.
    """

    block_tokens: int = 16
    """Tokens per KV block: the unit of memory and of the prefix cache."""
    num_blocks: int = 1_024
    kv_kind: KvKind = "model"
    """Storage format of keys and values: the model's dtype, or one byte per number."""
    weight_kind: WeightKind = "model"
    """Storage format of weights. Formats other than the model's dtype require a CPU with compiled kernels."""
    cpu_kernels: CpuKernels = "compiled"
    """The kernels on a CPU. Compiled kernels are built at the first start; without a compiler torch runs, with a
    warning."""
    kernel_cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "tailrace")
    """Folder of compiled kernels."""
    max_num_batched_tokens: int = 1_024
    max_chunk_tokens: int = 512
    """Maximum number of tokens of one prompt in one step, so that a long prompt leaves room for others."""
    max_beam_rows: int = 1_024
    target_step_s: float | None = None
    """Maximum duration of a step: its tokens and beams are bounded by their measured time. None: only the two limits
    above apply."""
    num_speculative_tokens: int = 0
    """Maximum number of draft tokens per text and step; 0 for none."""
    adapter_memory_mib: int = 256
    """Memory of the adapters' slots, which is taken when the first adapter is loaded."""
    adapter_rank: int = 16
    """Rank of a slot: the largest rank of an adapter."""
    tensor_parallel_size: int = 1
    """Processes that share the decoder's layers; each has its own device, or the same CPU."""
    rank_timeout_s: float = 10.0
    """Time after which a rank that does not answer fails the engine."""
    max_running: int = 32
    max_waiting: int = 128
    default_beam_width: int = 32
    """Beam width for requests without a beam width that ask for fewer items than this."""
    uses_graphs: bool = True
    """Whether decode and beam steps are captured in CUDA graphs on a CUDA device."""
    is_asynchronous: bool | None = None
    """Whether the next step is planned during the running step, and `step` returns the results of the previous step.
    None: only on CUDA."""
    ageing_s: float = 1.0
    """Waiting time that raises a request by one priority class, so that no request waits forever."""
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
            if isinstance(value, int | float) and not isinstance(value, bool) and value < _LEAST.get(name, 1e-9):
                raise ConfigError(f"{name}: must be positive, got {value}")
        if self.tile_tokens % self.block_tokens:
            raise ConfigError(
                f"tile_tokens: must be whole blocks of {self.block_tokens} tokens, got {self.tile_tokens}"
            )
