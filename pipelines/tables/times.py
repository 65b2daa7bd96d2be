"""Times as tools write them, in UTC unless they state a zone. Pure.

Formats: Unix seconds to nanoseconds, dates of 8 digits, ISO 8601, RFC 5322, and day/month/year. Size tells the units of
numbers apart: no event is older than the computers that record it. The whole column decides whether 01/02/2026 is in
January.
"""

import email.utils
import re
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl

from pipelines.tables.cells import as_text
from services.errors import DataError

UTC_US = pl.Datetime("us", "UTC")
FIRST_TIME, END_OF_TIMES = datetime(1970, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
"""Times outside this range are an error of a clock or column, and the feature table cannot hold later times."""
PLAUSIBLE_TIME = datetime(1990, 1, 1, tzinfo=UTC)
"""Earlier events are a sign of numbers in another unit."""
_SECONDS, _MILLIS, _MICROS, _NANOS = 10**11, 10**14, 10**17, 4_102_444_800 * 10**9
"""Numbers below these are in this unit; the last is the end of times in nanoseconds."""
_DAY_US = 86_400_000_000
_SERIAL_1990, _SERIAL_2100 = 32_874, 73_051
"""Days since 1899-12-30, as spreadsheets count them. As Unix seconds these numbers are in January 1970."""
_SLASHED = re.compile(r"^(\d{1,2})([/.-])(\d{1,2})[/.-](\d{4})\b(.*)$")
_ISO = ("%Y-%m-%dT%H:%M:%S%.f%:z", "%Y-%m-%dT%H:%M%:z")
_DIGITS = (
    (19_000_101, 20_991_231, "%Y%m%d"),
    (197_001_010_000, 209_912_312_359, "%Y%m%d%H%M"),
    (19_700_101_000_000, 20_991_231_235_959, "%Y%m%d%H%M%S"),
)
"""Ranges of whole numbers that are dates: from, to, and format."""
_SHAPES = (
    *("%d %b %Y %H:%M:%S", "%d %b %Y %H:%M", "%d %b %Y", "%d-%b-%Y %H:%M:%S", "%d-%b-%Y", "%b %d %Y %H:%M:%S"),
    *("%d %B %Y %H:%M:%S", "%d %B %Y", "%B %d %Y %H:%M:%S", "%B %d %Y", "%b %d %Y", "%a %b %d %H:%M:%S %Y"),
    *("%d/%b/%Y:%H:%M:%S %z", "%b %d %Y %I:%M:%S %p", "%b %d %Y %I:%M %p", "%d %b %Y %I:%M %p"),
    "%a %b %d %H:%M:%S %z %Y",
)
_CLOCKS = ("%H:%M:%S", "%H:%M", "%I:%M:%S %p", "%I:%M %p", "%H:%M:%S.%f", "%H:%M:%S %z", "%I:%M:%S%p", "%I:%M%p")


@dataclass(slots=True)
class DayOrder:
    """Whether dates such as 28/05/2026 have the day first: how many are valid only day first, or only month first."""

    num_slashed: int = 0
    num_day_first: int = 0
    num_month_first: int = 0
    has_half_days: bool = False

    def look_at(self, values: pl.Series) -> None:
        """Count more values."""
        if values.dtype != pl.String:
            return
        slashed = values.filter(values.str.contains(r"^\s*\d{1,2}[/-]\d{1,2}[/-]\d{4}").fill_null(value=False))
        if not len(slashed):
            return
        self.num_slashed += len(slashed)
        groups = slashed.str.strip_chars().str.extract_groups(r"^(\d{1,2})[/-](\d{1,2})").struct.unnest()
        first, second = (groups.to_series(index).cast(pl.Int32) for index in (0, 1))
        self.num_day_first += int(((first > 12) & (second <= 12)).sum())
        self.num_month_first += int(((second > 12) & (first <= 12)).sum())
        self.has_half_days |= bool(slashed.str.contains(r"(?i)\d\s?[ap]\.?m\b").any())

    @property
    def day_first(self) -> bool | None:
        """Whether the day is first; None without evidence or with both. Twelve-hour clocks imply the month first."""
        if self.num_day_first and self.num_month_first:
            return None
        if self.num_day_first or self.num_month_first:
            return self.num_day_first > 0
        return False if self.has_half_days else None


@dataclass(slots=True)
class SerialDays:
    """Whether all times of a column are day numbers of a spreadsheet, from 1990 on."""

    num_values: int = 0
    num_serial: int = 0
    example: str = ""

    def look_at(self, words: pl.Series) -> None:
        """Count more values: text stripped of blanks."""
        values = words.drop_nulls()
        is_serial = values.cast(pl.Float64, strict=False).is_between(_SERIAL_1990, _SERIAL_2100, closed="left")
        self.num_values += len(values)
        self.num_serial += int(is_serial.sum())
        if not self.example and is_serial.any():
            self.example = values.filter(is_serial.fill_null(value=False))[0]

    def refuse(self, column: str, table: str, example: str) -> None:
        """Raise DataError if all times are such numbers."""
        if self.num_serial and self.num_serial == self.num_values:
            problem = f"day numbers of a spreadsheet, such as {self.example}, in {table}; format the cells as dates"
            raise DataError(column, problem, example)


def times(values: pl.Series, day_first: bool | None = None) -> pl.Series:
    """Return times in UTC, missing where absent, before 1970, or from 2100 on."""
    parsed = any_times(values, day_first)
    is_usable = ((parsed >= FIRST_TIME) & (parsed < END_OF_TIMES)).fill_null(value=False)
    return parsed.set(~is_usable, None)


def is_day(values: pl.Series) -> pl.Series:
    return (values.dt.epoch("us") % _DAY_US == 0).fill_null(value=False)


def any_times(values: pl.Series, day_first: bool | None = None) -> pl.Series:
    """Return times in UTC of the years 1 to 9999, missing where absent."""
    return _any(values, day_first).alias(values.name)


def _any(values: pl.Series, day_first: bool | None) -> pl.Series:
    dtype = values.dtype
    if isinstance(dtype, pl.Datetime):
        aware = values if dtype.time_zone else values.dt.replace_time_zone("UTC")
        return aware.dt.convert_time_zone("UTC").cast(UTC_US)
    if dtype == pl.Date:
        return values.cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
    if dtype.is_integer():
        return _of_integers(values.cast(pl.Int64, strict=False))
    if dtype.is_float() or dtype == pl.Decimal:
        return _of_floats(values.cast(pl.Float64, strict=False))
    if dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Binary):
        return pl.Series([None] * len(values), dtype=UTC_US)
    return _of_text(as_text(values).str.strip_chars(), day_first)


