"""`tailrace plan`: machines for a load of this stack (`load`), and GPUs for training or serving a model (`model`)."""

from pathlib import Path
from typing import Annotated

import typer

plan_app = typer.Typer(no_args_is_help=True, help="Estimate what a load or a model needs, before it runs.")


@plan_app.command("load")
def plan_load(
    rate: Annotated[float, typer.Option(help="Requests per second at peak.")],
    users: Annotated[int, typer.Option(help="Users in the feature store.")],
    items: Annotated[int, typer.Option(help="Items in the catalogue.")],
    events_rate: Annotated[
        float | None, typer.Option(help="Events per second.", show_default="a tenth of --rate")
    ] = None,
    mix: Annotated[
        str, typer.Option(help="Share of requests per tier.")
    ] = "precomputed=0.5,llm=0.2,student=0.25,popular=0.05",
    kv_users: Annotated[int, typer.Option(help="Users whose context stays in the KV cache.")] = 300,
    names: Annotated[int, typer.Option(help="Names of bundles that are served at once.")] = 1,
    basis: Annotated[Path | None, typer.Option(help="Results file of benchmarks.plan capacity.")] = None,
) -> None:
    """Estimate cores, replicas and memory for a load, from measured costs."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pipelines.planner.load import Demand, parse_mix, read_basis
    from pipelines.planner.load import plan as make_plan

    demand = Demand(
        rate=rate,
        users=users,
        items=items,
        events_rate=rate / 10 if events_rate is None else events_rate,
        mix=parse_mix(mix),
        kv_users=kv_users,
        names=names,
    )
    out = Console(highlight=False, soft_wrap=True)
    made = make_plan(demand, read_basis(basis))
    table = Table("part", "busy cores", "replicas", "memory", box=None)
    for line in made.lines:
        table.add_row(line.part, f"{line.cores:.2f}", str(line.replicas), f"{line.memory_mb:,.0f} MB")
    out.print(table)
    out.print(f"provide   {made.cores:.1f} cores and {made.memory_gb:.1f} GB for the processes")
    out.print(f"KV cache  TAILRACE_KV_NUM_BLOCKS={made.kv_num_blocks} keeps the whole context of {kv_users} users")
    out.print(f"log       {made.log_gb_per_day:.2f} GB of events a day")
    for note in made.notes:
        out.print(escape(f"note: {note}"))


_TRAINING = {"layout", "dtype", "sequence_parallel", "vocab_parallel", "async_tp", "keep_gathered", "virtual_stages"}
_SERVING = {"rate", "prompt", "output", "beams", "kv"}
_DECODER = {"length", "sequence_parallel", "vocab_parallel", "async_tp", "virtual_stages"}


@plan_app.command("model")
def plan_model(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder of a checkpoint in Hugging Face's layout, or its config.json.", show_default=False),
    ] = None,
    gpus: Annotated[str, typer.Option(help="Number and kind, such as 8xh100.")] = "1xh100",
    train: Annotated[bool, typer.Option("--train", help="Plan training only.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Plan serving only.")] = False,
    batch: Annotated[
        int | None,
        typer.Option(help="Rows of a training step; with --serve, contexts in memory.", show_default="8 a GPU"),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of such a row.")] = 2_048,
    layout: Annotated[
        str | None,
        typer.Option(help="Plan this layout: tp8,pp2,dp4; also fsdp8, mb2, none, selective, full.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of training's products: bf16, fp8 or fp32.")] = "bf16",
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="TP splits norms, too.")] = False,
    vocab_parallel: Annotated[bool, typer.Option("--vocab-parallel", help="TP splits embedding and head.")] = False,
    async_tp: Annotated[bool, typer.Option("--async-tp", help="TP's collectives overlap with products.")] = False,
    keep_gathered: Annotated[bool, typer.Option("--keep-gathered", help="FSDP gathers once a step.")] = False,
    virtual_stages: Annotated[int, typer.Option(help="Interleaved stages of a pipeline rank.")] = 1,
    rate: Annotated[float, typer.Option(help="Requests a second to serve.")] = 1.0,
    prompt: Annotated[int, typer.Option(help="Tokens of a request's prompt.")] = 1_024,
    output: Annotated[int, typer.Option(help="Tokens of its answer.")] = 128,
    beams: Annotated[int, typer.Option(help="Beams of a request that ranks items.")] = 1,
    kv: Annotated[str, typer.Option(help="Numbers of the KV cache: model, int8 or fp8.")] = "model",
    parameters: Annotated[
        float | None, typer.Option(help="Of a model other than a decoder: its parameters.", show_default=False)
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="And the FLOPs of one sample's forward pass.", show_default=False)
    ] = None,
    activation_mb: Annotated[
        float | None, typer.Option(help="And what one sample keeps for the backward pass.", show_default=False)
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price of one GPU for an hour.", show_default=False)
    ] = None,
) -> None:
    """Estimate memory, layouts, step time and cost of a model on GPUs, from its config only."""
    from models.errors import InvalidRequest
    from pipelines.planner.configs import shape_from
    from pipelines.planner.devices import parse_gpus
    from pipelines.planner.layouts import plan_training
    from pipelines.planner.mesh import Execution, layout_asked
    from pipelines.planner.report import describe_contexts, describe_model, describe_serving, describe_training
    from pipelines.planner.serving import ServingLoad, kv_kind_named, plan_serving, price_of
    from pipelines.planner.shapes import DecoderShape

    found = parse_gpus(gpus)
    shape = shape_from(model, parameters, flops, None if activation_mb is None else 1e6 * activation_mb)
    is_decoder, is_trained = isinstance(shape, DecoderShape), train or not serve
    is_served = serve or (not train and is_decoder)
    _refuse_unused(context, _TRAINING, is_trained, "--serve plans no training; omit it or --serve")
    _refuse_unused(context, _SERVING, is_served, "applies to serving only; omit it, or --train with a decoder")
    _refuse_unused(context, _DECODER, is_decoder, "applies to decoders; omit it or give a config.json")
    _refuse_unused(context, {"length"}, is_trained or batch is not None, "applies to --batch; give --batch, too")
    price = price_of(price_per_gpu_hour)
    lines = [*describe_model(shape, found)]
    if is_trained:
        rows = 8 * found.number if batch is None else batch
        execution = Execution(
            sequence_parallel=sequence_parallel,
            vocab_parallel=vocab_parallel,
            async_tp=async_tp,
            keep_gathered=keep_gathered,
            virtual_stages=virtual_stages,
        )
        asked = None if layout is None else layout_asked(layout, found.number)
        made = plan_training(shape, found, rows, length, asked=asked, execution=execution, dtype=dtype)
        lines += describe_training(made, price)
    if is_served:
        load = ServingLoad(rate=rate, prompt=prompt, output=output, beams=beams, kv_kind=kv_kind_named(kv))
        try:
            lines += describe_serving(plan_serving(shape, found, load), price)
        except InvalidRequest as error:
            if serve or _is_given(context, "rate"):
                raise
            lines += ["", f"SERVING    {error}"]
        if serve and batch is not None and isinstance(shape, DecoderShape):
            lines += describe_contexts(shape, batch, length, load.kv_kind)
    typer.echo("\n".join(lines))


def _is_given(context: typer.Context, name: str) -> bool:
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")


def _refuse_unused(context: typer.Context, names: set[str], is_used: bool, problem: str) -> None:
    """Reject options that this plan does not use. Raises InvalidRequest naming the option."""
    from models.errors import InvalidRequest

    given = [name for name in sorted(names) if _is_given(context, name)]
    if given and not is_used:
        why, _, fix = problem.partition("; ")
        raise InvalidRequest(f"--{given[0].replace('_', '-')}", why, fix)
