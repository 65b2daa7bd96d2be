"""The estimates of `tailrace plan load` against hand calculations from the repository's measurements."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.planner.load import (
    LOADED_TIMES,
    TIERS,
    Demand,
    adapter_mb,
    kv_block_bytes,
    kv_blocks,
    parse_mix,
    plan,
    read_basis,
    store_mb,
)
from pipelines.planner.names import resident_share
from services.errors import ConfigError

MIX = {"precomputed": 0.5, "llm": 0.2, "student": 0.25, "popular": 0.05}
MEASURED = read_basis(None)
NUM_ITEMS = MEASURED["bundle"]["num_items"]


def demand(**changes: Any) -> Demand:
    """Build a demand over the measured catalogue."""
    usual = {"rate": 100.0, "users": 1_024, "items": NUM_ITEMS, "events_rate": 0.0, "mix": MIX, "kv_users": 10}
    return Demand(**{**usual, **changes})


@pytest.mark.parametrize("part", ["gateway", "llm", "worker"])
def test_cores_are_idle_plus_rate_times_cost(part: str) -> None:
    """Cores are the part's idle cost plus the costs of each tier's and the events' rates."""
    request_ms = sum(MIX[tier] * MEASURED["cpu_ms_per_request"][tier].get(part, 0.0) for tier in TIERS)
    event_ms = MEASURED["cpu_ms_per_event"].get(part, 0.0)

    (line,) = [line for line in plan(demand(events_rate=50.0), MEASURED).lines if line.part == part]

    idle_ms = MEASURED["idle_cpu_ms_per_s"].get(part, 0.0)
    assert line.cores == pytest.approx((idle_ms + 100 * request_ms + 50 * event_ms) / 1_000)


def test_each_further_name_takes_an_llm_and_a_bundle_in_each_gateway() -> None:
    """Three names need three LLM replicas, and the same number of gateways with more memory."""
    one, three = ({line.part: line for line in plan(demand(rate=1.0, names=names), MEASURED).lines} for names in (1, 3))

    bundle_mb = LOADED_TIMES * MEASURED["bundle"]["student_bytes"] / 2**20
    assert three["llm"].memory_mb == pytest.approx(3 * one["llm"].memory_mb)
    assert three["gateway"].memory_mb - one["gateway"].memory_mb == pytest.approx(2 * bundle_mb)
    assert {part for part in one if three[part] != one[part]} == {"llm", "gateway"}


def test_names_that_share_replicas_take_the_memory_of_the_resident_names() -> None:
    """Ten of a thousand names in memory need one replica, and say how many requests find their model there."""
    one = plan(demand(rate=1.0), MEASURED)
    many = plan(demand(rate=1.0, names=1_000, resident_names=10), MEASURED)
    llm, alone = (next(line for line in made.lines if line.part == "llm") for made in (many, one))

    assert llm.replicas == alone.replicas
    assert llm.memory_mb - alone.memory_mb == pytest.approx(9 * MEASURED["bundle"]["decoder_bytes"] / 2**20)
    assert any("find their model in memory" in note for note in many.notes)


def test_names_that_are_adapters_share_their_decoders() -> None:
    """Of a thousand names a hundred share each decoder: all in memory need ten decoders and a thousand adapters."""
    own, shared = (
        next(line for line in plan(demand(rate=1.0, names=1_000, resident_names=1_000, **more), MEASURED).lines[2:3])
        for more in ({}, {"adapters_per_base": 100})
    )
    few = plan(demand(rate=1.0, names=1_000, resident_names=5, adapters_per_base=100), MEASURED)
    bundle = MEASURED["bundle"]
    saved = 990 * bundle["decoder_bytes"] / 2**20 - 1_000 * adapter_mb(bundle)

    assert own.part == shared.part == "llm"
    assert own.memory_mb - shared.memory_mb == pytest.approx(saved)
    assert any(note.startswith("5 decoders, each with 100 names") for note in few.notes)


def test_an_adapter_takes_no_more_than_two_copies_of_its_matrices() -> None:
    """The bound holds for a decoder of square matrices, whose adapters of rank 16 are a fourth of the weights."""
    bundle = {"hidden_size": 128, "kv_heads": 4, "head_dim": 32, "decoder_bytes": 4 * 2**20}

    assert adapter_mb(bundle) == 2 * 4 / 4


