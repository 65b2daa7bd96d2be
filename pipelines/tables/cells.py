"""Cells of one column as tools write them: missing-value words, numbers, flags, text and lists. Pure, column to column.

An unreadable cell becomes missing; the caller counts it.
"""

import html
import json
import re
from typing import Any

import polars as pl

MISSING_WORDS = (
    "", "nan", "NaN", "NAN", "-nan", "-NaN", "<NA>", "NA", "N/A", "n/a", "#N/A", "#NA", "None", "null", "NULL", "Null",
    "(no genres listed)", "nil", "\\N", "undefined", "-", "--", "—", "–", "NaT",  # noqa: RUF001 - an en dash is what tables hold
)  # fmt: skip
_TRUE = (
    *("true", "t", "yes", "y", "1", "1.0", "on", "in stock", "instock", "preorder", "backorder", "available"),
    *("active", "enabled", "published"),
)
_FALSE = (
    *("false", "f", "no", "n", "0", "0.0", "off", "out of stock", "outofstock", "sold out", "unavailable"),
    *("inactive", "disabled", "discontinued", "draft", "archived", "unpublished"),
)
_CURRENCY = r"^[\s\p{Sc}]+|[\s\p{Sc}]+$|^(?:USD|EUR|GBP|CHF|JPY|Rs\.?)\s+|\s+(?:USD|EUR|GBP|CHF|JPY)$"
_PLAIN = r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$"
_ENTITY = r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);"
_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^,\s'"][^,]*)""")
_PRINTED = r"""(?s)^\[.*\]$|^\(.*['"].*\)$|^\{.*[,'"].*\}$"""
_NAMES = ("name", "title", "label", "value")
"""Keys that hold the value of an object in a list, such as {"id": 16, "name": "Animation"}."""


def as_text(values: pl.Series) -> pl.Series:
    """Return any column as text; missing where a value has no text form, as lists of other types or broken bytes."""
    dtype = values.dtype
    if dtype == pl.String:
        return values
    if isinstance(dtype, pl.List | pl.Array):
        return joined(values)
    if dtype.is_float():
        is_whole = (values == values.round()) & (values.abs() < 2.0**63)
        whole = values.set(~is_whole.fill_null(value=False), None).cast(pl.Int64, strict=False).cast(pl.String) + ".0"
        return whole.zip_with(is_whole.fill_null(value=False), values.fill_nan(None).cast(pl.String))
    if dtype == pl.Null:
        return values.cast(pl.String)
    if dtype in (pl.Object, pl.Duration) or isinstance(dtype, pl.Struct):
        return pl.Series(values.name, [None if value is None else str(value) for value in values], dtype=pl.String)
    if dtype == pl.Binary:
        return pl.Series(values.name, [_decoded(value) for value in values], dtype=pl.String)
    return values.cast(pl.String, strict=False)


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def joined(values: pl.Series) -> pl.Series:
    """Return lists as text, separated by blanks."""
    inner = values.dtype.inner  # type: ignore[attr-defined]
    if inner.is_nested() or inner == pl.Object:
        return pl.Series(
            values.name,
            [None if value is None else json.dumps(value.to_list(), default=str) for value in values],
            dtype=pl.String,
        )
    return values.cast(pl.List(pl.String)).list.join(" ", ignore_nulls=True)