def _utc(micros: pl.Expr) -> pl.Expr:
    return micros.cast(pl.Datetime("us")).dt.replace_time_zone("UTC")


def _of_integers(values: pl.Series) -> pl.Series:
    number = pl.col("number")
    micros = (
        pl.when((number < 0) | (number >= _NANOS)).then(None)
        .when(number < _SECONDS).then(number * 1_000_000)
        .when(number < _MILLIS).then(number * 1_000)
        .when(number < _MICROS).then(number)
        .otherwise(number // 1_000)
    )  # fmt: skip
    parsed = values.to_frame("number").select(_utc(micros).alias("time"))["time"]
    for least, most, shape in _DIGITS:
        is_date = values.is_between(least, most).fill_null(value=False)
        if is_date.any():
            digits = values.set(~is_date, None).cast(pl.String)
            dates = digits.str.to_datetime(shape, time_unit="us", strict=False).dt.replace_time_zone("UTC")
            parsed = dates.zip_with(is_date, parsed)
    return parsed


def _of_floats(values: pl.Series) -> pl.Series:
    number = pl.col("number").fill_nan(None)
    micros = (
        pl.when((number < 0) | (number >= _NANOS)).then(None)
        .when(number < _SECONDS).then(number * 1e6)
        .when(number < _MILLIS).then(number * 1e3)
        .when(number < _MICROS).then(number)
        .otherwise(number / 1e3)
    )  # fmt: skip
    parsed = values.to_frame("number").select(_utc(micros.round().cast(pl.Int64, strict=False)).alias("time"))["time"]
    least, most, _ = _DIGITS[0]
    is_date = ((values == values.round()) & values.is_between(least, most)).fill_null(value=False)
    if not is_date.any():
        return parsed
    return _of_integers(values.set(~is_date, None).cast(pl.Int64)).zip_with(is_date, parsed)


def _of_text(words: pl.Series, day_first: bool | None) -> pl.Series:
    """Read whole numbers, then numbers with a fraction or an exponent, then other texts."""
    times = _of_integers(words.cast(pl.Int64, strict=False))
    is_unread = times.is_null() & words.is_not_null()
    is_float = is_unread & words.str.contains(r"^\d+(?:\.\d*)?(?:[eE]\+?\d+)?$").fill_null(value=False)
    if is_float.any():
        floats = words.set(~is_float, None).cast(pl.Float64, strict=False)
        times = _of_floats(floats).zip_with(is_float, times)
        is_unread &= ~is_float
    return _of_words(words, is_unread, day_first).zip_with(is_unread, times) if is_unread.any() else times


def _of_words(words: pl.Series, is_unread: pl.Series, day_first: bool | None) -> pl.Series:
    """Read each distinct unread text once; the other rows are null."""
    distinct = words.filter(is_unread).unique()
    iso = pl.DataFrame({"word": distinct, "time": _of_iso(distinct)})
    others = iso.filter(pl.col("time").is_null())["word"]
    rarer = pl.Series([_one(text, day_first) for text in others], dtype=UTC_US)
    read = pl.concat([iso.drop_nulls("time"), pl.DataFrame({"word": others, "time": rarer})])
    return words.to_frame("word").join(read, on="word", how="left", maintain_order="left")["time"]


def _of_iso(words: pl.Series) -> pl.Series:
    """Read ISO 8601: a date, optionally with a time and a zone."""
    text = (
        pl.col("w")
        .str.replace(r"^(\d{4})/(\d{1,2})/(\d{1,2})", "$1-$2-$3")
        .str.replace(r"^(\d{4}-\d\d?-\d\d?)\s+", "${1}T")
        .str.replace(r"\s*(?:[Zz]|UTC|GMT)$", "+00:00")
        .str.replace(r"(:\d\d),(\d+)", "$1.$2")
        .str.replace(r"(\.\d{9})\d+", "$1")
        .str.replace(r"(T[\d:.]+)\s*([+-]\d\d)$", "$1$2:00")
        .str.replace(r"(T[\d:.]+)\s+([+-]\d\d:?\d\d)$", "$1$2")
        .str.replace(r"^(\d{4}-\d\d?-\d\d?)$", "${1}T00:00:00+00:00")
    )
    zoned = pl.when(text.str.contains(r"T.*[+-]\d\d:?\d\d$")).then(text).otherwise(text + "+00:00")
    shapes = [zoned.str.to_datetime(shape, time_unit="us", strict=False).cast(UTC_US) for shape in _ISO]
    return words.to_frame("w").select(pl.coalesce(*shapes).alias("time"))["time"]


def _one(text: str, day_first: bool | None) -> datetime | None:
    """Read a time in one of the rarer formats."""
    if len(text) > 64 or not re.search(r"\d", text):
        return None
    try:
        slashed = _SLASHED.match(text)
        time = _slashed(slashed, day_first) if slashed else _other(text)
        if time is None:
            return None
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


def _other(text: str) -> datetime | None:
    if re.match(r"^\d{4}-W?\d|^\d{4}W\d|^\d{8}T", text):
        return datetime.fromisoformat(text)
    if re.match(r"^(?:[A-Za-z]{3},\s*)?\d{1,2} [A-Za-z]{3} \d{4} \d\d:\d\d.*[A-Z+\d]$", text):
        return email.utils.parsedate_to_datetime(text)
    words = re.sub(r"\s+", " ", text.replace(",", " ")).strip()
    words = re.sub(r"\b(\d{1,2})(?:st|nd|rd|th)\b", r"\1", words)
    words = re.sub(r" (?:UTC|GMT)(?= \d{4}$|$)", "", words)
    return _by_shape(words, _SHAPES)


def _by_shape(words: str, shapes: tuple[str, ...]) -> datetime | None:
    for shape in shapes:
        try:
            return datetime.strptime(words, shape)
        except ValueError:
            continue
    return None


def _slashed(match: re.Match[str], day_first: bool | None) -> datetime | None:
    first, sign, second, year, rest = match.groups()
    is_day_first = True if sign == "." or first == second else day_first
    if is_day_first is None:
        return None
    day, month = (first, second) if is_day_first else (second, first)
    at = datetime(int(year), int(month), int(day), tzinfo=UTC)
    clock = re.sub(r"\s+", " ", rest.strip(" T,")).upper().replace("A.M.", "AM").replace("P.M.", "PM")
    if not clock:
        return at
    if (time_of_day := _by_shape(clock, _CLOCKS)) is None:
        return None
    moved = at.replace(
        hour=time_of_day.hour, minute=time_of_day.minute, second=time_of_day.second, microsecond=time_of_day.microsecond
    )
    return moved.replace(tzinfo=time_of_day.tzinfo or UTC)
