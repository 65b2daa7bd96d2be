"""The time of a step: published runs that were not used in the fit, and the required behaviour of each part."""

from dataclasses import replace

import pytest

from benchmarks.plan.cited_runs import CITED_RUNS, CitedRun, predict_cited
from pipelines.planner.devices import parse_gpus
from pipelines.planner.mesh import Execution, ParallelLayout
from pipelines.planner.step_time import LAUNCH_S, LAUNCHES_PER_LAYER, fitted, group_link, mfu, step_time
from tests.support.planned_models import LLAMA_2_7B, SMOLLM2_135M

CLOSE = {"Narayanan", "torchtitan", "Llama"}
"""First words of sources with runs within a quarter of the prediction; Megatron-LM's smallest lacks fused attention."""


@pytest.mark.parametrize(
    "run", CITED_RUNS, ids=lambda run: f"{run.source.split()[0]} {run.shape.name} {run.layout.name}"
)
def test_cited_runs_lie_within_the_interval(run: CitedRun) -> None:
    """Cited runs lie within the interval, and large runs on known chips within a quarter of the prediction."""
    planned = predict_cited(run)

    assert planned.low < run.tokens_per_s < planned.high
    if run.group(fitted()) == "parallel" and run.layout.num_gpus > 64 and run.source.split()[0].rstrip(",") in CLOSE:
        assert run.tokens_per_s == pytest.approx(planned.mfu, rel=0.25)


def test_llama_405b_on_512_gpus_is_planned_as_torchtitan_runs_it() -> None:
    """1F1B reaches 100 tokens per second and GPU, two interleaved stages per rank 128; this trainer is slower."""
    runs = [
        run for run in CITED_RUNS if run.layout.pipeline > 1 and run.source.endswith("llama3_h100_202412_torchtitan.md")
    ]
    ours = predict_cited(replace(runs[0], layout=replace(runs[0].layout, execution=Execution()))).mfu

    for run, published in zip(runs, (100, 128), strict=True):
        assert predict_cited(run).mfu == pytest.approx(published, rel=0.15)
    assert ours < 0.8 * predict_cited(runs[0]).mfu


@pytest.mark.parametrize(
    ("execution", "part"),
    [
        (Execution(sequence_parallel=True), "traffic_s"),
        (Execution(vocab_parallel=True), "products_s"),
        (Execution(async_tp=True), "exposed_s"),
        (Execution(keep_gathered=True), "exposed_s"),
        (Execution(virtual_stages=4), "bubble_s"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_technique_makes_its_part_of_the_step_shorter(execution: Execution, part: str) -> None:
    """The technique reduces its part of the step, and the interval comes from other trainers' runs."""
    layout = ParallelLayout(shard=2, tensor=4, pipeline=2, accumulation=8, checkpointing="full")
    gpus = parse_gpus("16xh100")
    plain, faster = (
        step_time(LLAMA_2_7B, variant, 2_048, gpus) for variant in (layout, replace(layout, execution=execution))
    )

    assert getattr(faster, part) < 0.95 * getattr(plain, part)
    assert faster.group == "parallel"


def test_a_device_without_runs_says_so_and_widens() -> None:
    """A device without fitted runs uses the nearest chip's efficiency with a wider interval."""
    steps = {
        name: step_time(LLAMA_2_7B, ParallelLayout(shard=8), 2_048, parse_gpus(f"8x{name}"))
        for name in ("h100", "h200", "h800", "a6000")
    }
    seen, unseen = steps["h100"], steps["a6000"]

    assert [steps[name].group for name in steps] == ["data", "data", "data", "unseen"]
    assert unseen.notes[0].startswith("no fitted run is on a6000")
    assert unseen.high_s / unseen.low_s > (seen.high_s / seen.low_s) ** 2
    assert steps["h200"].products_s == pytest.approx(seen.products_s)


def test_no_step_is_faster_than_the_peak_allows() -> None:
    """The MFU stays at most 1 even at the fast end of a wide interval."""
    for name in ("b200", "l4", "a100-80"):
        gpus = parse_gpus(f"8x{name}")
        layout = ParallelLayout(data=8, micro_batch=64, accumulation=8)
        step = step_time(LLAMA_2_7B, layout, 512, gpus)

        assert mfu(LLAMA_2_7B, layout, 512, gpus, step.low_s) <= 1 + 1e-9, name


def test_collectives_are_counted_by_rings() -> None:
    """DDP and FSDP2 collectives have the byte counts of ring algorithms."""
    gpus, held = parse_gpus("8xh100"), LLAMA_2_7B.num_parameters
    ddp = step_time(LLAMA_2_7B, ParallelLayout(data=8, accumulation=3), 2_048, gpus).collectives
    fsdp = step_time(LLAMA_2_7B, ParallelLayout(shard=8, accumulation=3), 2_048, gpus).collectives

    assert [collective.num_bytes for collective in ddp] == [pytest.approx(2 * 7 / 8 * 4 * held)]
    assert [collective.num_bytes for collective in fsdp] == [pytest.approx(3 * 7 / 8 * 4 * held)] * 2
    assert {collective.link for collective in (*ddp, *fsdp)} == {"NVLink 4"}


def test_a_group_over_nodes_uses_the_network_cards_of_its_members() -> None:
    """A group uses the network cards of its members in a node: 400 GB/s for eight GPUs, 50 GB/s for one."""
    gpus = parse_gpus("16xh100")

    assert group_link(gpus, size=8, span=8) == ("NVLink 4", 450e9)
    assert group_link(gpus, size=16, span=16) == ("network", 400e9)
    assert group_link(gpus, size=2, span=16) == ("network", 50e9)


def test_a_small_step_waits_for_its_launches() -> None:
    """A small micro-batch takes the launch time of its kernels, so a slightly larger one costs no more."""
    gpus = parse_gpus("1xh100")
    few, more = (step_time(SMOLLM2_135M, ParallelLayout(micro_batch=size), 16, gpus) for size in (1, 4))
    floor = SMOLLM2_135M.num_layers * LAUNCHES_PER_LAYER * LAUNCH_S

    assert few.products_s + few.attention_s + few.traffic_s + few.launch_s == pytest.approx(floor)
    assert more.total_s == pytest.approx(few.total_s)


def test_checkpointing_computes_the_forward_pass_again() -> None:
    """Layer products take a third more and fused attention 2/7 more, while the model's own FLOPs do not change."""
    gpus = parse_gpus("8xa100-80")
    plain, again = (
        step_time(LLAMA_2_7B, ParallelLayout(shard=8, micro_batch=4, checkpointing=kept), 2_048, gpus)
        for kept in ("none", "full")
    )

    assert again.attention_s == pytest.approx(plain.attention_s * 9 / 7)
    assert 1.3 < again.products_s / plain.products_s < 4 / 3
