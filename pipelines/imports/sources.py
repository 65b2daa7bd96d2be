"""Rows of a shop's tables, one after another and in the same order each time: a file on disk or in an object store, or the answer to a SQL query.

Values of CSV stay text; Parquet, JSON Lines and databases have types. What an object store holds is downloaded first, from where a broken download ended. A
database is read through ADBC, batch by batch. Knows nothing of what the columns mean.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from models.storage.objects import SCHEMES, open_store
from services.errors import ConfigError, DataError, EnvironmentFault

Row = dict[str, Any]
"""A row's values by column, None for a missing one."""

_KINDS = "items.csv, items.parquet or items.jsonl; or sqlite:///shop.db or postgresql://host/shop with --query"
_CHUNK_BYTES = 8 << 20


def read_rows(source: str, query: str | None, downloads: Path) -> Iterator[Row]:
    """Yield the rows of a path, the URL of an object (s3://, gs://, az://), or a database's answer to `query`.

    Args:
        source: Where the rows are.
        query: SQL, with an ORDER BY if an import of it is to go on where it was.
        downloads: A folder for what an object store holds.

    Raises DataError naming the row where one can be named, ConfigError for a bad option, EnvironmentFault where a store or database does not answer.
    """
    scheme = source.partition("://")[0] if "://" in source else ""
    if scheme in ("sqlite", "postgresql", "postgres"):
        if not query:
            raise ConfigError(f"--query: missing; {_without_secrets(source)} is a database, give what to select")
        yield from _rows_of_query(source, query)
        return
    if query:
        raise ConfigError(f"--query: {source} is no database; give sqlite:///PATH or postgresql://HOST/NAME")
    path = _downloaded(source, downloads) if scheme in SCHEMES else Path(source)
    if not path.is_file():
        raise DataError("", f"no file {path}", _KINDS)
    try:
        yield from _rows_of_file(path)
    except (OSError, ValueError) as error:  # pyarrow's errors of content are ValueErrors
        raise DataError("", f"{source} cannot be read ({error})", _KINDS) from error


def name_of(source: str, query: str | None) -> str:
    """Return what identifies a source, without what may be secret in its address."""
    return " ".join((_without_secrets(source), *([query] if query else [])))


def _rows_of_file(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    match path.suffix.lower():
        case ".parquet" | ".pq":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    yield from batch.to_pylist()
        case ".csv":
            reading = csv.ReadOptions(use_threads=False)  # so that errors name the row
            parsing = csv.ParseOptions(newlines_in_values=True)
            with csv.open_csv(path, reading, parsing) as file:
                names = file.schema.names
            as_text = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
            with csv.open_csv(path, reading, parsing, as_text) as file:
                for batch in file:
                    yield from batch.to_pylist()
        case ".jsonl" | ".ndjson":
            yield from _rows_of_json(path)
        case _:
            raise DataError("", f"{path.name} is neither Parquet, CSV nor JSON Lines", _KINDS)


def _rows_of_json(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(filter(str.strip, lines), 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    "", f"row {number} of {path.name} is not JSON ({error})", '{"item_id": "i42"}'
                ) from error
            if not isinstance(row, dict):
                raise DataError("", f"row {number} of {path.name} is no JSON object", '{"item_id": "i42"}')
            yield row


def _rows_of_query(source: str, query: str) -> Iterator[Row]:
    import adbc_driver_manager.dbapi as dbapi

    try:
        with closing(_connect(source)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(query)
            for batch in cursor.fetch_record_batch():
                yield from batch.to_pylist()
    except (dbapi.Error, OSError) as error:
        found = f"{_without_secrets(source)}: {error}"
        if isinstance(error, dbapi.OperationalError):
            raise EnvironmentFault(f"{found}; is the database up, and may this user read it?") from error
        raise DataError("", found, "--query 'SELECT item_id, title FROM products ORDER BY item_id'") from error


def _connect(source: str) -> Any:
    if source.startswith("sqlite://"):
        from adbc_driver_sqlite import dbapi as sqlite

        path = Path(source.removeprefix("sqlite://"))
        if not path.is_file():  # SQLite would make it
            raise DataError("", f"no database {path}", "sqlite:///path/to/shop.db")
        return sqlite.connect(str(path))
    from adbc_driver_postgresql import dbapi as postgresql

    return postgresql.connect(source)


def _downloaded(url: str, folder: Path) -> Path:
    """Return the path of a copy of the object as it is now, whole."""
    from obstore.exceptions import BaseError

    parts = urlsplit(url)
    store = open_store(f"{parts.scheme}://{parts.netloc}", "SOURCE")
    name = parts.path.lstrip("/")
    try:
        found = store.head(name)
        mark = hashlib.sha256(f"{url} {found['e_tag']} {found['size']}".encode()).hexdigest()[:16]
        path = folder / f"{mark}{Path(name).suffix}"
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return path
        part = path.with_suffix(f"{path.suffix}.part")
        with part.open("ab") as file:
            while (at := file.tell()) < found["size"]:
                file.write(store.get_range(name, start=at, end=min(found["size"], at + _CHUNK_BYTES)))
    except FileNotFoundError as error:  # obstore's NotFoundError is one
        raise DataError("", f"no object {url}", "s3://bucket/items.csv") from error
    except BaseError as error:
        raise EnvironmentFault(f"{url} cannot be read ({str(error).splitlines()[0]})") from error
    return part.rename(path)


def _without_secrets(source: str) -> str:
    """Return an address without user, password and parameters."""
    scheme, separator, rest = source.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}" if separator else source
