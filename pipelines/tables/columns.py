"""Maps the columns of a file to our fields. Errors name the options that would read the file or an unread column.

    exact name, or equal up to case, blanks and punctuation    user_id, `User ID`, itemId
    `timestamp`                                                event_time
    --column NAME=OUR_NAME                                     any other

An item column that is not a field is an attribute. Looks at cells only to tell a header from data.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from itertools import islice

import polars as pl

from pipelines.tables.files import Frame, Table
from pipelines.tables.findings import Findings
from pipelines.tables.options import UNNAMED, TableOptions
from pipelines.tables.times import PLAUSIBLE_TIME, times
from services.contracts.items import MAX_ATTRIBUTES, MAX_NAME_CHARS, RESERVED_NAMES
from services.errors import ConfigError, DataError

FIELDS: Mapping[str, tuple[str, ...]] = {
    "events": (
        *("user_id", "item_id", "event_time", "offset_ms", "event_type", "value", "event_id"),
        *("history", "impressions"),
    ),
    "items": ("item_id", "title", "categories", "text", "available", "published_ms", "expires_ms", "value"),
}
EXAMPLES = {
    "user_id": "'u17'",
    "item_id": "'i42'",
    "event_time": "'2026-11-21T12:00:00Z' or 1795262400 (Unix seconds) or 1795262400000 (Unix milliseconds)",
    "event_type": "'click', without control characters",
}
_REQUIRED = {"events": ("user_id", "item_id", "event_time"), "items": ("item_id",)}
_MANY = frozenset({"categories"})
"""Fields that several columns may fill."""
_ALSO = {"event_time": ("timestamp",)}
"""Column names with only one possible meaning."""
SUGGESTED: Mapping[str, tuple[str, ...]] = {
    "user_id": (
        "user", "userid", "userpseudoid", "uid", "visitorid", "visitor", "customerid", "customer", "clientid",
        "memberid", "reviewerid", "accountid", "account", "entityid", "sessionid", "session", "profileid", "personid",
        "cookieid", "deviceid",
    ),
    "item_id": (
        "item", "itemid", "productid", "product", "targetentityid", "handle", "urlhandle", "sku", "asin",
        "parentasin", "movieid", "articleid", "newsid", "bookid", "isbn", "videoid", "trackid", "songid", "artistid",
        "businessid", "gameid", "goodsid", "offerid", "contentid", "listingid", "entityid", "id",
    ),
    "event_time": (
        "timestamp", "time", "datetime", "eventtime", "eventtimems", "eventtimestamp", "ts", "date", "tdat",
        "eventdate", "createdat", "created", "timems", "occurredat", "unixreviewtime", "reviewtime", "when",
    ),
    "offset_ms": ("timeframe",),
    "event_type": (
        "event", "action", "eventname", "behavior", "behaviour", "behaviortype", "interaction", "type", "actiontype",
    ),
    "value": (
        "rating", "eventvalue", "propertiesrating", "score", "weight", "stars", "overall", "count", "playcount",
        "watchratio",
    ),
    "event_id": ("id", "uuid"),
    "history": ("clickhistory", "userhistory"),
    "impressions": ("impression", "impressionlist"),
    "title": ("name", "movietitle", "productname", "producttitle", "itemname", "booktitle"),
    "categories": (
        "category", "genres", "genre", "class", "productcategory", "producttype", "categoryname", "tags", "type",
    ),
    "text": ("description", "bodyhtml", "body", "abstract", "overview", "summary", "plot"),
    "available": ("availability", "isavailable", "instock", "published", "status"),
    "published_ms": ("publishedat", "publishdate", "publicationdate"),
    "expires_ms": ("expiresat", "expirydate", "expirationdate", "validuntil"),
}  # fmt: skip
"""Names of other tools without case and punctuation, the likeliest first."""
_NUM_NAMED = 20
_IMPRESSIONS = re.compile(r"^\S+-[01](?: \S+-[01])*$")


@dataclass(frozen=True, slots=True)
class Named:
    """Columns by the field that they fill, and attribute columns by the attribute's name.

    `used` are the options' columns that this table has.
    """

    fields: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, str]
    used: frozenset[str]
    others: Mapping[str, str] = default(default_factory=dict)
    """For a required field, another column that may be meant."""

    def column(self, field: str) -> str:
        """Return the name of a field's column in the file, or the field's own name if it has none."""
        return self.fields.get(field, (field,))[0]


def letters(name: str) -> str:
    """Return a name without case, blanks and punctuation."""
    return re.sub(r"[\W_]", "", name.casefold())


def listed(names: Iterable[str]) -> str:
    """Return the first names as an enumeration."""
    first = [*islice(names, _NUM_NAMED + 1)]
    return ", ".join(first[:_NUM_NAMED]) + (", ..." if len(first) > _NUM_NAMED else "")


def is_known(name: str) -> bool:
    """Whether a name is a field's name or an alias."""
    return letters(re.sub(r":(token|float)(_seq)?$", "", name)) in _KNOWN