def present(words: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Return text stripped of blanks, missing if empty or a missing-value word, and which rows hold such a word."""
    stripped = words.str.strip_chars(" \t\r\n\x0b\x0c\xa0\u200b\u200e\u200f\u2060\ufeff")
    missing = stripped.is_in(MISSING_WORDS).fill_null(value=False)
    if not missing.any():
        return stripped, missing
    return stripped.set(missing, None), missing & (stripped != "").fill_null(value=False)


_CONTROL = r"[\p{C}--[\x{200C}-\x{200F}]]"
"""Control characters, as `services.contracts.message.is_printable` has them."""


def printable(words: pl.Series, max_chars: int) -> tuple[pl.Series, int]:
    """Return text with blanks for control characters, cut to its maximal length, and the number of changed values."""
    is_odd = words.str.contains(rf"{_CONTROL}|[\p{{Z}}--\x20]").fill_null(value=False)
    is_long = (words.str.len_chars() > max_chars).fill_null(value=False)
    if not (is_odd | is_long).any():
        return words, 0
    clean = words
    if is_odd.any():
        replaced = words.str.replace_all(rf"(?:{_CONTROL}|\p{{Z}})+", " ").str.strip_chars()
        clean = replaced.zip_with(is_odd, words)
        is_odd = words.str.contains(r"[\p{C}--\s--[\x{200C}-\x{200F}]]").fill_null(value=False)
    clean = clean.str.slice(0, max_chars)
    return clean.set((clean == "").fill_null(value=False), None), int((is_odd | is_long).sum())


def numbers(values: pl.Series) -> pl.Series:
    """Return finite numbers, also with a currency sign or with thousands separators that cannot be decimal ones."""
    dtype = values.dtype
    if dtype.is_numeric() or dtype == pl.Boolean:
        floats = values.cast(pl.Float64, strict=False)
    else:
        floats = _numbers_of_text(as_text(values))
    return floats.set((~floats.is_finite()).fill_null(value=False), None)


def _numbers_of_text(words: pl.Series) -> pl.Series:
    stripped = words.str.strip_chars()
    plain = stripped.set((~stripped.str.contains(_PLAIN)).fill_null(value=False), None).cast(pl.Float64, strict=False)
    left = plain.is_null() & stripped.is_not_null()
    if not left.any():
        return plain
    bare = stripped.str.replace_all(_CURRENCY, "").str.replace_all(r"[\s'\u{a0}\u{202f}]", "")
    table = pl.DataFrame({"bare": bare}).select(
        pl.when(pl.col("bare").str.contains(r"^[+-]?\d{1,3}(?:,\d{3})*\.\d+$|^[+-]?\d{1,3}(?:,\d{3}){2,}$"))
        .then(pl.col("bare").str.replace_all(",", "", literal=True))
        .when(
            pl.col("bare").str.contains(r"^[+-]?\d{1,3}(?:\.\d{3})*,\d+$")
            & ~pl.col("bare").str.contains(r"^[+-]?[1-9]\d{0,2},\d{3}$")
        )
        .then(pl.col("bare").str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True))
        .when(pl.col("bare").str.contains(r"^[+-]?\d+,\d{1,2}$"))
        .then(pl.col("bare").str.replace(",", ".", literal=True))
        .when(pl.col("bare").str.contains(_PLAIN))
        .then("bare")
        .cast(pl.Float64, strict=False)
        .alias("number")
    )
    return plain.zip_with(~left, table["number"])


def entities(words: pl.Series) -> dict[str, str]:
    """Return the texts with HTML entities, such as `Tom &amp; Jerry`, and their decoded forms."""
    distinct = words.filter(words.str.contains(_ENTITY).fill_null(value=False)).unique(maintain_order=True)
    return {text: plain for text in distinct if (plain := html.unescape(text)) != text}


def flags(values: pl.Series) -> pl.Series:
    """Return true and false in any of their spellings."""
    if values.dtype == pl.Boolean:
        return values
    words = as_text(values).str.strip_chars().str.to_lowercase().str.replace_all("[_-]", " ")
    return words.replace_strict(
        {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}, default=None, return_dtype=pl.Boolean
    )


def lists(values: pl.Series, separator: str | None = None) -> pl.Series:
    """Return lists of text from lists, from text as JSON or Python prints lists, or from separated text.

    The default separator is `|` if it occurs, else `;`.
    """
    if isinstance(values.dtype, pl.List | pl.Array):
        return _clean(_flat(values))
    words = as_text(values)
    distinct = words.drop_nulls().unique()
    if not len(distinct):
        return pl.Series(values.name, [None] * len(values), dtype=pl.List(pl.String))
    split = _split_text(distinct, separator)
    rows = words.to_frame("text").join(
        pl.DataFrame({"text": distinct, "list": split}), on="text", how="left", maintain_order="left"
    )
    return rows["list"].alias(values.name)


def _flat(values: pl.Series) -> pl.Series:
    """Return lists of text; nested lists contribute their members, structures their name."""
    inner = values.dtype.inner  # type: ignore[attr-defined]
    if not inner.is_nested() and inner not in (pl.Object, pl.Binary):
        return values.cast(pl.List(pl.String))
    return pl.Series(
        values.name,
        [None if value is None else [*members(value.to_list())] for value in values],
        dtype=pl.List(pl.String),
    )


def _clean(texts: pl.Series) -> pl.Series:
    stripped = texts.list.eval(pl.element().str.strip_chars())
    return stripped.list.eval(
        pl.element().filter(pl.element().is_not_null() & ~pl.element().is_in(MISSING_WORDS))
    ).list.unique(maintain_order=True)


def _split_text(words: pl.Series, separator: str | None) -> pl.Series:
    """Return each distinct text as a list."""
    table = words.to_frame("text")
    text = pl.col("text").str.strip_chars()
    is_printed = text.str.contains(_PRINTED)
    if separator is not None:
        by_sign = text.str.split(separator)
    else:
        has_semicolon = text.str.replace_all(r"&#?\w+;", "").str.contains(";", literal=True)
        by_semicolon = (
            text.str.replace_all(r"(&#?\w+);", "${1}\x1f")
            .str.split(";")
            .list.eval(pl.element().str.replace_all("\x1f", ";", literal=True))
        )
        by_sign = (
            pl.when(text.str.contains("|", literal=True))
            .then(text.str.split("|"))
            .when(has_semicolon)
            .then(by_semicolon)
            .otherwise(pl.concat_list(text))
        )
    split = table.select(by_sign.alias("list"))["list"]
    printed = table.select(is_printed)["text"]
    if printed.any():
        read = pl.Series(
            [[*printed_list(word)] if is_one else None for word, is_one in zip(words, printed, strict=True)],
            dtype=pl.List(pl.String),
        )
        split = read.zip_with(printed, split)
    return _clean(split)


def printed_list(text: str) -> list[str]:
    """Return the members of a list as JSON, Python, numpy or Postgres prints it; objects contribute their name."""
    text = text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _python_list(text)
    return [*members(value if isinstance(value, list) else [value])]


def _python_list(text: str) -> list[Any]:
    inner = text[1:-1].strip()
    if re.search(r"^\{\s*['\"]\w+['\"]\s*:", inner):
        names = [
            re.search(rf"""['"](?:{"|".join(_NAMES)})['"]\s*:\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""", part)
            for part in inner.split("}")
        ]
        return [_unescaped(match[1] or match[2] or "") for match in names if match]
    inner = re.sub(r"^[\[({\s]+|[\])}\s]+$", "", inner)
    return [
        _unescaped(first or second) if first or second else bare.strip()
        for first, second, bare in _QUOTED.findall(inner)
    ]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def members(values: list[Any]) -> list[str]:
    """Return the texts of a list; nested lists contribute their members, objects their name."""
    names: list[str] = []
    for value in values:
        if isinstance(value, list):
            names += members(value)
        elif isinstance(value, dict):
            name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
            names += [name] if name else []
        elif isinstance(value, bytes):
            names.append(value.decode(errors="replace"))
        elif value is not None:
            names.append(str(value))
    return names
