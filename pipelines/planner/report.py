"""A plan in words and tables, as lines of text. Gigabytes are 10^9 bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipelines.planner.devices import Gpus
from pipelines.planner.layouts import CHECKPOINTING, USABLE, PlannedLayout, TrainingPlan, why_not
from pipelines.planner.memory import Memory, serving_memory, training_memory
from pipelines.planner.mesh import PLAIN, bubble_of_ideal, bubble_of_step
from pipelines.planner.serving import FACTOR, ServingPlan, ServingStep, Sharding
from pipelines.planner.shapes import DecoderShape, PlainShape, Shape
from pipelines.planner.step_time import PlannedStepTime, mfu
from services.llm.engine.config import KvKind

_MOVES = {
    "compute": "a faster chip; fp8 products (--dtype fp8), which this trainer does not offer",
    "attention": "shorter rows",
    "memory": "fewer bytes a token between the kernels: fused ones, and less checkpointing where there is room",
    "communication": "larger micro-batches, which gather weights less often, overlap, or a faster link",
    "launches": "larger micro-batches, or fewer and larger GPUs",
    "bubble": "more micro-batches a step",
    "optimizer": "a larger batch a step, or states shared by more GPUs",
}
"""Remedies by the part that takes most of a training step."""
_SERVING_MOVES = {
    "memory": "weights and keys of fewer bytes, or more rows at a time, nearly free until compute takes as long",
    "compute": "a faster chip, or fewer tokens: shorter prompts, prefixes from the cache",
    "overhead": "more rows at a time; the work is too small for this device",
}


def describe_model(shape: Shape, gpus: Gpus) -> Iterator[str]:
    """Return the lines above every plan."""
    device = gpus.device
    if isinstance(shape, DecoderShape):
        sizes = (
            f"{shape.num_layers} layers of {shape.hidden_size:,}, {shape.vocab_size:,} rows of vocabulary; "
            f"{_stored(shape)}"
        )
    else:
        sizes = f"{shape.flops_per_sample / 1e9:g} GFLOP forward a sample"
    yield f"model      {shape.name}: {_amount(shape.num_parameters)} parameters, {sizes}"
    nodes = f" in {gpus.num_nodes} nodes" if gpus.num_nodes > 1 else ""
    yield (
        f"GPUs       {gpus.number} x {device.name}{nodes}: {device.memory_bytes / 1e9:.1f} GB, "
        f"{device.flops_per_s['bf16'] / 1e12:,.0f} TFLOP/s in {device.half}, "
        f"{device.memory_bytes_per_s / 1e9:,.0f} GB/s; {device.node_link} "
        f"{device.node_link_bytes_per_s / 1e9:.0f} GB/s, network {device.network_bytes_per_s / 1e9:g} GB/s a GPU"
    )
    yield f"           ({device.source})"
    yield from (f"note: {note}" for note in (shape.notes if isinstance(shape, DecoderShape) else ()))


def _stored(shape: DecoderShape) -> str:
    """Return the bytes of the stored weights, and the differences from a dense decoder with full attention."""
    words = [
        f"{shape.weight_bytes / 1e9:.2f} GB stored" + (f" ({shape.storage.method})" if shape.storage.method else "")
    ]
    if shape.experts is not None:
        words.append(f"{_amount(shape.forward_weights)} active a token")
    windows = sorted(set(shape.windows))
    words += [f"window of {window:,} tokens in {shape.windows.count(window)} layers" for window in windows]
    if shape.latent is not None:
        words.append(f"latent attention of {shape.cached_numbers} numbers a layer")
    return ", ".join(words)


def describe_training(plan: TrainingPlan, price: float | None = None) -> Iterator[str]:
    """Return the lines of a training's plan. `price` is the price of a GPU hour."""
    yield ""
    yield (
        f"TRAINING   {plan.batch:,} rows of {plan.length:,} tokens a step"
        if isinstance(plan.shape, DecoderShape)
        else f"TRAINING   {plan.batch:,} samples a step"
    )
    ours = "Tailrace: no sequence parallelism, whole vocabulary on each GPU, no asynchronous TP, one stage a rank"
    yield f"trainer    {ours if plan.execution == PLAIN else f'another, with {plan.execution.name}'}"
    if plan.refusal:
        yield f"does not fit: {plan.refusal}"
    else:
        yield from _table(
            ("", "layout", "micro-batch", "checkpointing", "GB a GPU", "step", "MFU"),
            [_layout_row(plan, number, made) for number, made in enumerate(plan.best, start=1)],
        )
        first = plan.best[0]
        yield from ("", *_memory_lines(f"memory of {first.layout.name}", first.memory))
        yield from _checkpointing_lines(plan, first)
        yield from ("", *_time_lines(first), *_collective_lines(first.step))
        yield bubble_sentence(plan.best, plan.execution.virtual_stages)
        yield training_sentence(first.step)
        yield from _cost_lines(plan, first, price)
    refused = {kind: why_not(made.memory, plan.gpus) for kind, made in plan.smallest.items() if " x " not in kind}
    yield from ("", *(f"{kind} only does not fit: {why}" for kind, why in refused.items() if why))
    yield from _training_notes(plan)


