"""Ids as tools write them: integers with missing values become floating-point numbers, so `7.0` is read as 7.

The whole column decides: if other ids have fractions, such as versions, all stay as written. Pure.
"""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import polars as pl

from services.contracts.message import MAX_ID_CHARS
from services.errors import DataError

_WHOLE = r"^(?:0|-?[1-9][0-9]*)\.0+$"
_SCIENTIFIC = r"^-?[0-9](?:\.[0-9]+)?[eE]\+?[0-9]+$"
_FLOAT = rf"^-?[0-9]+\.[0-9]+$|{_SCIENTIFIC}"
_NUMBER = rf"^-?[0-9]+$|{_FLOAT}"
_LARGEST = 2**53
"""From here on, floating-point numbers skip integers."""
_PRINTED_DIGITS = 6
"""Digits that spreadsheets and printf show; a number with this many and a larger exponent has lost digits."""
_UNPRINTABLE = r"[\p{C}--[\x{200C}-\x{200F}]]|[\p{Z}--\x20]"


@dataclass(slots=True)
class IdColumn:
    """Counts of an id column: values, numbers, floating-point numbers, numbers with a fraction or lost digits."""

    num_values: int = 0
    num_numbers: int = 0
    num_floats: int = 0
    num_fractions: int = 0
    fraction: str = ""

    def look_at(self, words: pl.Series) -> None:
        """Count more values: text stripped of blanks."""
        values = words.drop_nulls()
        self.num_values += len(values)
        is_float = values.str.contains(_FLOAT)
        self.num_numbers += int(values.str.contains(_NUMBER).sum())
        if not is_float.any():
            return
        floats = values.filter(is_float)
        self.num_floats += len(floats)
        is_large = (floats.cast(pl.Float64, strict=False).abs() >= _LARGEST).fill_null(value=False)
        others = floats.filter(~floats.str.contains(_WHOLE) | is_large)
        broken = [word for word in others.unique(maintain_order=True) if _exact(word) is None]
        self.num_fractions += int(others.is_in(broken).sum()) if broken else 0
        self.fraction = self.fraction or (broken[0] if broken else "")

    def refuse(self, column: str, table: str, example: str) -> None:
        """Raise DataError if the column holds only floating-point numbers and not all are whole."""
        if self.num_fractions and self.num_floats == self.num_values:
            problem = f"of floating-point numbers, such as {self.fraction}, in {table}"
            raise DataError(column, f"{problem}; write the ids as text or integers", example)

    @property
    def reads_scientific(self) -> bool:
        """Whether `1e+05` is a number: only in a column of numbers, unlike in a column of hexadecimal ids."""
        return self.num_numbers == self.num_values

    @property
    def keeps_fractions(self) -> bool:
        """Whether some ids are numbers with a fraction; then all ids stay as written."""
        return self.num_fractions > 0


def whole_form(words: pl.Series, column: IdColumn) -> pl.Series:
    """Return ids: whole floating-point numbers as integers, or all as written if others have fractions.

    In a column of numbers, ids with lost digits are null.
    """
    if not column.num_floats:
        return words
    integers = _integers(words, column)
    return words.set(integers.is_null(), None) if column.keeps_fractions else integers


def looks_whole(words: pl.Series) -> pl.Series:
    """Return which ids are whole numbers that are written as floating-point numbers."""
    return words.str.contains(_WHOLE).fill_null(value=False)


def _integers(words: pl.Series, column: IdColumn) -> pl.Series:
    is_whole = looks_whole(words)
    ids = words.str.replace(r"\.0+$", "").zip_with(is_whole, words) if is_whole.any() else words
    if not column.reads_scientific:
        return ids
    is_other = words.str.contains(_SCIENTIFIC).fill_null(value=False)
    if not is_other.any():
        return ids
    exact = {word: _exact(word) for word in words.filter(is_other).unique()}
    return ids.replace_strict(exact, default=ids, return_dtype=pl.String)


def _exact(text: str) -> str | None:
    """Return the integer that a scientific number denotes, None for a fraction or lost digits."""
    mantissa, *exponent = re.split("[eE]", text)
    if not exponent or len(exponent[0]) > 3:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    num_digits = len(re.sub(r"\D", "", mantissa))
    if value != value.to_integral_value() or abs(value) >= _LARGEST:
        return None
    if num_digits == _PRINTED_DIGITS and value.adjusted() >= _PRINTED_DIGITS:
        return None
    return str(int(value))


def is_bad(name: str) -> pl.Expr:
    """Whether a column has no id that the gateway would accept: empty, too long, or not printable."""
    length = pl.col(name).str.len_chars()
    return length.is_null() | (length == 0) | (length > MAX_ID_CHARS) | pl.col(name).str.contains(_UNPRINTABLE)
