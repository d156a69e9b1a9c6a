"""A run as a folder of Parquet files, one a table, with columns as in `gyre.store.models`.

Token ids are lists of int32 and log-probs lists of float32, so that any reader has them as numbers; JSON is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Double,
    Float,
    Integer,
    LargeBinary,
    Text,
)
from sqlalchemy.dialects.postgresql import JSONB

from gyre.export.errors import ExportError
from gyre.export.rows import TABLES, Importer, Row, Scope, check_scope, columns, has_serial_id, read

FORMAT = "gyre-1"
_ARRAYS = {"token_ids": ("<i4", pa.int32()), "logprobs": ("<f4", pa.float32())}


def export_parquet(connection: Connection, scope: Scope, folder: Path) -> dict[str, int]:
    """Write the rows of `scope` into `folder`, which must be new or empty; returns rows by table.

    Raises ExportError.
    """
    check_scope(connection, scope)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ExportError(f"{folder} is not empty; name a new folder")
    counts = {}
    for table in TABLES:
        schema = _schema(table)
        counts[table] = 0
        with pq.ParquetWriter(folder / f"{table}.parquet", schema, compression="zstd") as writer:
            for batch in read(connection, scope, table):
                writer.write_table(pa.table([_column(batch, field) for field in schema], schema=schema))
                counts[table] += len(batch)
    return counts


def import_parquet(connection: Connection, folder: Path, run_id: str | None = None) -> tuple[str, dict[str, int]]:
    """Insert an exported run; returns its name here, and rows by table. Raises ExportError."""
    importer = Importer(connection, run_id)
    counts = {}
    for table in TABLES:
        path = folder / f"{table}.parquet"
        if not path.is_file():
            raise ExportError(f"{path} is missing; the export is not whole")
        with pq.ParquetFile(path) as file:
            if (file.schema_arrow.metadata or {}).get(b"gyre") != FORMAT.encode():
                raise ExportError(f"{path} was not written by `gyre export` of this version")
            if has_serial_id(table):
                importer.reserve(table, file.read(columns=["id"])["id"].to_pylist())
            counts[table] = importer.insert(table, _rows(table, file))
    return importer.run_id, counts


def _schema(table: str) -> pa.Schema:
    wanted = [TABLES[table].columns[name] for name in columns(table)]
    fields = [pa.field(c.name, _type(c), nullable=bool(c.nullable)) for c in wanted]
    return pa.schema(fields, metadata={"gyre": FORMAT})


def _type(column: Column[Any]) -> pa.DataType:
    if column.name in _ARRAYS:
        return pa.list_(_ARRAYS[column.name][1])
    kind = column.type
    if isinstance(kind, ARRAY):
        return pa.list_(pa.int64() if isinstance(kind.item_type, BigInteger) else pa.string())
    for sql_type, arrow in (
        (BigInteger, pa.int64()), (Integer, pa.int32()), (Double, pa.float64()), (Float, pa.float64()),
        (Boolean, pa.bool_()), (DateTime, pa.timestamp("us", tz="UTC")), (JSONB, pa.string()), (Text, pa.string()),
        (LargeBinary, pa.binary()),
    ):  # fmt: skip
        if isinstance(kind, sql_type):
            return arrow
    raise TypeError(f"{column}: no Parquet type for {kind!r}")


def _column(batch: list[Row], field: pa.Field) -> pa.Array:
    values = [row[field.name] for row in batch]
    if field.name in _ARRAYS:
        lengths = [0 if v is None else len(v) // 4 for v in values]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        flat = pa.array(np.frombuffer(b"".join(v for v in values if v is not None), _ARRAYS[field.name][0]))
        return pa.ListArray.from_arrays(offsets, flat, mask=pa.array([v is None for v in values]))
    if field.type == pa.string() and any(isinstance(v, dict | list) for v in values):
        values = [None if v is None else json.dumps(v, ensure_ascii=False) for v in values]
    return pa.array(values, field.type)


def _rows(table: str, file: pq.ParquetFile) -> Iterator[list[Row]]:
    convert: dict[str, Callable[[Any], Any]] = {
        c.name: json.loads for c in TABLES[table].columns if isinstance(c.type, JSONB)
    }
    for batch in file.iter_batches(batch_size=500):
        named = dict(zip(batch.schema.names, batch.columns, strict=True))
        arrays = {name: _bytes(named.pop(name), name) for name in _ARRAYS if name in named}
        lists = {name: column.to_pylist() for name, column in named.items()}
        for name in lists.keys() & convert.keys():
            lists[name] = [None if v is None else convert[name](v) for v in lists[name]]
        lists |= arrays
        names = batch.schema.names
        yield [dict(zip(names, row, strict=True)) for row in zip(*(lists[n] for n in names), strict=True)]


def _bytes(column: pa.ListArray, name: str) -> list[bytes | None]:
    return [None if not item.is_valid else np.asarray(item.values, _ARRAYS[name][0]).tobytes() for item in column]
