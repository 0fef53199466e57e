"""Rows in and out of `offbeat score`: JSONL or parquet by suffix, a stream either way.

A file that is written appears under its name when it is whole: it is made beside it and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.data import Row, jsonl_rows
from offbeat.errors import UserError

FORMATS = (".jsonl", ".parquet")
BATCH_ROWS = 512
"""Rows of a parquet file that are in memory at once, and of its row groups."""

Result = Mapping[str, Any]
"""The columns that scoring adds to a row."""


def check_format(path: Path, what: str) -> None:
    """Refuses a file that is neither JSONL nor parquet by its name."""
    if path.suffix not in FORMATS:
        raise UserError(f"{what} {path} is neither .jsonl nor .parquet; name a file of one of them")


def stream(path: Path) -> Iterator[Row]:
    """The rows of a file one after another, numbered from 1 (JSONL: by line)."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; name a JSONL or parquet file of answers")
    if path.suffix == ".jsonl":
        yield from jsonl_rows(path)
        return
    number = 0
    for batch in _batches(path):
        try:
            found = batch.to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} holds what is not UTF-8 text ({error}); mend its rows"
            ) from None
        for columns in found:
            number += 1
            yield Row(number, columns)


def fingerprint(path: Path) -> str:
    """The sha256 of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}; put it back") from None


def part_of(out: Path) -> Path:
    """The name under which a file is made."""
    return out.with_name(f"{out.name}.part")


def write(out: Path, source: Path, results: Iterator[Result], fields: Mapping[str, Any]) -> None:
    """Writes `source`'s rows with their results, in order, to `out`. `fields` are the arrow types
    of the columns that are added."""
    part = part_of(out)
    try:
        if out.suffix == ".jsonl":
            with part.open("wb") as file:
                for row, result in zip(stream(source), results, strict=True):
                    file.write(_line({**row.columns, **result}))
        else:
            _write_parquet(part, source, results, fields)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error}; make room, and the same command writes it without "
            "scoring anew"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def check_fits(source: Path, fields: Mapping[str, Any]) -> None:
    """Refuses rows that no parquet file holds, which only writing tells: this writes nowhere."""
    _write_parquet(pa.MockOutputStream(), source, repeat(dict.fromkeys(fields)), fields)


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can say
        return json.dumps(row, default=str).encode() + b"\n"


def _write_parquet(
    sink: Any, source: Path, results: Iterator[Result], fields: Mapping[str, Any]
) -> None:
    schema = _schema(source)
    batches = _batches(source) if source.suffix == ".parquet" else _arrow(source, schema)
    for name, kind in fields.items():
        schema = schema.append(pa.field(name, kind))
    try:
        with pq.ParquetWriter(sink, schema) as writer:
            for batch in batches:
                found = list(islice(results, batch.num_rows))
                arrays = [pa.array([r[name] for r in found], kind) for name, kind in fields.items()]
                writer.write_batch(
                    pa.RecordBatch.from_arrays([*batch.columns, *arrays], schema=schema),
                    row_group_size=BATCH_ROWS,
                )
    except pa.ArrowException as error:
        raise UserError(
            f"{source} does not fit into a parquet file ({error}); write JSONL instead, with -o "
            "NAME.jsonl"
        ) from None


def _batches(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=BATCH_ROWS)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from None


def _schema(path: Path) -> Any:
    """The arrow schema of a file's rows: parquet's own, or what fits all rows of JSONL."""
    if path.suffix == ".parquet":
        return pq.read_schema(path)
    schema = pa.schema([])
    for rows in _chunks(path):
        names = dict.fromkeys(name for row in rows for name in row.columns)
        fields = [pa.field(name, _column(path, rows, name, None).type) for name in names]
        try:
            schema = pa.unify_schemas([schema, pa.schema(fields)], promote_options="permissive")
        except pa.ArrowException as error:
            raise _mixed(path, rows, str(error)) from None
    return schema


def _arrow(path: Path, schema: Any) -> Iterator[Any]:
    for rows in _chunks(path):
        arrays = [_column(path, rows, field.name, field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _chunks(path: Path) -> Iterator[Sequence[Row]]:
    rows = stream(path)
    while chunk := list(islice(rows, BATCH_ROWS)):
        yield chunk


def _column(path: Path, rows: Sequence[Row], name: str, kind: Any) -> Any:
    try:
        return pa.array([row.columns.get(name) for row in rows], kind)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise _mixed(path, rows, f"{name}: {error}") from None


def _mixed(path: Path, rows: Sequence[Row], why: str) -> UserError:
    return UserError(
        f"{path} lines {rows[0].line} to {rows[-1].line} do not fit into a parquet column ({why}); "
        "write JSONL instead, with -o NAME.jsonl"
    )
