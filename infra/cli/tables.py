"""The table options that all commands share: which column is which field."""

from collections.abc import Sequence
from typing import Annotated

import typer

Column = Annotated[
    list[str] | None,
    typer.Option(help="NAME=OUR_NAME: the table's column NAME is our field OUR_NAME, such as sku=item_id; repeat it."),
]
Skip = Annotated[list[str] | None, typer.Option(help="A column that is not read; repeat it.")]
Header = Annotated[
    list[str] | None,
    typer.Option(
        help="Names of the columns where the first line is data: events=user_id,item_id,event_time; _ skips one."
    ),
]
Lists = Annotated[
    list[str] | None,
    typer.Option("--list", help="COLUMN=SIGN: what separates the values of a list, such as 'categories=,'; repeat it."),
]


def as_arguments(
    column: Sequence[str] | None, skip: Sequence[str] | None, header: Sequence[str] | None, lists: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the options as arguments of a command."""
    given = (("--column", column), ("--skip", skip), ("--header", header), ("--list", lists))
    return tuple(argument for option, values in given for value in values or () for argument in (option, value))