@pytest.mark.parametrize(("num_names", "num_resident", "zipf"), [(100, 10, 1.0), (100, 50, 0.8), (40, 20, 0.0)])
def test_the_share_of_resident_names_is_that_of_a_least_recently_used_cache(
    num_names: int, num_resident: int, zipf: float
) -> None:
    """The approximation agrees with a replay of requests through such a cache."""
    weights = np.arange(1, num_names + 1) ** -zipf
    asked = np.random.default_rng(0).choice(num_names, 40_000, p=weights / weights.sum())
    cache: dict[int, None] = {}
    hits = 0
    for name in asked.tolist():
        hits += name in cache
        cache.pop(name, None)
        cache[name] = None
        if len(cache) > num_resident:
            del cache[next(iter(cache))]

    assert resident_share(num_names, num_resident, zipf) == pytest.approx(hits / len(asked), abs=0.02)


def test_kv_blocks_hold_whole_prompts() -> None:
    """Blocks hold keys and values of each layer, and users do not share a prompt's last block."""
    assert kv_block_bytes({"layers": 2, "kv_heads": 2, "head_dim": 32}) == 2 * 2 * 2 * 32 * 4 * 16
    assert kv_blocks(10, prompt_tokens=17) == 20
    assert kv_blocks(1) == 13
    assert kv_blocks(1, block_tokens=1) == 201


def test_store_holds_a_row_per_user_and_the_log_every_event() -> None:
    """Users and events take their measured sizes, items no rows; extrapolations are noted."""
    kinds = MEASURED["store"]["by_kind"]
    one, many = (plan(demand(users=users), MEASURED).memory_gb for users in (1, 1 + 2**20))
    no_lists = [
        store_mb(demand(users=2**20, items=items, mix=parse_mix("student=1")), MEASURED) for items in (1, 1_000_000)
    ]
    larger = plan(demand(items=2 * NUM_ITEMS, events_rate=1_000.0), MEASURED)

    assert many - one == pytest.approx((kinds["history"]["mean_bytes"] + kinds["list"]["mean_bytes"]) / 1_024)
    assert no_lists == [kinds["history"]["mean_bytes"]] * 2
    assert larger.log_gb_per_day == pytest.approx(1_000 * 86_400 * MEASURED["log_bytes_per_event"] / 1e9)
    assert [note.split()[0] for note in larger.notes] == ["Measured", "Catalogues", "A", "CPU"]


@pytest.mark.parametrize(
    ("make", "option"),
    [
        *(
            (partial(demand, **{name: value}), name)
            for name in ("rate", "users", "items", "names")
            for value in (0, -1)
        ),
        *((partial(demand, rate=value), "rate") for value in (float("nan"), float("inf"), 1e300)),
        (partial(demand, events_rate=-1.0), "events-rate"),
        (partial(demand, kv_users=10**400), "kv-users"),
        (partial(demand, names=9, adapters_per_base=3), "adapters-per-base"),
        (partial(demand, mix={**MIX, "llm": 0.9}), "mix"),
        (partial(demand, mix=dict.fromkeys(TIERS, 0.5) | {"llm": -0.5}), "mix"),
        *((partial(parse_mix, wrong), "mix") for wrong in ("llm", "llm=x", "gpu=1", "", "llm=0.5,llm=1")),
    ],
)
def test_an_impossible_demand_is_refused(make: Callable[[], object], option: str) -> None:
    """The error names the option and the fix, also for a repeated tier."""
    with pytest.raises(ConfigError, match=f"--{option}: .*; "):
        make()


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"benchmark": "serve"},
        {"benchmark": "plan capacity"},
        MEASURED | {"store": {"by_kind": {"user_id": {"mean_bytes": 1}}}},
        MEASURED | {"bundle": {**MEASURED["bundle"], "num_items": 0}},
        MEASURED | {"memory_mb": "large"},
        MEASURED | {"rate": None},
        None,
    ],
)
def test_another_file_is_not_a_basis(tmp_path: Path, content: object) -> None:
    """A missing file, another benchmark's file, and missing or mistyped measurements are rejected."""
    path = tmp_path / "basis.json"
    if content is not None:
        path.write_text(json.dumps(content))

    with pytest.raises(ConfigError, match=r"--basis: .*benchmarks\.plan capacity"):
        read_basis(path)
