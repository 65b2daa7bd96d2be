"""Selection of layouts, and reasons against all others."""

from itertools import product

import pytest

from models.errors import InvalidRequest, TailraceError
from pipelines.planner.devices import parse_gpus
from pipelines.planner.layouts import USABLE, best_layouts, enough_gpus, plan_training
from pipelines.planner.memory import training_memory
from pipelines.planner.mesh import Execution, ParallelLayout, bubble_of_ideal, bubble_of_step, layout_asked
from pipelines.planner.shapes import Shape, plain_shape
from pipelines.planner.step_time import step_time
from tests.support.planned_models import LLAMA_2_7B, LLAMA_3_8B, SMOLLM2_135M, gpt, llama


def test_the_bubble_of_eight_stages_and_32_micro_batches() -> None:
    """The bubble is 21.9 % of the ideal time and 17.9 % of the step."""
    assert round(100 * bubble_of_ideal(8, 32), 1) == 21.9
    assert round(100 * bubble_of_step(8, 32), 1) == 17.9


def test_a_step_with_its_bubble_is_so_much_longer() -> None:
    """The planned pipeline has this idle fraction, apart from optimizer and communication."""
    plan = plan_training(llama(num_layers=32), parse_gpus("8xa100-80"), 32, 2_048, number=100)
    (made,) = [made for made in plan.best if made.layout.pipeline == 8]

    assert made.step.bubble_s / (made.step.total_s - made.step.optimizer_s) == pytest.approx(
        bubble_of_step(8, made.layout.accumulation)
    )


@pytest.mark.parametrize(
    ("shape", "gpus", "length", "words"),
    [
        (LLAMA_2_7B, "4x4090", 2_048, ("FSDP2 4: its states (weights, gradients, Adam) take 27.0 GB", "LoRA or QLoRA")),
        (LLAMA_3_8B, "8xh100", 1_048_576, ("context parallelism would share it",)),
    ],
    ids=["seven billion on four cards of 24 GB", "a row that is too long"],
)
def test_what_does_not_fit_is_refused_by_what_does_not(
    shape: Shape, gpus: str, length: int, words: tuple[str, ...]
) -> None:
    """The refusal states the size of the states per GPU or of a row, and unsupported alternatives."""
    plan = plan_training(shape, parse_gpus(gpus), 32, length)

    assert plan.best == ()
    assert all(word in plan.refusal for word in (*words, "not offered by this trainer"))


def test_resnet_50_on_four_gpus_is_ddp() -> None:
    """A small model is planned as DDP, and only data parallelism and sharding are considered."""
    resnet = plain_shape(25.6e6, 8.2e9)

    for batch in (16, 256, 1_024):
        plan = plan_training(resnet, parse_gpus("4xa100"), batch, 1)

        assert plan.best[0].layout.name == "DDP 4", batch
        assert set(plan.smallest) <= {"DDP", "FSDP2", "DDP x FSDP2"}


def test_a_model_that_fits_on_each_gpu_is_not_sharded_over_slow_links() -> None:
    """A model of 8 billion parameters is sharded; a small model on two GPUs gets no tensor parallelism."""
    large = best_layouts(LLAMA_3_8B, parse_gpus("8xh100"), 64, 4_096)
    small = best_layouts(SMOLLM2_135M, parse_gpus("2xl4"), 32, 1_024)

    assert large[0].shard == 8
    assert small[0].tensor == small[0].pipeline == 1


def test_130_billion_on_128_gpus_are_sharded_or_tensor_and_pipeline_parallel() -> None:
    """The best layouts use FSDP2 or tensor parallelism over all GPUs, and DDP does not fit."""
    plan = plan_training(gpt(70, 12_288, 96, 50_304), parse_gpus("128xa100-80"), 1_024, 2_048)

    assert len(plan.best) == 3
    for made in plan.best:
        layout = made.layout
        assert layout.shard == 128 or (layout.tensor > 1 and layout.num_gpus == 128), layout
    assert any(made.layout.shard == 128 for made in plan.best)
    assert "DDP" in plan.smallest