_KNOWN = {letters(name) for names in FIELDS.values() for name in names} | {
    name for names in (*SUGGESTED.values(), *_ALSO.values()) for name in names
}


def name_columns(kind: str, table: Table | Frame, options: TableOptions, findings: Findings) -> Named:
    """Map columns to our fields. Raises DataError for a missing required column, or if the first line is data."""
    by_name = {name: name for name in table.columns} | {
        name.partition(":")[0]: name for name in table.columns if ":" in name
    }
    typed = {name.partition(":")[0]: name for name in (*options.names, *options.skipped) if ":" in name}
    used = {
        name
        for name in (*options.names, *options.skipped)
        if name in by_name or (name in typed.values() and name.partition(":")[0] in by_name)
    }

    def of_table(name: str) -> str | None:
        return by_name.get(name) or (by_name.get(name.partition(":")[0]) if name in typed.values() else None)

    skipped = {of_table(name) for name in options.skipped}
    columns = [name for name in table.columns if name not in skipped and not _is_unnamed(name)]
    fields: dict[str, list[str]] = {}
    attributes: dict[str, str] = {}
    for theirs, ours in options.names.items():
        column = of_table(theirs)
        if column is None or column not in columns:
            continue
        if ours in FIELDS[kind]:
            fields.setdefault(ours, []).append(column)
        elif kind == "items" and ours not in FIELDS["events"]:
            _check_attribute(f"--column {theirs}={ours}", ours, attributes)
            attributes[ours] = column
        else:
            used.discard(theirs)
    for ours, named in fields.items():
        if len(named) > 1 and ours not in _MANY:
            raise ConfigError(f"--column: {' and '.join(named)} of {table.name} cannot both be {ours}; remove one")
    taken = {column for named in fields.values() for column in named} | set(attributes.values())
    _find_alike(kind, table, columns, fields, taken, findings)
    left = [name for name in columns if name not in taken]
    needed = [
        field for field in _REQUIRED[kind] if not (field == "item_id" and kind == "events" and "impressions" in fields)
    ]
    if missing := [field for field in needed if field not in fields]:
        if turned := next((field for field in missing if field in options.names), None):
            ours = options.names[turned]
            raise ConfigError(
                f"--column {turned}={ours}: the table's name comes first; --column {ours}={turned} reads {ours}"
            )
        if table.first and table.has_header and _is_data(table):
            raise _without_header(kind, table)
        raise _missing(table, missing, left)
    if kind == "items":
        if twice := next((name for name in left if name in attributes), None):
            option = f"--column {attributes[twice]}={twice}"
            raise ConfigError(f"{option}: {table.name} has a column {twice} too; add --skip {twice}, or rename it too")
        attributes |= _attributes(left, attributes, findings)
        left = [name for name in left if name in attributes.values()]
    _note_unused(kind, left, fields, findings)
    others = {field: other for field in needed if (other := _suggest(field, left)) is not None}
    return Named({name: tuple(named) for name, named in fields.items()}, attributes, frozenset(used), others)


