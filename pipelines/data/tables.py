"""Reading a user's own tables (Parquet, CSV or JSON Lines) into raw frames. What the columns mean is judged elsewhere."""

from pathlib import Path

import polars as pl

from services.errors import DataError

_EXAMPLE = "events.parquet, events.csv or events.jsonl"


def read_table(path: Path) -> pl.DataFrame:
    """Read one file by its suffix; CSV columns stay text. Raises DataError for a missing, unreadable or unknown kind of file."""
    if not path.is_file():
        raise DataError("(all)", f"no file {path}", _EXAMPLE)
    try:
        match path.suffix.lower():
            case ".parquet" | ".pq":
                return pl.read_parquet(path)
            case ".csv":
                return pl.read_csv(path, infer_schema=False)
            case ".jsonl" | ".ndjson":
                return pl.read_ndjson(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError("(all)", f"{path} cannot be read ({error})", _EXAMPLE) from error
    raise DataError("(all)", f"{path.name} is neither Parquet, CSV nor JSON Lines", _EXAMPLE)
