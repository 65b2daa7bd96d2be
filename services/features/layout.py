"""Feast's layout of a view's row in Redis: the key of the hash, and its fields as protobuf.

A test compares it with Feast. Rows are read and written here without Feast for three reasons: Feast cannot write
conditionally on the row being unchanged, its conversion through pandas takes several milliseconds per batch, and its
read of one user costs a gateway more processor time than the rest of an answer. A key has the entities' names, then
their values, then the project. The hash of a field's name is that of a private function, read in feast 0.67.0.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import mmh3

from services.features.repo import feast_parts
from services.features.schema import ColumnType, ViewSchema

Row = TypeVar("Row")
_FIELDS = {
    ColumnType.STRING: "string_val",
    ColumnType.INT64: "int64_val",
    ColumnType.STRINGS: "string_list_val",
    ColumnType.INT64S: "int64_list_val",
    ColumnType.FLOAT64S: "double_list_val",
    ColumnType.BYTES: "bytes_val",
}


def key_prefix(*entities: str) -> bytes:
    """Return the prefix of the keys of all rows with entities of these names."""
    feast_parts()
    from feast.infra.key_encoding_utils import serialize_entity_key_prefix

    return bytes(serialize_entity_key_prefix(list(entities), entity_key_serialization_version=3))


def entities_of(key: bytes, project: str) -> dict[str, str]:
    """Return the entities in the key of a row, by name."""
    feast_parts()
    from feast.infra.key_encoding_utils import deserialize_entity_key

    entity: Any = deserialize_entity_key(key.removesuffix(project.encode()))
    return {name: value.string_val for name, value in zip(entity.join_keys, entity.entity_values, strict=True)}


def _field(name: str) -> bytes:
    return int(mmh3.hash(name, signed=False)).to_bytes(4, "little")


class RowLayout(Generic[Row]):
    """The layout of one view in one Feast project."""

    def __init__(self, view: ViewSchema[Row], project: str) -> None:
        feast_parts()
        from feast.infra.key_encoding_utils import serialize_entity_key
        from feast.protos.feast.types import EntityKey_pb2, Value_pb2
        from google.protobuf.timestamp_pb2 import Timestamp

        self._view = view
        self._entities = [column.name for column in view.keys]
        self._suffix = project.encode()
        self._serialize_key, self._key_proto = serialize_entity_key, EntityKey_pb2.EntityKey
        self._value: Any = Value_pb2.Value
        self._timestamp = Timestamp
        self._time_field = f"_ts:{view.name}".encode()
        self._fields: dict[str, bytes] = {
            feature.name: _field(f"{view.name}:{feature.name}") for feature in view.features
        }

    @property
    def fields(self) -> list[bytes]:
        """The hash fields of all features, in the schema's order."""
        return list(self._fields.values())

    @property
    def time_field(self) -> bytes:
        return self._time_field

    def key(self, *entities: str) -> bytes:
        """Return the key of the hash of these entities, in the order of the view's keys."""
        values = [self._value(string_val=entity) for entity in entities]
        proto = self._key_proto(join_keys=self._entities, entity_values=values)
        key: bytes = self._serialize_key(proto, entity_key_serialization_version=3)
        return key + self._suffix

    def cells(self, row: Row, time_us: int) -> dict[bytes, bytes]:
        """Return the hash fields of a row with this event time (Unix µs)."""
        time = self._timestamp(seconds=time_us // 1_000_000, nanos=time_us % 1_000_000 * 1_000)
        cells = {self._time_field: time.SerializeToString()}
        return cells | {
            self._fields[feature.name]: self._encode(feature.type, feature.cell(row)) for feature in self._view.features
        }

    def fields_of(self, names: Sequence[str]) -> list[bytes]:
        return [self._fields[name] for name in names]

    def some(self, row: Row, names: Sequence[str]) -> dict[bytes, bytes]:
        """Return the hash fields of these features of a row."""
        columns = {feature.name: feature for feature in self._view.features}
        return {self._fields[name]: self._encode(columns[name].type, columns[name].cell(row)) for name in names}

    def values(self, names: Sequence[str], cells: Sequence[bytes | None]) -> dict[str, Any]:
        """Return the values of these features by name, from fields in the same order; None for absent features."""
        types = {feature.name: feature.type for feature in self._view.features}
        return {name: self._decode(types[name], cell) for name, cell in zip(names, cells, strict=True)}

    def row(self, entity: str, cells: Sequence[bytes | None]) -> Row | None:
        """Return the row of these fields, given in the order of `fields`; None if all are absent."""
        if all(cell is None for cell in cells):
            return None
        table = {self._view.key.name: [entity]}
        for column, cell in zip(self._view.features, cells, strict=True):
            table[column.name] = [self._decode(column.type, cell)]
        return self._view.from_columns(table)[0]

    def rows(self, entities: Sequence[str], cells: Sequence[Sequence[bytes | None]]) -> dict[str, Row]:
        """Return the rows of these entities by entity, each from its fields as in `row`; absent rows are missing."""
        rows = ((entity, self.row(entity, row_cells)) for entity, row_cells in zip(entities, cells, strict=True))
        return {entity: row for entity, row in rows if row is not None}

    def time_s(self, cell: bytes | None) -> int | None:
        """Return the time (Unix seconds) in the field of the event time; None if it is absent."""
        return None if cell is None else int(self._timestamp.FromString(cell).seconds) or None

    def _encode(self, kind: ColumnType, value: Any) -> bytes:
        proto = self._value()
        if kind.startswith("Array"):
            getattr(proto, _FIELDS[kind]).val.extend(value)
            getattr(proto, _FIELDS[kind]).SetInParent()
        else:
            setattr(proto, _FIELDS[kind], value)
        encoded: bytes = proto.SerializeToString()
        return encoded

    def _decode(self, kind: ColumnType, cell: bytes | None) -> Any:
        if cell is None:
            return None
        value = getattr(self._value.FromString(cell), _FIELDS[kind])
        return list(value.val) if kind.startswith("Array") else value