def check_used(options: TableOptions, tables: Sequence[tuple[str, Table | Frame, Named]]) -> None:
    """Refuse options that match no column of any table. Raises ConfigError."""
    used = frozenset().union(*(named.used for _, _, named in tables))
    columns = [name for _, table, _ in tables for name in table.columns]
    where = f"{' and '.join(table.name for _, table, _ in tables)} ({listed(dict.fromkeys(columns))})"
    for name, ours in options.names.items():
        if name not in used and name not in columns:
            turned = f"; --column {ours}={name} reads that column as {name}" if ours in columns else ""
            raise ConfigError(f"--column {name}={ours}: no column {name} in {where}{turned}")
        if name not in used:
            fields = dict.fromkeys(field for kind, _, _ in tables for field in FIELDS[kind])
            raise ConfigError(
                f"--column {name}={ours}: {ours} is not a field of {tables[0][0]}; give one of {', '.join(fields)}"
            )
    for name in sorted(options.skipped - used):
        raise ConfigError(f"--skip {name}: no column {name} in {where}")
    for option, names in (("--list", options.splits), ("--number", options.numbers), ("--flag", options.flags)):
        for name in names:
            if name not in columns and not any(
                name in named.fields or name in named.attributes for _, _, named in tables
            ):
                raise ConfigError(f"{option} {name}: no column {name} in {where}")


def _is_unnamed(name: str) -> bool:
    return re.fullmatch(rf"{UNNAMED}\d+", name) is not None


def _find_alike(
    kind: str,
    table: Table | Frame,
    columns: Sequence[str],
    fields: dict[str, list[str]],
    taken: set[str],
    findings: Findings,
) -> None:
    """Add the fields whose names the table has, exactly or up to case, blanks and punctuation."""
    for known in FIELDS[kind]:
        if known in fields:
            continue
        free = [name for name in columns if name not in taken]
        alike = [known] if known in free else [name for name in free if letters(name) == letters(known)]
        alike = alike or [name for name in free if letters(name) in _ALSO.get(known, ())]
        if len(alike) > 1:
            both = " and ".join(map(repr, alike))
            raise DataError(
                known,
                f"twice, as {both}, in {table.name}; --skip {alike[1]!r} reads the first",
                f"one column named {known}",
            )
        if not alike:
            continue
        fields[known] = alike
        taken.add(alike[0])
        if alike[0] != known:
            findings.note(f"column {alike[0]!r} is read as {known}")


def _suggest(field: str, left: Iterable[str]) -> str | None:
    """Return the column most likely to be a field."""
    by_letters: dict[str, str] = {}
    for name in (names := [*left]):
        by_letters.setdefault(letters(name), name)
    for name in names:
        by_letters.setdefault(letters(name.rpartition(".")[2]), name)
    return next((by_letters[name] for name in SUGGESTED.get(field, ()) if name in by_letters), None)


def _without_header(kind: str, table: Table | Frame) -> DataError:
    names = ",".join(_guess(kind, table))
    problem = (
        f"the first line of {table.name} looks like data ({', '.join(table.first):.120}); --header {kind}={names} "
        f"names its columns ({UNNAMED} skips one)"
    )
    return DataError("", problem, "a first line with the names of the columns")


def _missing(table: Table | Frame, missing: Sequence[str], left: Sequence[str]) -> DataError:
    """Return the error of absent columns, with the options that would read the unused columns as them."""
    free, options = list(left), []
    for field in missing:
        column = _suggest(field, free)
        if column is not None:
            free.remove(column)
        options.append(_option(column or "NAME", field))
    problem = (
        f"missing among {listed(table.columns)} in {table.name}; {' '.join(options)} reads "
        f"{'them' if len(options) > 1 else 'it'}"
    )
    return DataError(missing[0], problem, EXAMPLES[missing[0]])


def _option(column: str, field: str) -> str:
    """Return the option that reads a column as a field, quoted for a shell."""
    return f"--column {shlex.quote(f'{column}={field}')}"


def _is_data(table: Table | Frame) -> bool:
    """Whether the first line contains a cell that cannot be a name: a number, a time, an empty cell, or a long text."""
    if any(is_known(cell) for cell in table.first):
        return False
    cells = [cell.strip() for cell in table.first]
    return any(not cell or len(cell) > 64 or re.fullmatch(r"[+-]?\d[\d.,eE+:/TZ -]*(?:[AP]M)?", cell) for cell in cells)


