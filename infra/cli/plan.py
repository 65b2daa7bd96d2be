"""`tailrace plan`: machines for a load of this stack (`load`), and GPUs for training or serving a model (`model`)."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from infra.cli.options import with_options
from infra.cli.session import out
from pipelines.declaration import options_of
from pipelines.planner.load import Demand
from pipelines.planner.mesh import Execution
from pipelines.planner.options import ModelOptions, ServingLoad

plan_app = typer.Typer(no_args_is_help=True, help="Estimate the needs of a load or a model before it runs.")


@plan_app.command("load")
@with_options
def plan_load(
    demand: Demand,
    basis: Annotated[Path | None, typer.Option(help="Results file of benchmarks.plan capacity.")] = None,
) -> None:
    """Estimate cores, replicas and memory for a load, from measured costs."""
    from rich.table import Table

    from pipelines.planner.load import plan, read_basis

    made = plan(demand, read_basis(basis))
    table = Table("part", "busy cores", "replicas", "memory", box=None)
    for line in made.lines:
        table.add_row(line.part, f"{line.cores:.2f}", str(line.replicas), f"{line.memory_mb:,.0f} MB")
    out.print(table)
    out.print(f"provide   {made.cores:.1f} cores and {made.memory_gb:.1f} GB for the processes")
    out.print(
        f"KV cache  TAILRACE_KV_NUM_BLOCKS={made.kv_num_blocks} keeps the whole context of {demand.kv_users} users"
    )
    out.print(f"log       {made.log_gb_per_day:.2f} GB of events a day")
    for note in made.notes:
        out.print(escape(f"note: {note}"))


def _fields(kind: type) -> set[str]:
    return {option.field.name for option in options_of(kind)}


_TRAINING = _fields(Execution) | {"layout", "dtype"}
_SERVING = _fields(ServingLoad)
_DECODER = _fields(Execution) - {"keep_gathered"} | {"length"}


@plan_app.command("model")
@with_options
def plan_model(
    context: typer.Context,
    options: ModelOptions,
    execution: Execution,
    load: ServingLoad,
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder of a checkpoint in Hugging Face's layout, or its config.json.", show_default=False),
    ] = None,
) -> None:
    """Estimate memory, layouts, step time and cost of a model on GPUs, from its config only."""
    from models.errors import InvalidRequest
    from pipelines.planner.configs import shape_from
    from pipelines.planner.devices import parse_gpus
    from pipelines.planner.layouts import plan_training
    from pipelines.planner.mesh import layout_asked
    from pipelines.planner.report import describe_contexts, describe_model, describe_serving, describe_training
    from pipelines.planner.serving import plan_serving
    from pipelines.planner.shapes import DecoderShape

    gpus, price = parse_gpus(options.gpus), options.price_per_gpu_hour
    kept_mb, batch = options.activation_mb, options.batch
    shape = shape_from(model, options.parameters, options.flops, None if kept_mb is None else 1e6 * kept_mb)
    is_decoder, is_trained = isinstance(shape, DecoderShape), options.train or not options.serve
    is_served = options.serve or (not options.train and is_decoder)
    _refuse_unused(context, _TRAINING, is_trained, "--serve plans no training; omit it or --serve")
    _refuse_unused(context, _SERVING, is_served, "applies to serving only; omit it, or --train with a decoder")
    _refuse_unused(context, _DECODER, is_decoder, "applies to decoders; omit it or give a config.json")
    _refuse_unused(context, {"length"}, is_trained or batch is not None, "applies to --batch; give --batch, too")
    lines = [*describe_model(shape, gpus)]
    if is_trained:
        rows = 8 * gpus.number if batch is None else batch
        asked = None if options.layout is None else layout_asked(options.layout, gpus.number)
        made = plan_training(shape, gpus, rows, options.length, asked=asked, execution=execution, dtype=options.dtype)
        lines += describe_training(made, price)
    if is_served:
        try:
            lines += describe_serving(plan_serving(shape, gpus, load), price)
        except InvalidRequest as error:
            if options.serve or _is_given(context, "rate"):
                raise
            lines += ["", f"SERVING    {error}"]
        if options.serve and batch is not None and isinstance(shape, DecoderShape):
            lines += describe_contexts(shape, batch, options.length, load.kv_kind)
    typer.echo("\n".join(lines))


def _is_given(context: typer.Context, name: str) -> bool:
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")


def _refuse_unused(context: typer.Context, names: set[str], is_used: bool, problem: str) -> None:
    """Reject options that this plan does not use. Raises InvalidRequest naming the option."""
    from models.errors import InvalidRequest

    given = [name for name in sorted(names) if _is_given(context, name)]
    if given and not is_used:
        option = next(parameter.opts[0] for parameter in context.command.params if parameter.name == given[0])
        why, _, fix = problem.partition("; ")
        raise InvalidRequest(option, why, fix)
