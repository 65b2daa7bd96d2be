"""Serving: concurrency under a load, and replicas versus shards."""

from dataclasses import replace

import pytest

from models.errors import InvalidRequest
from pipelines.planner.devices import parse_gpus
from pipelines.planner.memory import kv_bytes_per_token
from pipelines.planner.options import ServingLoad
from pipelines.planner.serving import Sharding, decode, plan_serving, prefill
from pipelines.planner.shapes import plain_shape
from tests.support.planned_models import LLAMA_3_8B, SMOLLM2_135M, llama

LOAD = ServingLoad(rate=20, prompt=1_024, output=256)


def ways(gpus: str, load: ServingLoad = LOAD) -> tuple[Sharding, ...]:
    return plan_serving(LLAMA_3_8B, parse_gpus(gpus), load).ways


def test_replicas_win_for_a_small_model() -> None:
    """Shards of a small model wait for all-reduces, so tokens per GPU fall with the number of shards."""
    plan = plan_serving(
        llama(num_kv_heads=8, num_layers=16, hidden_size=2_048, ffn_size=8_192, num_heads=32, head_dim=64),
        parse_gpus("8xh100"),
        LOAD,
    )
    rates = [way.best_tokens_per_s_per_gpu for way in plan.ways]

    assert plan.verdict.startswith("Replicas win: 8 of one GPU each")
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]


def test_a_model_that_does_not_fit_on_one_gpu_needs_shards() -> None:
    """The verdict names the setting for shards, or says that no number of shards suffices."""
    large = llama(num_layers=80, hidden_size=8_192, num_heads=64, num_kv_heads=8, ffn_size=28_672, vocab_size=128_256)

    assert "TENSOR_PARALLEL_SIZE) to 2" in plan_serving(large, parse_gpus("8xh100"), LOAD).verdict
    assert "does not fit on 2" in plan_serving(large, parse_gpus("2xl4"), LOAD).verdict


def test_decode_reads_bytes_and_prefill_computes() -> None:
    """Decode of few rows is bound by weight bytes, a long prompt by FLOPs, and a tiny model by overhead."""
    device = parse_gpus("1xh100").device

    assert decode(LLAMA_3_8B, device, LOAD, rows=8).bound == "memory"
    assert prefill(LLAMA_3_8B, device, LOAD).bound == "compute"
    assert decode(SMOLLM2_135M, device, LOAD, rows=1).bound == "overhead"


def test_beams_share_their_context() -> None:
    """A level of 32 beams reads the context once and computes for all beams."""
    plan = plan_serving(LLAMA_3_8B, parse_gpus("1xh100"), replace(LOAD, beams=32))
    beams, one = plan.phases[-1], decode(LLAMA_3_8B, plan.gpus.device, replace(LOAD, output=1), rows=1)

    assert beams.num_bytes == pytest.approx(one.num_bytes, rel=0.01)
    assert beams.flops == pytest.approx(32 * one.flops, rel=0.01)


def test_concurrency_is_what_the_memory_holds() -> None:
    """Concurrency is the number of whole contexts that fit next to weights and framework."""
    (way,) = ways("1xh100")
    row = (LOAD.prompt + LOAD.output) * kv_bytes_per_token(LLAMA_3_8B)
    usable = 0.95 * parse_gpus("1xh100").device.memory_bytes

    assert way.memory.total <= usable < way.memory.total + row


def test_running_requests_follow_littles_law() -> None:
    """The number of decoding requests is the arrival rate times the decode time."""
    for rate in (1.0, 5.0, 10.0):
        (way,) = ways("1xh100", replace(LOAD, rate=rate))

        assert way.running is not None
        assert way.step_s is not None
        assert way.running == pytest.approx(rate * LOAD.output * way.step_s, rel=0.01) or way.running < 1


def test_more_load_takes_longer_until_it_is_refused_with_the_gpus_that_bear_it() -> None:
    """Latency grows with load; an infeasible load is rejected with the number of GPUs that can serve it."""
    times = [ways("1xh100", replace(LOAD, rate=rate))[0].ttft_s for rate in (1, 10, 20)]

    with pytest.raises(InvalidRequest) as caught:
        ways("1xh100", replace(LOAD, rate=1_000))
    number = caught.value.fix.split()[1]

    assert times == sorted(times, key=lambda seconds: seconds or 0)
    assert caught.value.field == "--rate"
    assert any(way.running for way in ways(f"{number}xh100", replace(LOAD, rate=1_000)))
    with pytest.raises(InvalidRequest):
        ways(f"{int(number) - 8}xh100", replace(LOAD, rate=1_000))


def test_a_smaller_cache_holds_more_requests() -> None:
    """fp8 keys and values allow nearly twice the concurrency."""
    plain, packed = (ways("1xh100", load)[0] for load in (LOAD, replace(LOAD, kv_kind="fp8")))

    assert 1.8 < packed.concurrency / plain.concurrency < 2


def test_only_decoders_are_served() -> None:
    """Other models are rejected by option."""
    with pytest.raises(InvalidRequest, match="--serve"):
        plan_serving(plain_shape(1e6, 1e9), parse_gpus("1xl4"), LOAD)
