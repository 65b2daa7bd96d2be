"""Rows of Parquet, Arrow and Feather files, with their types. A column of a type unknown to our tables becomes text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.tables.delimited import RowBatch
from pipelines.tables.encoding import is_compressed, open_bytes
from services.errors import DataError

BATCH_ROWS = 131_072
_PANIC = pl.exceptions.PanicException
"""Of polars for an Arrow type that it does not support."""


class Columnar:
    """Reads the batches of a file, always from the first row."""

    def __init__(self, path: Path, *, is_parquet: bool) -> None:
        self._path, self._is_parquet = path, is_parquet
        self._is_compressed = is_compressed(path)
        schema = self._open()[0]
        twice = {name for name in schema.names if schema.names.count(name) > 1}
        if twice:
            raise DataError(min(twice), f"twice in {path.name}", "a distinct name for each column")
        empty = _frame_of(schema.empty_table())
        self.columns = tuple(empty.columns)

    def __iter__(self) -> Iterator[RowBatch]:
        import pyarrow as pa

        row = 1
        try:
            for batch in self._open()[1]:
                frame = _frame_of(pa.Table.from_batches([batch]))
                yield RowBatch(frame, pl.int_range(row, row + batch.num_rows, dtype=pl.Int64, eager=True))
                row += batch.num_rows
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._broken(error) from error

    def _open(self) -> tuple[Any, Iterator[Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            if self._is_parquet:
                file = pq.ParquetFile(self._source())
                return file.schema_arrow, file.iter_batches(BATCH_ROWS)
            try:
                reader = pa.ipc.open_file(self._source())
            except pa.ArrowInvalid:
                stream = pa.ipc.open_stream(open_bytes(self._path))
                return stream.schema, iter(stream)
            return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
        except (pa.ArrowException, OSError, EOFError, ValueError) as error:
            raise self._broken(error) from error

    def _source(self) -> Any:
        """Return the file, or the whole content of a compressed file, since its footer is read first."""
        import pyarrow as pa

        return pa.BufferReader(open_bytes(self._path).read()) if self._is_compressed else self._path

    def _broken(self, error: Exception) -> DataError:
        return DataError("", f"{self._path} cannot be read ({str(error).splitlines()[0]})", "a whole Parquet file")


def _frame_of(table: Any) -> pl.DataFrame:
    """Return the columns with polars types; fields of structures are named by their path."""
    columns = [_series(name, table.column(index)) for index, name in enumerate(table.column_names)]
    frame = pl.DataFrame(columns) if columns else pl.DataFrame()
    while nested := [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Struct)]:
        frame = frame.with_columns(
            frame[name].struct.rename_fields([f"{name}.{field.name}" for field in dtype.fields])
            for name in nested
            if isinstance(dtype := frame.schema[name], pl.Struct)
        )
        frame = frame.unnest(nested)
    return frame


def _series(name: str, column: Any) -> pl.Series:
    import pyarrow as pa

    kind = column.type
    try:
        if pa.types.is_dictionary(kind):
            column, kind = column.cast(kind.value_type), kind.value_type
        if isinstance(kind, pa.BaseExtensionType) or pa.types.is_map(kind) or pa.types.is_union(kind):
            return pl.Series(name, [_text(value) for value in column.to_pylist()], dtype=pl.String)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            column.validate(full=True)
        if pa.types.is_decimal256(kind):
            column = column.cast(pa.decimal128(38, kind.scale))
        return pl.Series(name, pl.from_arrow(column))
    except (pa.ArrowException, pl.exceptions.PolarsError, ValueError, TypeError, OverflowError, _PANIC):
        return _one_by_one(name, column)


def _one_by_one(name: str, column: Any) -> pl.Series:
    """Return a column as text if polars does not support it; unreadable values are missing."""
    import pyarrow as pa

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        column = pa.chunked_array([chunk.view(binary) for chunk in column.chunks], binary)
    values = []
    for value in column:
        try:
            values.append(_text(value.as_py()))
        except (pa.ArrowException, ValueError, OverflowError, TypeError):
            values.append(None)
    return pl.Series(name, values, dtype=pl.String)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