def describe_contexts(shape: DecoderShape, rows: int, length: int, kv_kind: KvKind) -> Iterator[str]:
    """Return the lines of the memory of `rows` contexts of this length on one GPU."""
    memory = serving_memory(shape, rows, length, kv_kind=kv_kind)
    yield from ("", *_memory_lines(f"memory of {rows:,} contexts of {length:,} tokens", memory))
    yield f"together {memory.total / 1e9:.1f} GB, with room for the allocator's gaps {memory.total / USABLE / 1e9:.1f}"


def describe_serving(plan: ServingPlan, price: float | None = None) -> Iterator[str]:
    """Return the lines of a deployment's plan. `price` is the price of a GPU hour."""
    load = plan.load
    yield ""
    yield f"SERVING    {load.rate:g} requests/s of {load.prompt:,} tokens in, {load.output:,} out"
    header = ("replicas x shards", "requests at once", "running", "step ms", "TTFT ms", "output tokens/s a GPU at most")
    yield from _table(header, [_sharding_row(way) for way in plan.ways])
    yield plan.verdict
    fitting = next((way for way in plan.ways if way.concurrency), None)
    if fitting is not None:
        yield from ("", *_memory_lines(f"memory of a GPU with {fitting.concurrency:,} requests", fitting.memory))
        if price is not None and fitting.best_tokens_per_s_per_gpu:
            cost = price / 3600 / fitting.best_tokens_per_s_per_gpu
            yield (
                f"cost       a million output tokens cost {1e6 * cost:.2f} at full concurrency, at {price:g} a "
                "GPU and hour"
            )
    yield ""
    yield from map(phase_sentence, plan.phases)
    yield (
        f"Times are within a factor of {FACTOR:g}: the shares of the data sheet are assumed, no published "
        "serving run was fitted"
    )


def training_sentence(step: PlannedStepTime) -> str:
    """Return the bound of a training step, in one sentence."""
    sides = {
        "compute": step.products_s,
        "attention": step.attention_s,
        "memory": step.traffic_s,
        "communication": step.exposed_s,
        "launches": step.launch_s,
        "bubble": step.bubble_s,
        "optimizer": step.optimizer_s,
    }
    side = max(sides, key=lambda name: sides[name])
    return (
        f"roofline   training step: bound by {side}, {100 * sides[side] / step.total_s:.0f} % of the time; "
        f"what would move it: {_MOVES[side]}"
    )


def phase_sentence(phase: ServingStep) -> str:
    return (
        f"roofline   {phase.name}: bound by {phase.bound} ({phase.num_bytes / 1e9:.1f} GB take "
        f"{1e3 * phase.memory_s:.2f} ms, {phase.flops / 1e12:.2g} TFLOP {1e3 * phase.compute_s:.2f} ms, "
        f"overhead {1e3 * phase.overhead_s:.2f} ms); what would move it: {_SERVING_MOVES[phase.bound]}"
    )


def bubble_sentence(candidates: Sequence[PlannedLayout], virtual_stages: int = 1) -> str:
    """Return the idle time of the pipelines among these layouts."""
    parts = []
    for layout in (made.layout for made in candidates if made.layout.pipeline > 1):
        sizes = (layout.pipeline, layout.accumulation, virtual_stages)
        of_ideal, of_step = 100 * bubble_of_ideal(*sizes), 100 * bubble_of_step(*sizes)
        parts.append(
            f"{layout.name} with {layout.accumulation} micro-batches idles {of_ideal:.1f} % of the ideal time, "
            f"{of_step:.1f} % of the step"
        )
    return f"bubble     {'; '.join(parts) or 'none: no pipeline among these layouts'}"


