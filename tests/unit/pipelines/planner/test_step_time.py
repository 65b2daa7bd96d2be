"""The time of a step: published runs that no constant was fitted to, and what each part must do."""

import pytest

from pipelines.planner.devices import Gpus, device_named, parse_gpus
from pipelines.planner.mesh import Layout
from pipelines.planner.step_time import LAUNCH_S, LAUNCHES_PER_LAYER, group_link, mfu, step_time
from tests.support.planned_models import LLAMA_2_7B, SMOLLM2_135M, gpt

MEGATRON = [
    (24, 2_304, 24, 1, 1, 32, 512, 137),
    (30, 3_072, 32, 2, 1, 64, 512, 138),
    (36, 4_096, 32, 4, 1, 128, 512, 142),
    (40, 6_144, 48, 8, 1, 256, 1_024, 135),
    (48, 8_192, 64, 8, 2, 512, 1_536, 138),
    (60, 10_240, 80, 8, 4, 1_024, 1_792, 140),
    (80, 12_288, 96, 8, 8, 1_536, 2_304, 148),
    (96, 16_384, 128, 8, 16, 1_920, 2_160, 155),
    (105, 20_480, 128, 8, 35, 2_520, 2_520, 163),
    (128, 25_600, 160, 8, 64, 3_072, 3_072, 163),
]
"""Layers, hidden size, heads, TP, PP, A100-80s, batch and TFLOP/s a GPU, 1.7 to 1,008 billion parameters: table 1 of Narayanan et al. 2021 (arXiv 2104.04473), Megatron-LM at
sequences of 2,048 with full recomputation, whose FLOPs are counted with it (their equation 3). The row of 1,536 GPUs has 145.6 billion parameters, the nearest to 130."""
CLOSE = range(128, 2_000)
"""GPUs of the rows from 7.5 to 310 billion: small models before fused attention were slower, and the largest ran interleaved schedules, which are not planned."""


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row[5]} GPUs")
def test_megatrons_published_runs_lie_within_the_interval(row: tuple[int, ...]) -> None:
    """Within the interval, and most of them within a tenth of the prediction, though no run with tensor or pipeline parallelism was fitted."""
    layers, hidden, heads, tensor, pipeline, num_gpus, batch, published = row
    gpus, length, vocab = Gpus(device_named("a100-80"), num_gpus), 2_048, 51_200
    data = num_gpus // tensor // pipeline
    layout = Layout(data=data, tensor=tensor, pipeline=pipeline, accumulation=batch // data, checkpointing="full")
    flops = 96 * batch * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))

    step = step_time(gpt(layers, hidden, heads), layout, length, gpus)

    if num_gpus in CLOSE:
        assert flops / step.total_s / num_gpus / 1e12 == pytest.approx(published, rel=0.1)
    assert flops / step.high_s < published * 1e12 * num_gpus < flops / step.low_s


@pytest.mark.parametrize(("micro_batch", "percent"), [(1, 40), (2, 47), (4, 51), (8, 53)])
def test_130_billion_on_128_gpus_reach_40_to_53_percent(micro_batch: int, percent: int) -> None:
    """A regression: an earlier fit's values by micro-batch, for FSDP with gradients in bf16, lie within the interval."""
    gpus, shape = parse_gpus("128xa100-80"), gpt(70, 12_288, 96, 50_304)
    layout = Layout(shard=128, micro_batch=micro_batch, checkpointing="full")

    step = step_time(shape, layout, 2_048, gpus, reduce_bytes=2)

    low, high = (100 * mfu(shape, layout, 2_048, gpus, seconds) for seconds in (step.high_s, step.low_s))
    assert low < percent < high


def test_a_device_without_runs_says_so_and_widens() -> None:
    """It has the efficiency of the nearest chip; H200's is the H100's own."""
    layout = Layout(shard=8)
    seen, unseen = (step_time(LLAMA_2_7B, layout, 2_048, parse_gpus(f"8x{name}")) for name in ("h100", "h200"))

    assert seen.notes == ()
    assert unseen.notes[0].startswith("no fitted run is on h200")
    assert unseen.high_s / unseen.low_s > (seen.high_s / seen.low_s) ** 2
    assert unseen.products_s == pytest.approx(seen.products_s)


def test_no_step_is_faster_than_the_peak_allows() -> None:
    """Not even at the fast end of a wide interval."""
    for name in ("b200", "l4", "a100-80"):
        gpus = parse_gpus(f"8x{name}")
        layout = Layout(data=8, micro_batch=64, accumulation=8)
        step = step_time(LLAMA_2_7B, layout, 512, gpus)

        assert mfu(LLAMA_2_7B, layout, 512, gpus, step.low_s) <= 1 + 1e-9, name


def test_collectives_are_counted_by_rings() -> None:
    """DDP: twice the gradients' 4 bytes, by (n - 1) / n; FSDP2: weights in bf16 twice and gradients in fp32 once, for each micro-batch."""
    gpus, held = parse_gpus("8xh100"), LLAMA_2_7B.num_parameters
    ddp = step_time(LLAMA_2_7B, Layout(data=8, accumulation=3), 2_048, gpus).collectives
    fsdp = step_time(LLAMA_2_7B, Layout(shard=8, accumulation=3), 2_048, gpus).collectives

    assert [one.num_bytes for one in ddp] == [pytest.approx(2 * 7 / 8 * 4 * held)]
    assert [one.num_bytes for one in fsdp] == [pytest.approx(3 * 7 / 8 * 4 * held)] * 2
    assert {one.link for one in (*ddp, *fsdp)} == {"NVLink 4"}


def test_a_group_over_nodes_uses_the_network_cards_of_its_members() -> None:
    """All eight of a node give 400 GB/s, beneath NVLink's 450; a group with one member in each node has one card."""
    gpus = parse_gpus("16xh100")

    assert group_link(gpus, size=8, span=8) == ("NVLink 4", 450e9)
    assert group_link(gpus, size=16, span=16) == ("network", 400e9)
    assert group_link(gpus, size=2, span=16) == ("network", 50e9)


def test_a_small_step_waits_for_its_launches() -> None:
    """A micro-batch of a few tokens takes as long as its kernels take to start, and a larger one is nearly free."""
    gpus = parse_gpus("1xh100")
    few, more = (step_time(SMOLLM2_135M, Layout(micro_batch=size), 16, gpus) for size in (1, 4))
    floor = SMOLLM2_135M.num_layers * LAUNCHES_PER_LAYER * LAUNCH_S

    assert few.products_s + few.attention_s + few.traffic_s + few.launch_s == pytest.approx(floor)
    assert more.total_s == pytest.approx(few.total_s)


def test_checkpointing_computes_the_forward_pass_again() -> None:
    """A third more in the products of layers, and two of seven of fused attention; the model's own FLOPs, and so the MFU's numerator, stay."""
    gpus = parse_gpus("8xa100-80")
    plain, again = (
        step_time(LLAMA_2_7B, Layout(shard=8, micro_batch=4, checkpointing=kept), 2_048, gpus)
        for kept in ("none", "full")
    )

    assert again.attention_s == pytest.approx(plain.attention_s * 9 / 7)
    assert 1.3 < again.products_s / plain.products_s < 4 / 3
