"""Declares the options of commands as fields of dataclasses: type, default, bounds and help text, once each.

    depth: Annotated[int | None, Option("Tokens of an item.", at_least=1, at_most=4)] = None

`options_of` lists the options of a dataclass and of the dataclasses in its fields, `build` makes it from given values,
and `check_bounds` rejects a value beyond its bounds. `infra/cli/options.py` derives the commands of `tailrace`,
`parser_of` an argparse parser for `python -m`. Imports the standard library only, so that `--help` is fast.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from models.errors import ConfigError

Options = TypeVar("Options")


class InvalidOption(ConfigError):
    """A value that an option rejects: `field` is the option, `fix` says what to give."""

    def __init__(self, option: str, problem: str, fix: str) -> None:
        super().__init__(f"{option}: {problem}; {fix}")
        self.field, self.problem, self.fix = option, problem, fix


@dataclass(frozen=True, slots=True)
class Option:
    """The help text of a field, the bounds of its value, and its name on a command line if the field's differs.

    Args:
        help: A sentence or phrase; the default is printed after it.
        names: Names on the command line, the most readable first; default: the field's name.
        at_least: Smallest valid value.
        above: The value must be greater.
        at_most: Largest valid value.
        below: The value must be smaller.
        choices: All valid values.
        fix: Advice for a value beyond the bounds, instead of the range.
        shown: The default in words.
        envvar: Environment variable that gives the value if the command line does not.
        parse: Reads the value from text. Raises ConfigError naming the option.
    """

    help: str
    names: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: Sequence[str] = ()
    fix: str = ""
    shown: str = ""
    envvar: str = ""
    parse: Callable[[str], Any] | None = None

    def admits(self, value: Any) -> bool:
        """Whether the value is within the bounds; NaN is not."""
        return (
            (not self.choices or value in self.choices)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def range(self) -> str:
        """The bounds in words."""
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return " and ".join(f"{words} {bound:,}" for words, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Declared:
    """An option of a dataclass: its field and declaration, and the type of one value."""

    field: "Field[Any]"
    option: Option

    @property
    def names(self) -> tuple[str, ...]:
        """The names on the command line."""
        given = tuple(name.partition("/")[0] for name in self.option.names)  # --x/--no-x
        return given or (f"--{self.field.name.replace('_', '-')}",)

    @property
    def kind(self) -> type:
        """The type of a value, of each value if the option repeats."""
        kind = get_args(self.field.type)[0]
        if self.option.parse is not None:
            return str
        if get_origin(kind) in {Union, UnionType}:
            (kind,) = (member for member in get_args(kind) if member is not NoneType)
        if get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        return str if get_origin(kind) is Literal else kind

    @property
    def repeats(self) -> bool:
        """Whether the option may be given several times; the field is then a tuple."""
        return self.option.parse is None and get_origin(get_args(self.field.type)[0]) is tuple

    @property
    def is_required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING


def options_of(kind: type) -> Iterator[Declared]:
    """Yield the options of a dataclass in order, including options of dataclasses in its fields."""
    for field in fields(kind):
        if (option := _option(field)) is not None:
            yield Declared(field, option)
        elif is_dataclass(field.type):
            yield from options_of(field.type)  # type: ignore[arg-type]


def build(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Return the dataclass with the values of its options by field name; other fields keep their defaults."""
    given: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if (option := _option(field)) is not None:
            value = values.get(field.name)
            if value is not None and option.parse is not None:
                given[field.name] = option.parse(value)
            elif value is not None:
                given[field.name] = tuple(value) if isinstance(value, list) else value
        elif is_dataclass(field.type) and any(options_of(field.type)):  # type: ignore[arg-type]
            given[field.name] = build(field.type, values)  # type: ignore[arg-type]
    return kind(**given)


def check_bounds(options: Any) -> None:
    """Reject the first value beyond the bounds of its field. Raises InvalidOption."""
    for field in fields(options):
        option, value = _option(field), getattr(options, field.name)
        if option is not None and value is not None and not option.admits(value):
            name = Declared(field, option).names[0]
            problem = f"{value!r} is unknown" if option.choices else f"{value} is out of range"
            raise InvalidOption(name, problem, option.fix or f"give {option.range}")


def named_values(options: Any) -> dict[str, Any]:
    """Return the values of the options under their names on the command line, with underscores."""
    return {
        declared.names[0].removeprefix("--").replace("-", "_"): getattr(options, declared.field.name)
        for declared in options_of(type(options))
    }


def parser_of(kind: type, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the dataclass's options; `parsed` reads a command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for declared in options_of(kind):
        given: dict[str, Any] = {"dest": declared.field.name, "default": argparse.SUPPRESS, "help": _help(declared)}
        if declared.kind is bool:
            given["action"] = argparse.BooleanOptionalAction
        else:
            metavar = "PATH" if declared.kind is Path else declared.kind.__name__.upper()
            given |= {"type": declared.kind, "metavar": metavar, "required": declared.is_required}
            given |= {"action": "append"} if declared.repeats else {}
        parser.add_argument(*declared.names, **given)
    return parser


def parsed(kind: type[Options], description: str | None, words: Sequence[str] | None = None) -> Options:
    """Return the options of a command line, by default this process's. Raises ConfigError for a bad value."""
    options = build(kind, vars(parser_of(kind, description).parse_args(words)))
    check_bounds(options)
    return options


def _help(declared: Declared) -> str:
    if declared.is_required or (declared.field.default in (None, (), "") and not declared.option.shown):
        return declared.option.help
    return f"{declared.option.help} Default: {declared.option.shown or declared.field.default}."


def _option(field: "Field[Any]") -> Option | None:
    if get_origin(field.type) is not Annotated:
        return None
    return next((annotation for annotation in get_args(field.type)[1:] if isinstance(annotation, Option)), None)
