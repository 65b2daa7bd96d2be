"""The graphics card of one replica: checks that it supports the settings, and sizes the engines' KV pools.

Checked when a replica starts, so that unsupported settings fail the start with their names, instead of a later step
with a compiler's message. On a CPU every setting is accepted and the configured number of blocks applies.
"""

from dataclasses import dataclass, replace

import torch

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from services.errors import ConfigError
from services.llm.engine.config import EngineConfig, KvKind
from services.llm.engine.cost.cost_model import number_sizes
from services.llm.engine.cost.machine_limits import MachineLimits, measure_limits
from services.llm.engine.kv.memory import KvMemory

_LEAST_BLOCKS = 2
_OLD_HEAD_DIM = 64
"""Maximum head size whose attention fits into the 64 KB of shared memory of a card before compute capability 8.0; heads
of 128 need 66 KB or more."""
_WORKSPACE_SHARE = 0.05
"""Fraction of the memory free at the start that stays free for captured graphs and activations."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device, and its free memory when the replica started."""

    device: str
    name: str
    capability: tuple[int, int]
    free_bytes: int


def open_card(device: str) -> Card | None:
    """Return the card of a device, None for a CPU. Raises ConfigError if this process does not see the card."""
    if device == "cpu":
        return None
    index, count = torch.device(device).index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"TAILRACE_LLM_DEVICE: {device} does not exist, this process sees {count} CUDA devices; set it to "
            + (f"cuda:{count - 1} or lower" if count else "cpu, or give the process a card and its driver")
        )
    properties = torch.cuda.get_device_properties(index)
    return Card(device, properties.name, (properties.major, properties.minor), free_bytes_of(device))


def free_bytes_of(device: str) -> int:
    return torch.cuda.mem_get_info(torch.device(device).index or 0)[0]


def check_support(card: Card | None, dtype_setting: str, dtype: str, kv_kind: KvKind) -> None:
    """Reject a dtype or a KV cache format that the card does not support. Raises ConfigError."""
    if card is None:
        return
    have = f"the {card.name} has compute capability {card.capability[0]}.{card.capability[1]}"
    if dtype == "bfloat16" and card.capability < (8, 0):
        raise ConfigError(
            f"{dtype_setting}: bfloat16 needs compute capability 8.0, and {have}; set it to float32, "
            f"which runs there for models whose heads have at most {_OLD_HEAD_DIM} dimensions"
        )
    if kv_kind == "fp8" and card.capability < (8, 9):
        raise ConfigError(f"TAILRACE_KV_KIND: fp8 needs compute capability 8.9, and {have}; set it to int8 or model")


def limits_of(card: Card | None, device: str, dtype: str) -> MachineLimits:
    """Measure the machine's limits, before an engine is created.

    On a card the memory of the measurement is returned to the driver: in torch's cache (1.2 GiB) a pool's check would
    count it as used.
    """
    limits = measure_limits(torch.device(device), getattr(torch, dtype))
    if card is not None:
        torch.cuda.empty_cache()
    return limits


def pool_of(
    decoder: Decoder, config: EngineConfig, pool: "KvPoolSize | None", memory: KvMemory | None = None
) -> EngineConfig:
    """Return the configuration with the running engine's pool if it fits, otherwise with a pool for the free memory.

    Raises ConfigError.
    """
    if pool is None or pool.card is None:
        return config
    if memory is not None:
        shared = replace(config, num_blocks=memory.pool.num_blocks)
        if memory.fits(decoder, shared):
            return shared
    number_bytes = decoder.head_weight_VD.element_size()
    return pool.fit(config, decoder.config, number_bytes, free_bytes_of(pool.card.device))


@dataclass(frozen=True, slots=True)
class KvPoolSize:
    """Number of blocks of an engine's KV pool: `num_blocks`, otherwise `share` of the card's memory.

    The fraction refers to the memory that was free when the replica started, not when a model is loaded. The next
    bundle's engine takes the running engine's pool; a model with another KV layout needs a separate pool of the same
    size.
    """

    card: Card | None
    setting: str
    num_blocks: int | None
    share: float

    def fit(self, config: EngineConfig, shape: DecoderConfig, number_bytes: int, free_bytes: int) -> EngineConfig:
        """Return the configuration with the number of blocks.

        Raises ConfigError if they do not fit into free memory, or the model's heads into the card's shared memory.
        """
        if self.card is None:
            return config
        if self.card.capability < (8, 0) and shape.head_dim > _OLD_HEAD_DIM:
            raise ConfigError(
                f"TAILRACE_LLM_DEVICE: the model's heads have {shape.head_dim} dimensions, and {self.card.device} "
                f"({self.card.name}) has shared memory for {_OLD_HEAD_DIM} at most; set it to cpu, or to a card of "
                "compute capability 8.0 or higher"
            )
        sizes = number_sizes(shape, number_bytes, config.kv_kind)
        block_bytes = config.block_tokens * shape.num_hidden_layers * sizes.kv_token_layer
        wanted = self.num_blocks or int(self.share * self.card.free_bytes / block_bytes)
        most = int((free_bytes - _WORKSPACE_SHARE * self.card.free_bytes) / block_bytes)
        if _LEAST_BLOCKS <= wanted <= most:
            return replace(config, num_blocks=wanted)
        raise ConfigError(self._refusal(wanted, most, block_bytes, free_bytes))

    def _refusal(self, wanted: int, most: int, block_bytes: float, free_bytes: int) -> str:
        assert self.card is not None, "only a card refuses"
        setting, fix = self.setting, f"{max(most, 0)} or less, or remove it"
        if self.num_blocks is None:
            setting = "TAILRACE_KV_MEMORY_SHARE"
            percent = int(100 * max(most, 0) * block_bytes / self.card.free_bytes)  # rounded down, so that it fits
            fix = f"{percent / 100:.2f} or less"
        if most < _LEAST_BLOCKS:
            setting, fix = "TAILRACE_LLM_DEVICE", "a card with more free memory"
        return (
            f"{setting}: {wanted:,} KV blocks take {wanted * block_bytes / _GIB:.1f} GiB, and {self.card.device} "
            f"({self.card.name}) has {free_bytes / _GIB:.1f} GiB free after the weights; set it to {fix}"
        )