def _guess(kind: str, table: Table | Frame) -> list[str]:
    """Return likely column names for a table whose first line is data."""
    cells, later = [cell.strip() for cell in table.first], [*table.second, *[""] * len(table.first)]
    names = [UNNAMED] * len(cells)
    if kind == "items":
        return _guess_items(cells, names)
    for column, cell in enumerate(cells):
        if "impressions" not in names and _IMPRESSIONS.match(cell):
            names[column] = "impressions"
    parsed = times(pl.Series(cells, dtype=pl.String), day_first=False)
    if (
        at := next((column for column, time in enumerate(parsed) if time is not None and time >= PLAUSIBLE_TIME), None)
    ) is not None:
        names[at] = "event_time"
    free = [column for column, name in enumerate(names) if name == UNNAMED]
    if "impressions" in names:
        counted = [
            column
            for column in free
            if cells[column].isdigit() and later[column].isdigit() and int(later[column]) == int(cells[column]) + 1
        ]
        lists = [column for column in free if " " in cells[column] and column not in counted]
        ids = [column for column in free if column not in (*counted, *lists)] or counted
        names[ids[0]] = "user_id"
        if lists:
            names[lists[0]] = "history"
        return names
    for field, column in zip(("user_id", "item_id"), free, strict=False):
        names[column] = field
    small = [column for column in free[2:] if re.fullmatch(r"[1-9](?:\.\d+)?|0\.\d+|10", cells[column])]
    if small:
        names[small[0]] = "value"
    return names


def _guess_items(cells: Sequence[str], names: list[str]) -> list[str]:
    names[0] = "item_id"
    rest = range(1, len(cells))
    categories = next((column for column in rest if "|" in cells[column]), None)
    titles = [column for column in rest if column != categories]
    if titles:
        names[next((column for column in titles if " " in cells[column]), titles[0])] = "title"
    if categories is not None:
        names[categories] = "categories"
    return names


def _is_attribute(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and name not in RESERVED_NAMES


def _check_attribute(option: str, name: str, named: Mapping[str, str]) -> None:
    """Refuse an option that names an attribute. Raises ConfigError."""
    if name in named:
        raise ConfigError(f"{option}: column {named[name]} is {name} already; give each column its own name")
    if not _is_attribute(name):
        fix = f"give at most {MAX_NAME_CHARS} printable characters, and none of {', '.join(sorted(RESERVED_NAMES))}"
        raise ConfigError(f"{option}: {name!r:.80} is no name for an attribute; {fix}")


def _attributes(left: Sequence[str], named: Mapping[str, str], findings: Findings) -> dict[str, str]:
    """Return columns that become attributes under their own names; invalid attribute names are noted and skipped."""
    attributes: dict[str, str] = {}
    for name in left:
        if name in RESERVED_NAMES:
            findings.note(
                f"column {name} is skipped: every item has {name}; --column {name}=OTHER_NAME makes it an attribute"
            )
        elif not _is_attribute(name) or name.startswith((" (column", "(column")):
            findings.note(
                f"column {name[:40]!r} is skipped: its name is not valid for an attribute; --column renames it"
            )
        elif len(named) + len(attributes) >= MAX_ATTRIBUTES:
            findings.note(
                f"columns are skipped: an item has at most {MAX_ATTRIBUTES} attributes; --skip removes others",
                1,
                name,
            )
        else:
            attributes[name] = name
    return attributes


def _note_unused(kind: str, left: Sequence[str], fields: Mapping[str, object], findings: Findings) -> None:
    """Note the columns that are not fields in one sentence, with the option that would read each."""
    free, words = list(left), {}
    for field in FIELDS[kind]:
        if field not in fields and (column := _suggest(field, free)) is not None:
            words[column] = f" ({_option(column, field)} reads it)"
            free.remove(column)
    if not left:
        return
    named = listed(f"{name}{words.get(name, '')}" for name in left)
    what = "ignored" if kind == "events" else "attributes, which models do not learn from"
    findings.note(f"columns that are {what}: {named}")
