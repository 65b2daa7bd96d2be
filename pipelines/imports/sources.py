"""Sources of a shop's tables: a file on disk or in an object store, or the result of a SQL query.

Each becomes a local file, which pipelines.tables reads. Downloads from an object store resume. PostgreSQL is read
through ADBC, batch by batch, into an Arrow file, with its types, and SQLite row by row into JSON Lines.
"""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from models.registry.storage.objects import SCHEMES, open_store
from pipelines.tables.encoding import as_utf8
from pipelines.tables.files import check_file
from services.errors import ConfigError, DataError, EnvironmentFault

_DATABASES = ("sqlite", "postgresql", "postgres")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Environment variables of an object store's credentials, by scheme."""
_CHUNK_BYTES = 8 << 20
_QUERY = "--query 'SELECT item_id, title FROM products ORDER BY item_id'"


def local_file(source: str, query: str | None, downloads: Path) -> Path:
    """Return a file with the rows of a path, an object URL (s3://, gs://, az://), or a database's result for `query`.

    Args:
        source: Path or URL.
        query: SQL, with an ORDER BY if an import of it must be resumable.
        downloads: A folder for copies of remote sources.

    Raises DataError, ConfigError for a bad option, EnvironmentFault if a store or database does not answer.
    """
    scheme = _scheme(source)
    if scheme in _DATABASES:
        if not query:
            raise ConfigError(f"--query: missing; {_without_secrets(source)} is a database; give a SELECT")
        return _answer(source, query, downloads)
    if query:
        raise ConfigError(f"--query: {source} is not a database; give sqlite:///PATH or postgresql://HOST/NAME")
    if scheme in SCHEMES:
        return _downloaded(source, downloads)
    check_source(source)  # before a connection to the broker
    return Path(source)


def check_source(source: str) -> None:
    """Raise DataError for a path on disk that is not a file."""
    if _scheme(source) not in (*SCHEMES, *_DATABASES):
        check_file(Path(source))


def _scheme(source: str) -> str:
    return source.partition("://")[0] if "://" in source else ""


def name_of(source: str, query: str | None) -> str:
    """Return a source's identity, without secrets of its address."""
    return " ".join((_without_secrets(source), *([query] if query else [])))


def _answer(source: str, query: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(f"{source} {query}".encode()).hexdigest()[:16]
    if source.startswith("sqlite://"):
        return _answer_of_sqlite(Path(source.removeprefix("sqlite://")), query, path.with_suffix(".jsonl"))
    return _answer_of_postgres(source, query, path.with_suffix(".arrow"))


def _answer_of_sqlite(database: Path, query: str, path: Path) -> Path:
    """Write the rows as JSON Lines: in SQLite each value has a type of its own, whatever the first rows have."""
    if not database.is_file():
        raise DataError("", f"no database {database}", "sqlite:///path/to/shop.db")
    try:
        with (
            closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection,
            path.open("w") as file,
        ):
            connection.text_factory = lambda text: as_utf8(text)[0].decode(errors="replace")
            rows = connection.execute(query)
            names = [column[0] for column in rows.description or ()]
            if twice := {name for name in names if names.count(name) > 1}:
                raise DataError(min(twice), "twice in the query's result", "a distinct name for each column")
            for row in rows:
                file.write(f"{json.dumps(dict(zip(names, row, strict=True)), default=_of_blob)}\n")
    except sqlite3.Error as error:
        raise DataError("", f"sqlite://{database}: {error}", _QUERY) from error
    return path


def _of_blob(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _answer_of_postgres(source: str, query: str, path: Path) -> Path:
    import adbc_driver_manager.dbapi as dbapi
    import pyarrow as pa
    from adbc_driver_postgresql import dbapi as postgresql

    try:
        with closing(postgresql.connect(source)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(query)
            batches = cursor.fetch_record_batch()
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batches.schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
    except (dbapi.Error, OSError) as error:
        problem = f"{_without_secrets(source)}: {error}"
        if isinstance(error, dbapi.OperationalError):
            raise EnvironmentFault(f"{problem}; is the database up, and may this user read it?") from error
        raise DataError("", problem, _QUERY) from error
    return path


def _downloaded(url: str, folder: Path) -> Path:
    """Return the path of a complete copy of the object in its current state."""
    from obstore.exceptions import BaseError

    parts = urlsplit(url)
    store = open_store(f"{parts.scheme}://{parts.netloc}", "SOURCE")
    name = parts.path.lstrip("/")
    try:
        head = store.head(name)
        mark = hashlib.sha256(f"{url} {head['e_tag']} {head['size']}".encode()).hexdigest()[:16]
        path = folder / f"{mark}{Path(name).suffix}"
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return path
        part = path.with_suffix(f"{path.suffix}.part")
        with part.open("ab") as file:
            while (at := file.tell()) < head["size"]:
                file.write(store.get_range(name, start=at, end=min(head["size"], at + _CHUNK_BYTES)))
    except FileNotFoundError as error:  # obstore's NotFoundError is a FileNotFoundError
        raise DataError("", f"no object {url}", "s3://bucket/items.csv") from error
    except BaseError as error:
        fix = f"correct the address, or the credentials in {_CREDENTIALS[parts.scheme]}"
        raise EnvironmentFault(f"{url} cannot be read ({str(error).splitlines()[0]}); {fix}") from error
    return part.rename(path)


def _without_secrets(source: str) -> str:
    """Return an address without user, password and parameters."""
    scheme, separator, rest = source.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}" if separator else source
