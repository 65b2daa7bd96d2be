"""The estimates of `tailrace plan`."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.capacity.plan import Demand, kv_block_bytes, kv_blocks, parse_mix, plan, read_basis
from services.errors import ConfigError

MIX = {"precomputed": 0.5, "llm": 0.2, "student": 0.25, "popular": 0.05}
MEASURED: dict[str, Any] = {
    "benchmark": "capacity",
    "time": "2026-11-21T08:00:00Z",
    "machine": {"cpus": 2, "arch": "x86_64"},
    "rate": 25.0,
    "load_average_1m": 0.5,
    "bundle": {
        "num_items": 1_000,
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 32,
        "hidden_size": 64,
        "decoder_bytes": 1_024_000,
        "student_bytes": 512_000,
    },
    "idle_cpu_ms_per_s": {"gateway": 10.0, "llm": 5.0},
    "cpu_ms_per_request": {
        "precomputed": {"gateway": 1.0, "valkey": 0.5},
        "llm": {"gateway": 2.0, "llm": 10.0},
        "student": {"gateway": 2.0},
        "popular": {"gateway": 1.0},
    },
    "cpu_ms_per_event": {"worker": 2.0},
    "head_ms_per_100k_items": 4.0,
    "log_bytes_per_event": 50.0,
    "memory_mb": {"gateway": 300.0, "llm": 500.0, "valkey": 20.0},
    "store": {"by_kind": {"user_id": {"mean_bytes": 1_024}, "item_id": {"mean_bytes": 512}}},
}


def demand(**changes: Any) -> Demand:
    """Build a small demand."""
    usual = {"rate": 100.0, "users": 1_024, "items": 1_000, "events_rate": 0.0, "mix": MIX, "kv_users": 10}
    return Demand(**{**usual, **changes})


def cores(part: str, **changes: Any) -> float:
    """Return a part's busy cores."""
    return next(line.cores for line in plan(demand(**changes), MEASURED).lines if line.part == part)


def test_cores_are_idle_plus_rate_times_cost() -> None:
    """Each tier's share of the rate times its cost, plus the part's idle cost, calculated by hand."""
    gateway_ms = 0.5 * 1 + 0.2 * 2 + 0.25 * 2 + 0.05 * 1

    assert cores("gateway") == pytest.approx((10 + 100 * gateway_ms) / 1_000)
    assert cores("llm") == pytest.approx((5 + 100 * 0.2 * 10) / 1_000)
    assert cores("worker", events_rate=50.0) == pytest.approx(50 * 2 / 1_000)


def test_kv_blocks_hold_whole_prompts() -> None:
    """Keys and values of each layer, and no block is shared by two users' ends."""
    assert kv_block_bytes(MEASURED["bundle"]) == 2 * 2 * 2 * 32 * 4 * 16
    assert kv_blocks(10, prompt_tokens=17) == 20
    assert kv_blocks(1) == 13
    assert kv_blocks(1, block_tokens=1) == 201


def test_store_holds_a_row_per_user_and_item() -> None:
    """Users and events have their measured sizes."""
    one, many = (plan(demand(users=users), MEASURED).memory_gb for users in (1, 1 + 1_048_576))

    assert many - one == pytest.approx(1.0)
    assert plan(demand(events_rate=1_000.0), MEASURED).log_gb_per_day == pytest.approx(1_000 * 86_400 * 50 / 1e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": 0.0}, "--rate: 0.0 is not more than 0"),
        ({"events_rate": -1.0}, "--events-rate: -1.0 is less than 0"),
        ({"mix": {**MIX, "llm": 0.9}}, "--mix: the shares make 1.7; give shares that make 1"),
    ],
)
def test_an_impossible_demand_is_refused(changes: dict[str, Any], words: str) -> None:
    """The error names the option and the fix."""
    with pytest.raises(ConfigError) as refused:
        demand(**changes)

    assert str(refused.value).startswith(words)


def test_a_mix_names_tiers() -> None:
    """A tier that is not named has no share."""
    assert parse_mix("llm=0.3, student=0.7") == {"precomputed": 0, "llm": 0.3, "student": 0.7, "popular": 0}
    for wrong in ("llm", "llm=x", "gpu=1", ""):
        with pytest.raises(ConfigError, match="--mix"):
            parse_mix(wrong)


def test_the_committed_basis_is_usable(tmp_path: Path) -> None:
    """A plan can be made from the results file in the repository; another kind of file is refused."""
    made = plan(demand(), read_basis(None))
    other = tmp_path / "serve.json"
    other.write_text(json.dumps({"benchmark": "serve"}))

    assert made.cores > 0
    for wrong in (other, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=r"--basis: .*benchmarks\.capacity"):
            read_basis(wrong)
