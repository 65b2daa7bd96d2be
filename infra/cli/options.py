"""Derives the options of a command from the dataclasses among its parameters (`pipelines.declaration`)."""

from collections.abc import Callable
from dataclasses import MISSING, is_dataclass
from inspect import Parameter, Signature, signature
from types import GenericAlias
from typing import Annotated, Any, cast

import typer

from pipelines.declaration import Declared, build, options_of


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer: each dataclass parameter becomes its options, and is built from their values."""
    parameters: list[Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in signature(command).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = kind = cast("type[Any]", parameter.annotation)
            parameters += [_parameter(option) for option in options_of(kind)]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def run(**given: Any) -> None:
        built: dict[str, Any] = {name: build(kind, given) for name, kind in groups.items()}
        declared = {option.field.name for kind in groups.values() for option in options_of(kind)}
        command(**{name: value for name, value in given.items() if name not in declared}, **built)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(declared: Declared) -> Parameter:
    """Return the typer parameter of an option. Bounds are checked where the dataclass is built."""
    option = declared.option
    default = Parameter.empty if declared.is_required else declared.field.default
    if default is MISSING or default == ():
        default = None
    elif isinstance(default, str):
        default = str(default)  # an enum's member is shown as its value
    names = option.names or (() if declared.kind is bool else declared.names)
    about = typer.Option(*names, help=option.help, show_default=option.shown or True, envvar=option.envvar or None)
    kind: Any = GenericAlias(list, (declared.kind,)) if declared.repeats else declared.kind
    if default is None:
        kind = kind | None
    return Parameter(declared.field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])
