"""`tailrace settings`: every setting with value, source and meaning, also while some are invalid."""

import ast
import inspect
import re
import textwrap
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from services.errors import NotFound

RECORDED = "run/ports.json"
"""The source of ports that a running stack has chosen: a file of its state folder."""
_SECRET = re.compile(r"(?<=://)[^/?#]+(?=@)|(?<=\?).+")
"""Secret parts of a URL: user and password, and everything after the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `source` is default, environment, or RECORDED; if `fault` is set, `value` is the invalid text."""

    variable: str
    value: str | int | float | bool | None
    source: str
    default: str | int | float | bool | None
    meaning: str
    fault: str | None


def show_settings(
    words: Annotated[
        list[str] | None, typer.Argument(help="Show only settings with these words in name or meaning.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every setting with its value, source and meaning. Exit code 1 if a setting is invalid."""
    settings, faults = list_settings()
    wanted = [word.lower() for word in words or ()]
    shown = [
        setting
        for setting in settings
        if all(word in f"{setting.variable} {setting.meaning}".lower() for word in wanted)
    ]
    if not shown:
        raise NotFound(f"no setting has {' and '.join(wanted)} in name or meaning", "give fewer or shorter words")
    out = Console(highlight=False)
    if as_json:
        out.print_json(data={"settings": [asdict(setting) for setting in shown], "faults": faults})
    else:
        for setting in shown:
            _show(setting, out)
        for fault in faults:
            out.print(f"[bold red]error:[/] {escape(fault)}", soft_wrap=True)
    raise typer.Exit(1 if faults else 0)


def list_settings() -> tuple[list[Setting], list[str]]:
    """Return all settings, secrets masked, and all faults of the environment."""
    from infra.local.supervisor.ports import of_running_stack
    from services.settings.settings import inherited_environment, inspect_settings, variable_of

    given, faults = inspect_settings()
    environment = inherited_environment()
    used = given
    with suppress(OSError):  # an unreadable state folder counts as no stack
        used = of_running_stack(given)
    meanings, settings = _meanings(type(given)), []
    for name, field in type(given).model_fields.items():
        variable, is_given = variable_of(name), name in given.model_fields_set
        source = "environment" if is_given else RECORDED if name in used.model_fields_set else "default"
        fault = faults.get(variable)
        value = environment.get(variable) if fault else getattr(used, name)
        settings.append(
            Setting(
                variable=variable,
                value=_plain(value),
                source=source,
                default=_plain(field.get_default()),
                meaning=meanings[name],
                fault=_masked(fault),
            )
        )
    return settings, [str(_masked(fault)) for fault in faults.values()]


def _meanings(kind: type) -> dict[str, str]:
    """Return the attribute docstring of each field of this class, without line breaks."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(str(below.value.value).split())
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _plain(value: Any) -> Any:
    return _masked(str(value) if isinstance(value, Path) else value)


def _masked(value: Any) -> Any:
    """Return a text with the secrets of its URLs masked, anything else as it is."""
    return _SECRET.sub("***", value) if isinstance(value, str) and "://" in value else value


def _show(setting: Setting, out: Console) -> None:
    beside = (
        setting.source
        if setting.source == "default"
        else f"{setting.source}; default {_written(setting.default) or 'empty'}"
    )
    colour = "red" if setting.fault else "dim" if setting.source == "default" else "green"
    out.print(
        f"[bold]{setting.variable}[/]={escape(_written(setting.value))}  [{colour}]({escape(beside)})[/]",
        soft_wrap=True,
    )
    below = textwrap.fill(
        setting.fault or setting.meaning, min(out.width, 100), initial_indent="    ", subsequent_indent="    "
    )
    out.print(escape(below))


def _written(value: str | int | float | bool | None) -> str:
    """Return a value as in the environment; "" for None, which means not set."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