def _layout_row(plan: TrainingPlan, number: int, made: PlannedLayout) -> tuple[str, ...]:
    layout, step = made.layout, made.step
    share, most, least = (
        100 * mfu(plan.shape, layout, plan.length, plan.gpus, seconds)
        for seconds in (step.total_s, step.low_s, step.high_s)
    )
    return (
        str(number),
        layout.name,
        f"{layout.micro_batch} x {layout.accumulation}",
        layout.checkpointing,
        f"{made.memory.total / 1e9:.1f}",
        f"{_seconds(step.total_s)} ({_seconds(step.low_s)} to {_seconds(step.high_s)})",
        f"{share:.0f} % ({least:.0f} to {most:.0f})",
    )


def _sharding_row(way: Sharding) -> tuple[str, ...]:
    def known(value: float | None, scale: float = 1.0) -> str:
        return "-" if value is None else f"{scale * value:,.1f}"

    best = f"{way.best_tokens_per_s_per_gpu:,.0f}" if way.concurrency else "does not fit"
    return (
        f"{way.replicas} x {way.shards}",
        f"{way.concurrency:,}",
        known(way.running),
        known(way.step_s, 1e3),
        known(way.ttft_s, 1e3),
        best,
    )


def _memory_lines(title: str, memory: Memory) -> Iterator[str]:
    yield f"{title}, GB"
    yield from _table(
        (*memory.parts, "total"), [tuple(f"{size / 1e9:.2f}" for size in (*memory.parts.values(), memory.total))]
    )


def _checkpointing_lines(plan: TrainingPlan, first: PlannedLayout) -> Iterator[str]:
    if isinstance(plan.shape, PlainShape):
        return
    layouts = {kept: replace(first.layout, checkpointing=kept) for kept in CHECKPOINTING}
    parts = {kept: training_memory(plan.shape, layout, plan.length).parts for kept, layout in layouts.items()}
    sizes = (f"{kept} {memory['activations'] / 1e9:.1f}" for kept, memory in parts.items())
    yield f"activations by checkpointing, GB: {', '.join(sizes)}"


def _time_lines(made: PlannedLayout) -> Iterator[str]:
    step = made.step
    parts = {
        "products": step.products_s,
        "attention": step.attention_s,
        "traffic": step.traffic_s,
        "launches": step.launch_s,
        "collectives": step.exposed_s,
        "bubble": step.bubble_s,
        "optimizer": step.optimizer_s,
    }
    yield f"time of {made.layout.name}"
    yield from _table((*parts, "step"), [tuple(_seconds(seconds) for seconds in (*parts.values(), step.total_s))])


def _collective_lines(step: PlannedStepTime) -> Iterator[str]:
    for collective in step.collectives:
        yield (
            f"collective {collective.name}: {collective.num_bytes / 1e9:.2f} GB a step over {collective.link}, "
            f"{_seconds(collective.seconds)}, waited for {_seconds(collective.exposed_s)}"
        )


def _cost_lines(plan: TrainingPlan, first: PlannedLayout, price: float | None) -> Iterator[str]:
    samples = plan.batch * (plan.length if isinstance(plan.shape, DecoderShape) else 1)
    what = "tokens" if isinstance(plan.shape, DecoderShape) else "samples"
    line = f"speed      {samples / first.step.total_s:,.0f} {what}/s"
    if price is not None:
        cost = price * plan.gpus.number * first.step.total_s / 3600 / samples
        line += f"; a billion {what} cost {1e9 * cost:,.2f} at {price:g} a GPU and hour"
    yield line


def _training_notes(plan: TrainingPlan) -> Iterator[str]:
    notes = dict.fromkeys(note for made in plan.best for note in made.step.notes)
    if isinstance(plan.shape, PlainShape) and plan.shape.is_guessed:
        notes[
            f"that a sample keeps {plan.shape.activation_bytes / 1e6:,.0f} MB for the backward pass is a guess, "
            "and traffic follows from it: give --activation-mb"
        ] = None
    yield from (f"note: {note}" for note in notes)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    for line in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _amount(number: float) -> str:
    scale, unit = next(pair for pair in ((1e9, " B"), (1e6, " M"), (1.0, "")) if number >= pair[0] or pair[0] == 1.0)
    return f"{number / scale:.2f}{unit}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
