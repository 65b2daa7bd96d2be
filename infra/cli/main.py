"""The `tailrace` command. Imports lazily, so that `tailrace --help` is fast.

A TailraceError, or a given path that cannot be used, is one red line and exit code 1; a traceback means a bug.
"""

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from infra.cli import bench, bundles, pipeline, stack
from infra.cli.erase import erase
from infra.cli.experiment import experiment_app
from infra.cli.file_errors import described, with_option
from infra.cli.imports import import_app
from infra.cli.keys import keys_app
from infra.cli.options import with_options
from infra.cli.plan import plan_app
from infra.cli.profile import profile
from infra.cli.release import release
from infra.cli.settings import show_settings
from infra.cli.tenants import tenants_app
from services.errors import TailraceError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.add_typer(bundles.bundles_app, name="bundles")
app.add_typer(plan_app, name="plan")
app.add_typer(experiment_app, name="experiment")
app.add_typer(import_app, name="import")
app.command(context_settings=bench.PASSED_ON)(bench.bench)
app.command(context_settings=bench.PASSED_ON)(bench.chaos)
app.command()(profile)
app.command()(bundles.promote)
app.command()(bundles.rollback)
app.command()(release)
app.command()(erase)
app.command("settings")(show_settings)
app.command()(with_options(stack.up))
app.command()(stack.down)
app.command()(stack.status)
app.command()(stack.doctor)
app.command()(with_options(pipeline.pipeline))
app.command()(with_options(pipeline.precompute))
app.command()(pipeline.recommend)
app.command()(pipeline.optimize)
app.command("add-items")(with_options(pipeline.add_items))
app.command()(stack.explain)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"tailrace {metadata.version('tailrace')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[bool, typer.Option(help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Serve and train LLM recommendations. Settings are TAILRACE_* variables."""


def main() -> None:
    try:
        app()
    except TailraceError as error:
        _fail(with_option(error, sys.argv[1:]))
    except Exception as error:
        if (message := described(error, sys.argv[1:], _given_paths())) is None:
            raise
        _fail(message)


def _given_paths() -> dict[str, Path]:
    """Return the settings that are paths, by variable; with defaults for bad values."""
    from services.settings.settings import inspect_settings, variable_of

    settings = inspect_settings()[0]
    paths = ((name, getattr(settings, name)) for name in type(settings).model_fields)
    return {variable_of(name): value for name, value in paths if isinstance(value, Path)}


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}")
    sys.exit(1)


if __name__ == "__main__":
    main()
