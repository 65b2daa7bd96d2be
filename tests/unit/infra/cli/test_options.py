"""The commands' options: each declared once as a field of a dataclass, and shown in the help with its default."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from infra.cli.stack import UpOptions
from pipelines.declaration import InvalidOption, Option, build, check_bounds, options_of, parsed
from pipelines.options import OwnTables, PipelineOptions, PrecomputeOptions
from pipelines.planner.load import Demand
from pipelines.planner.mesh import Execution
from pipelines.planner.options import ModelOptions, ServingLoad
from pipelines.search import SearchOptions
from pipelines.tables.options import ColumnArguments, ItemArguments, TableArguments
from pipelines.training.options import RecipeOptions
from tests.unit.infra.cli.conftest import Run

COMMANDS: dict[str, tuple[type, ...]] = {
    "up": (UpOptions, TableArguments),
    "pipeline": (PipelineOptions, TableArguments, RecipeOptions),
    "precompute": (OwnTables, TableArguments, PrecomputeOptions),
    "add-items": (TableArguments,),
    "import items": (ItemArguments,),
    "import events": (ColumnArguments,),
    "plan load": (Demand,),
    "plan model": (ModelOptions, Execution, ServingLoad),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_is_declared_once_and_shown_with_its_default(
    tailrace: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The help has a row for each field: its names, the first words of its text, and its default."""
    monkeypatch.setenv("COLUMNS", "600")
    rows = tailrace(*command.split(), "--help").out.splitlines()
    declared = [declaration for kind in COMMANDS[command] for declaration in options_of(kind)]

    names = Counter(name for declaration in declared for name in declaration.names)
    assert max(names.values()) == 1, names.most_common(1)
    for declaration in declared:
        (row,) = [
            row
            for row in rows
            if re.search(rf"(?<![\w-]){declaration.names[0]}\b(?!-).*{re.escape(declaration.option.help[:25])}", row)
        ]
        default = declaration.field.default
        if declaration.option.shown:
            assert f"[default: ({declaration.option.shown})]" in row
        elif (isinstance(default, int | float) and not isinstance(default, bool)) or (
            isinstance(default, str) and default
        ):
            assert f"[default: {default}]" in row
        elif declaration.is_required:
            assert "[required]" in row


def test_no_option_of_training_is_declared_twice() -> None:
    """Classes that share a command share no field, so a value has a single declaration."""
    fields = [declaration.field.name for kind in COMMANDS["pipeline"] for declaration in options_of(kind)]

    assert [name for name, number in Counter(fields).items() if number > 1] == []


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A group of options."""

    share: Annotated[float, Option("A fraction.", at_least=0, below=1)] = 0.5
    kinds: Annotated[tuple[str, ...], Option("Kinds.", names=("--kind",))] = ()

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Options with a group, a required value, a choice and a parsed value."""

    number: Annotated[int, Option("A number.", above=0)]
    mode: Annotated[str, Option("A mode.", choices=("fast", "exact"))] = "fast"
    pair: Annotated[tuple[int, ...], Option("Numbers.", parse=lambda text: tuple(map(int, text.split("x"))))] = (1, 1)
    folder: Annotated[Path | None, Option("A folder.")] = None
    inner: Inner = field(default_factory=Inner)
    kept: int = 7

    def __post_init__(self) -> None:
        check_bounds(self)


def test_a_command_line_is_parsed_into_nested_options() -> None:
    """Values reach the group that declares them; fields without an option keep their defaults."""
    words = ["--number", "2", "--share", "0.25", "--kind", "a", "--kind", "b", "--pair", "2x3", "--folder", "here"]

    options = parsed(Outer, None, words)

    assert (options.number, options.mode, options.pair, options.folder) == (2, "fast", (2, 3), Path("here"))
    assert (options.inner.share, options.inner.kinds, options.kept) == (0.25, ("a", "b"), 7)
    assert parsed(SearchOptions, None, ["--trials", "3", "--epochs", "2"]).recipes.epochs == 2


@pytest.mark.parametrize(
    ("values", "option", "fix"),
    [
        ({"number": 0}, "--number", "give above 0"),
        ({"number": 1, "share": 1.0}, "--share", "give at least 0 and below 1"),
        ({"number": 1, "share": float("nan")}, "--share", "give at least 0 and below 1"),
        ({"number": 1, "mode": "slow"}, "--mode", "give fast or exact"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused_by_its_option(values: dict[str, Any], option: str, fix: str) -> None:
    """The error names the option and the valid values."""
    with pytest.raises(InvalidOption) as refused:
        build(Outer, values)

    assert (refused.value.field, refused.value.fix) == (option, fix)


@dataclass(frozen=True, slots=True)
class Unchecked:
    """Options that check nothing themselves."""

    seeds: Annotated[int, Option("Number of seeds.", at_least=1)] = 1


def test_a_command_line_is_checked_even_if_its_options_are_not() -> None:
    """Bounds hold for each command line, also of options whose class checks nothing."""
    with pytest.raises(InvalidOption):
        parsed(Unchecked, None, ["--seeds", "0"])
