"""Unsupported settings stop the start with their name and the fix; KV pools are sized by free memory."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from services.errors import CheckpointError, ConfigError
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.cost_model import number_sizes
from services.llm.engine.engine import Engine
from services.llm.engine.kv.cache import KvCache
from services.llm.ranking.deployment import ranking_pool
from services.llm.serving.card import Card, KvPoolSize, check_support, limits_of, open_card, pool_of
from services.llm.text.deployment import TextDeployment
from services.settings.settings import Settings
from tests.support.engine.attention_shapes import attention_shape
from tests.support.engine.engines import build_decoder, build_items

GIB = 2**30
H100 = Card("cuda:0", "H100", (9, 0), 78 * GIB)
QWEN3 = attention_shape(16, 8, 128, layers=28)
"""The heads and layers of Qwen3-1.7B."""


T4, A100, L4 = (
    replace(H100, name=name, capability=at) for name, at in (("T4", (7, 5)), ("A100", (8, 0)), ("L4", (8, 9)))
)
OLD = "LLM_DTYPE: bfloat16 needs .* 8.0, and the T4 has .* 7.5; set it to float32, .* at most 64 dimensions"


@pytest.mark.parametrize(
    ("card", "dtype", "kv_kind", "refused"),
    [
        (T4, "bfloat16", "model", OLD),
        (T4, "float32", "int8", None),
        (A100, "bfloat16", "fp8", "KV_KIND: fp8 needs .* 8.9, and the A100 .* 8.0; set it to int8 or model"),
        (A100, "bfloat16", "model", None),
        (L4, "bfloat16", "fp8", None),
    ],
)
def test_what_a_card_has_no_instructions_for_is_refused(card, dtype, kv_kind, refused) -> None:
    """bf16 before Ampere and fp8 before Ada are rejected, since Triton's compiler would fail in the first step."""
    with nullcontext() if refused is None else pytest.raises(ConfigError, match=f"TAILRACE_{refused}"):
        check_support(card, "TAILRACE_LLM_DTYPE", dtype, kv_kind)


@pytest.mark.parametrize(("card", "head_dim", "refused"), [(T4, 64, False), (T4, 128, True), (A100, 128, False)])
def test_heads_that_exceed_the_shared_memory_are_refused(card: Card, head_dim: int, refused: bool) -> None:
    """Large heads on an older GPU are rejected for any dtype, since its compiler would fail in the first step."""
    pool, shape = KvPoolSize(card, "TAILRACE_KV_NUM_BLOCKS", 64, 0.4), attention_shape(16, 8, head_dim, layers=2)

    with pytest.raises(ConfigError, match=r"heads have 128 dimensions.*T4") if refused else nullcontext():
        assert pool.fit(EngineConfig(), shape, 4, 10 * GIB).num_blocks == 64


def test_what_the_limits_took_of_a_card_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are measured before a text replica allocates its pool, and the memory used is returned on GPUs."""
    done: list[str] = []
    monkeypatch.setattr("services.llm.serving.card.measure_limits", lambda *_: done.append("measure"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))

    limits_of(T4, "cpu", "float32")
    with pytest.raises(CheckpointError):
        TextDeployment(Settings(text_path="nowhere"))

    assert done == ["measure", "empty", "measure"]


def test_a_card_that_is_absent_is_refused_at_the_start() -> None:
    """The error for a missing device states the visible devices; a CPU keeps the configured blocks."""
    absent = r"TAILRACE_LLM_DEVICE: cuda:99 does not exist, this process sees \d+ CUDA devices"
    with pytest.raises(ConfigError, match=absent):
        ranking_pool(Settings(llm_device="cuda:99"))

    assert open_card("cpu") is None
    on_a_cpu = ranking_pool(Settings()).fit(EngineConfig(num_blocks=77), QWEN3, 2, 0)
    assert on_a_cpu.num_blocks == 77


@pytest.mark.parametrize("kind", ["model", "int8", "fp8"])
def test_a_pool_takes_its_share_of_the_memory_that_was_free_at_the_start(kind) -> None:
    """The pool takes its fraction of the memory that was free at startup, for the next bundle's pool too."""
    config, pool = EngineConfig(kv_kind=kind), KvPoolSize(H100, "TAILRACE_KV_NUM_BLOCKS", None, 0.4)
    cache = KvCache(QWEN3, 2, 16, torch.bfloat16, torch.device("cpu"), kind)

    first = pool.fit(config, QWEN3, 2, 74 * GIB).num_blocks
    second = pool.fit(config, QWEN3, 2, 74 * GIB - first * 16 * cache.bytes_per_token).num_blocks

    assert cache.bytes_per_token == 28 * number_sizes(QWEN3, 2, kind).kv_token_layer
    assert first == second == int(0.4 * 78 * GIB / (16 * cache.bytes_per_token))


def test_the_next_bundle_takes_the_running_pool_though_no_second_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next bundle reuses the running pool; a decoder with other heads is rejected with the size that fits."""
    monkeypatch.setattr("services.llm.serving.card.free_bytes_of", lambda device: 20 * 2**20)
    small = replace(H100, free_bytes=60 * 2**20)
    pool, config = KvPoolSize(small, "TAILRACE_KV_NUM_BLOCKS", None, 0.7), EngineConfig()
    items = build_items(1)
    decoder = build_decoder(items)
    running = Engine(decoder, replace(config, num_blocks=9), items=items, bundle_version="v1")

    assert pool_of(decoder, config, pool, running.memory).num_blocks == 9
    with pytest.raises(ConfigError, match=r"TAILRACE_KV_MEMORY_SHARE: .* set it to 0\.\d+ or less"):
        pool_of(build_decoder(items, kv_heads=4), config, pool, running.memory)


@pytest.mark.parametrize(
    ("num_blocks", "share", "free_gib", "refused"),
    [
        (65_536, 0.4, 74, "KV_NUM_BLOCKS: 65,536 KV .* set it to 41.* or less, or remove it"),
        (None, 0.7, 50, "KV_MEMORY_SHARE: .* 54.6 GiB, .* 50.0 GiB free .* set it to 0.59 or less"),
        (None, 0.4, 2, "LLM_DEVICE: .* set it to a card with more free memory"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_size_that_does(num_blocks, share, free_gib, refused) -> None:
    """The error names the setting, the requested and the free memory, and a value that fits."""
    pool = KvPoolSize(H100, "TAILRACE_KV_NUM_BLOCKS", num_blocks, share)

    with pytest.raises(ConfigError, match=f"TAILRACE_{refused}"):
        pool.fit(EngineConfig(), QWEN3, 2, free_gib * GIB)


@pytest.mark.parametrize("free_gib", [6.1, 30.4, 50.4, 73.9])
def test_the_share_that_a_refusal_names_fits(free_gib: float) -> None:
    """The proposed fraction is rounded down, so it fits."""
    free_bytes = int(free_gib * GIB)
    with pytest.raises(ConfigError) as refused:
        KvPoolSize(H100, "TAILRACE_KV_NUM_BLOCKS", None, 0.9).fit(EngineConfig(), QWEN3, 2, free_bytes)
    named = re.search(r"set it to (\d\.\d+) or less", str(refused.value))
    assert named is not None

    config = KvPoolSize(H100, "TAILRACE_KV_NUM_BLOCKS", None, float(named[1])).fit(EngineConfig(), QWEN3, 2, free_bytes)

    assert config.num_blocks > 0