@pytest.mark.parametrize(
    ("shape", "gpus", "batch", "length"),
    [
        (SMOLLM2_135M, "1xh100", 32, 1_024),
        (SMOLLM2_135M, "6xl4", 48, 512),
        (LLAMA_3_8B, "16xa100-40", 64, 2_048),
        (gpt(48, 7_168, 56), "64xh100", 512, 2_048),
        (plain_shape(300e6, 60e9, 4e8), "8xl40s", 256, 1),
    ],
)
def test_every_layout_uses_all_gpus_for_the_whole_batch_within_the_memory(
    shape: Shape, gpus: str, batch: int, length: int
) -> None:
    """The three best layouts have different meshes, fit into memory, and are ordered by cost."""
    cluster = parse_gpus(gpus)
    plan = plan_training(shape, cluster, batch, length)
    meshes = {(made.layout.data, made.layout.shard, made.layout.tensor, made.layout.pipeline) for made in plan.best}

    assert 1 <= len(plan.best) == len(meshes) <= 3
    for made in plan.best:
        assert (made.layout.num_gpus, made.layout.batch) == (cluster.number, batch)
        assert made.memory.total <= USABLE * cluster.device.memory_bytes
        assert made.step.low_s <= made.step.total_s <= made.step.high_s
    assert [made.cost for made in plan.best] == sorted(made.cost for made in plan.best)


def test_the_best_is_no_slower_than_any_other_that_fits() -> None:
    """The best layout is within 5 % of the fastest by brute force, because simplicity counts."""
    gpus, batch = parse_gpus("8xa100-40"), 32
    times = []
    for shard, tensor, micro_batch, kept in product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), ("none", "selective", "full")
    ):
        ways = 8 // tensor
        if ways % shard or batch % (ways * micro_batch):
            continue
        layout = ParallelLayout(
            data=ways // shard,
            shard=shard,
            tensor=tensor,
            micro_batch=micro_batch,
            accumulation=batch // ways // micro_batch,
            checkpointing=kept,  # type: ignore[arg-type]
        )
        if training_memory(LLAMA_2_7B, layout, 2_048).total <= USABLE * gpus.device.memory_bytes:
            times.append(step_time(LLAMA_2_7B, layout, 2_048, gpus).total_s)

    best = plan_training(LLAMA_2_7B, gpus, batch, 2_048).best[0]

    assert best.step.total_s <= 1.05 * min(times)


@pytest.mark.parametrize("text", ["tp2,pp2,fsdp2", "TP2 PP2 DP2", "pp4+tp2,full", "fsdp8,mb2,selective"])
def test_a_layout_that_is_asked_about_is_planned_only(text: str) -> None:
    """Only the given mesh is planned, with its micro-batch and checkpointing if given."""
    gpus = parse_gpus("8xa100-80")
    asked = layout_asked(text, gpus.number)
    plan = plan_training(LLAMA_3_8B, gpus, 32, 2_048, asked=asked)
    layouts = [made.layout for made in (*plan.best, *plan.smallest.values())]

    assert plan.best or plan.refusal
    for layout in layouts:
        sizes = (layout.data, layout.shard, layout.tensor, layout.pipeline)
        assert sizes == (asked.data, asked.shard, asked.tensor, asked.pipeline)
        assert layout.micro_batch == (asked.micro_batch or layout.micro_batch)
        assert layout.checkpointing == (asked.checkpointing or layout.checkpointing)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("tp8,pp2", "--layout"),
        ("tp0,dp8", "--layout"),
        ("tp2,tp4", "--layout"),
        ("ep8", "--layout"),
        ("", "--layout"),
        ("tp3,dp2", "--layout"),
        ("pp8", "--virtual-stages"),
        ("dp8,mb3", "--batch"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_its_option(text: str, field: str) -> None:
    """The error names the option: GPU count, repeated size, indivisible heads, or batch."""
    number = 6 if "tp3" in text else 8

    def plan() -> None:
        execution = Execution(virtual_stages=65 if field == "--virtual-stages" else 1)
        asked = layout_asked(text, number)
        plan_training(LLAMA_3_8B, parse_gpus(f"{number}xh100"), 32, 512, asked=asked, execution=execution)

    with pytest.raises(TailraceError) as caught:
        plan()

    assert caught.value.field == field


def test_a_refusal_names_the_gpus_that_would_be_enough() -> None:
    """The refusal names the smallest power of two of GPUs whose memory holds the states."""
    plan = plan_training(LLAMA_2_7B, parse_gpus("2xl4"), 32, 2_048)

    assert "GPUs would share the states" in plan.refusal
    assert enough_gpus(LLAMA_2_7B, parse_gpus("2xl4"), 2_048) == 8


def test_a_batch_that_gpus_cannot_share_is_refused_by_its_option() -> None:
    """Seven rows cannot be divided over four GPUs."""
    with pytest.raises(InvalidRequest) as caught:
        plan_training(plain_shape(1e6, 1e9), parse_gpus("4xl4"), 7, 128)

    assert caught.value.field == "--batch"
