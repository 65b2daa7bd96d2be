"""The `tailrace` command. Imports lazily, so that `tailrace --help` is fast.

A TailraceError, or a folder that cannot be written, is one red line and exit code 1; a traceback means a bug.
"""

import errno
import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from infra.cli import bench, bundles, pipeline, stack
from infra.cli.erase import erase
from infra.cli.experiment import experiment_app
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
    help="Serve and train LLM recommendations. Settings are TAILRACE_* variables.",
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

_UNWRITABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
}


def main() -> None:
    try:
        app()
    except TailraceError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror}; this must be writable (the state folder is TAILRACE_STATE_DIR)")


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}")
    sys.exit(1)


if __name__ == "__main__":
    main()
