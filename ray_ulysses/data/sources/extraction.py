"""Reads the documents of one unit; what can't be a document is rejected with a reason."""

from __future__ import annotations

import codecs
import functools
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic_core import from_json

from ray_ulysses.data.sources.file_listing import changed, open_parquet, path_text, unreadable
from ray_ulysses.data.sources.json_file import array_values, is_list, whole_object
from ray_ulysses.data.sources.line_ranges import LineCounts, bounded_lines, range_lines
from ray_ulysses.data.sources.quarantine import Rejected, RowError
from ray_ulysses.data.sources.row_fields import (
    OPTIONAL_ROLES,
    Content,
    FieldRole,
    RowFields,
    fields_found,
    fitting_options,
    missing_role,
    option,
    row_content,
    row_id,
    row_weight,
)
from ray_ulysses.data.sources.row_values import MOST_BYTES, TOO_LARGE, json_problem, too_large
from ray_ulysses.data.sources.units import ONLY_JSONL, Unit, dataset_stamp, dataset_state, is_packed, open_dataset
from ray_ulysses.data.sources.zstd_file import open_zstd
from ray_ulysses.errors import UserError
from ray_ulysses.storage.patience import READ_ERRORS

_BATCH_ROWS = 64
_BATCH_BYTES = 4 << 20
# Values that are stored once for many rows may take so much in the rows of a batch.
_MOST_BATCH_BYTES = 4 * MOST_BYTES
# No text and no tokens are packed as well as that.
_PACKED_TIMES = 1000
_BUFFER_BYTES = 1 << 20
_PACKING_MARKS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_NO_OBJECT = "not a JSON object"
_PEEKED_LINES = 8
_FIRST_ROWS = 1000
_BINARY_CHARACTERS = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class RawDocument:
    """One document before it is tokenized, and its origin.

    Attributes:
        content: Text (not empty and valid as UTF-8), tokens, a chat, or a prompt with its completion.
        source: File or data set.
        offset: Line or row in it, from 1; 0 for a whole file.
        id: The row's own id; empty if it has none.
        weight: The factor on the loss of its tokens, or that of each of them.
    """

    content: Content
    source: str
    offset: int
    id: str = ""
    weight: float | NDArray[np.float32] = 1.0


def read_unit(unit: Unit) -> Iterator[RawDocument | Rejected | LineCounts]:
    """Yield the unit's documents in order, a `Rejected` for each that is left out, and last the count of lines.

    Only JSONL has lines. They are counted, and its documents numbered, from the beginning of the unit's range.

    Raises:
        UserError: Names a file that can't be read in its format.
    """
    readers: dict[str, Callable[[Unit], Iterator[RawDocument | Rejected | LineCounts]]]
    readers = {
        "text": _read_texts,
        "json": _read_json,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "datasets": _read_dataset,
    }
    yield from readers[unit.kind](unit)


def refuse_missing_fields(units: Sequence[Unit]) -> None:
    """Refuse JSONL and JSON files if none of their first rows has the fields, before any file is read as a whole.

    Raises:
        UserError: Names the fields found, and the options that fit.
    """
    example: tuple[str, list[str]] | None = None
    may_be_text = False
    for unit in units:
        if unit.kind not in ("jsonl", "json"):
            return
        needed, may_be_text = _needed(unit.fields), unit.kind == "json" and not unit.fields.are_named
        for file in unit.files if unit.first == 0 else ():
            rows: list[list[str]] = []
            for names in _first_rows(unit.kind, file.path):
                if needed.issubset(names):
                    return
                rows.append(names)
            # JSON that does not look like rows is a text.
            if may_be_text and not (rows[1:] and fitting_options(rows[0])):
                return
            example = example or next(((file.path, names) for names in rows), None)
    if example is not None:
        path, names = example
        role, name = missing_role(names, units[0].fields)
        raise UserError(
            f"{option(role)}={name}: none of the first rows of {path_text(path)} has such a field; "
            f"{fields_found(names)}{', or --kind text for whole files' if may_be_text else ''}"
        )


def _first_rows(kind: str, path: str) -> Iterator[list[str]]:
    """Yield the names of the fields of a file's first rows; nothing more where a JSON file can't be read as rows."""
    records = _line_records(path) if kind == "jsonl" else _json_records(path)
    with suppress(UserError):
        for _, record in itertools.islice(records, _FIRST_ROWS):
            if not isinstance(record, Rejected):
                yield [*record]


def _document(row: Mapping[FieldRole, Any], fields: RowFields, path: str, offset: int) -> RawDocument | Rejected:
    source = path_text(path)
    try:
        content = row_content(row, fields.kind)
        return RawDocument(
            content=content,
            source=source,
            offset=offset,
            id=row_id(row.get("id")),
            weight=row_weight(row.get("weight"), content),
        )
    except RowError as error:
        return Rejected(source=source, offset=offset, reason=str(error))


def _decode(data: bytes, path: str, offset: int, *, begins_file: bool) -> str | Rejected:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        packing = next((name for mark, name in _PACKING_MARKS.items() if data.startswith(mark)), None)
        reason = _not_utf8(error) if packing is None or not begins_file else f"compressed with {packing}: {ONLY_JSONL}"
        return Rejected(source=path_text(path), offset=offset, reason=reason)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def _read_texts(unit: Unit) -> Iterator[RawDocument | Rejected]:
    for file in unit.files:
        text = _whole_text(file.path)
        yield text if isinstance(text, Rejected) else _document({"text": text}, RowFields(), file.path, 0)


def _read_json(unit: Unit) -> Iterator[RawDocument | Rejected]:
    """Read the rows of JSON files; a file without rows is a text unless a field is named."""
    fields = unit.fields
    for file in unit.files:
        if fields.are_named or _is_list_of_rows(file.path, fields) or _has_row_per_line(file.path, fields):
            yield from _json_rows(file.path, fields)
            continue
        text = _whole_text(file.path)
        yield text if isinstance(text, Rejected) else _document({"text": text}, RowFields(), file.path, 0)


def _is_list_of_rows(path: str, fields: RowFields) -> bool:
    """Return whether a file is a JSON list of objects, at least one of which has the fields; reads it once.

    Raises:
        UserError: It begins as such a list and is torn or damaged.
    """
    needed, has_fields = _needed(fields), False
    try:
        for value in array_values(path):
            if not isinstance(value, dict):
                return False
            has_fields = has_fields or value.keys() >= needed
    except RecursionError:
        return False
    except RowError:
        # The rows before it count.
        return has_fields
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        if has_fields:
            raise unreadable(path, error, "JSON") from error
        return False
    return has_fields


def _has_row_per_line(path: str, fields: RowFields) -> bool:
    """Return whether two of the first lines are objects, one with the fields, as in JSON Lines in a ``.json`` file."""
    found = [record for _, record in itertools.islice(_line_records(path), _PEEKED_LINES)]
    objects = [record for record in found if not isinstance(record, Rejected)]
    return len(objects) > 1 and any(record.keys() >= _needed(fields) for record in objects)


def _json_rows(path: str, fields: RowFields) -> Iterator[RawDocument | Rejected]:
    """Yield the document of each row of a JSON file, or one `Rejected` if none of its few values has the fields."""
    held: list[RawDocument | Rejected] | None = []
    for number, record in _json_records(path):
        found = record if isinstance(record, Rejected) else _row(record, path, number, fields)
        if held is None:
            yield found
            continue
        held.append(found)
        # Bounded, since a file may have millions of lines that are not rows.
        if len(held) == _FIRST_ROWS or (not isinstance(record, Rejected) and record.keys() >= _needed(fields)):
            yield from held
            held = None
    if held is not None:
        first = next((one.reason for one in held if isinstance(one, Rejected)), "empty")
        yield Rejected(source=path_text(path), offset=0, reason=f"no row in it: {first}")


def _json_records(path: str) -> Iterator[tuple[int, Mapping[str, Any] | Rejected]]:
    """Yield the values of a list, the object that fills a file, or the values of its lines, numbered from 1."""
    number = 0
    try:
        if is_list(path):
            for number, value in enumerate(array_values(path), start=1):
                yield number, _object(value, path, number)
            return
        records = _line_records(path)
        first = next(records, None)
        if first is None:
            return
        if isinstance(first[1], Rejected) and (whole := _whole_record(path)) is not None:
            yield 1, whole
            return
        yield first
        yield from records
    except RowError as error:
        reason = f"{error}; the rest of the list is left out with it"
        yield number + 1, Rejected(source=path_text(path), offset=number + 1, reason=reason)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error, "JSON") from error


def _whole_record(path: str) -> Mapping[str, Any] | Rejected | None:
    try:
        return whole_object(path)
    except EOFError as error:
        return Rejected(source=path_text(path), offset=1, reason=f"not JSON: {error}")
    except RowError as error:
        return Rejected(source=path_text(path), offset=1, reason=str(error))


def _line_records(path: str) -> Iterator[tuple[int, Mapping[str, Any] | Rejected]]:
    """Yield the object of each line that is not blank, or the reason to leave it out, with its number."""
    try:
        with _open_packed(path) if is_packed(path) else open(path, "rb") as lines:
            for number, line in enumerate(bounded_lines(lines), start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line and not line.isspace():
                    yield number, _record(line, path, number, begins_file=number == 1)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, "JSONL" if is_packed(path) else "") from error


@functools.lru_cache(maxsize=8)
def _needed(fields: RowFields) -> frozenset[str]:
    return frozenset(field for role, field in fields.by_role.items() if role not in OPTIONAL_ROLES)


def _whole_text(path: str) -> str | Rejected:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        # Rejecting it would lose the document for good.
        raise unreadable(path, error) from error
    if len(data) > MOST_BYTES:
        return Rejected(source=path_text(path), offset=0, reason=TOO_LARGE)
    text = _decode(data.removeprefix(codecs.BOM_UTF8), path, 0, begins_file=True)
    # As git recognizes binary files: token ids below 128 and archives of texts are valid UTF-8.
    if isinstance(text, str) and (place := text.find("\0", 0, _BINARY_CHARACTERS)) >= 0:
        return Rejected(source=path_text(path), offset=0, reason=f"a binary file: a NUL at character {place}")
    return text


def _open_packed(path: str) -> AbstractContextManager[BinaryIO]:
    opened = open_zstd(path) if path.lower().endswith(".zst") else gzip.open(path, "rb")  # noqa: SIM115 -- closed by the caller
    return cast("AbstractContextManager[BinaryIO]", opened)


def _lines(unit: Unit) -> Iterator[bytes]:
    file = unit.files[0]
    if not is_packed(file.path):
        yield from range_lines(file.path, unit.first, unit.last or file.num_bytes)
        return
    with _open_packed(file.path) as lines:
        yield from bounded_lines(lines)


def _read_jsonl(unit: Unit) -> Iterator[RawDocument | Rejected | LineCounts]:
    path = unit.files[0].path
    number, num_filled, num_broken = 0, 0, 0
    try:
        for number, line in enumerate(_lines(unit), start=1):
            begins_file = number == 1 and unit.first == 0
            if begins_file:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line or line.isspace():
                continue
            record = _record(line, path, number, begins_file=begins_file)
            num_broken += isinstance(record, Rejected)
            yield record if isinstance(record, Rejected) else _row(record, path, number, unit.fields)
            num_filled += 1
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, "JSONL") from error
    yield LineCounts(source=path, num_lines=number, num_filled=num_filled, num_broken=num_broken)


def _record(line: bytes, path: str, number: int, *, begins_file: bool) -> Mapping[str, Any] | Rejected:
    """Return the JSON object of a line, or the reason to leave it out."""
    if (reason := too_large(line)) is not None:
        return Rejected(source=path_text(path), offset=number, reason=reason)
    try:
        # Without a copy of the line, and without a string for each part between two escapes.
        return _object(from_json(line), path, number)
    except ValueError:
        # Falls back to `json`, which also reads lone surrogates and names the reason of a refusal.
        decoded = _decode(line, path, number, begins_file=begins_file)
        if isinstance(decoded, Rejected):
            return decoded
        try:
            return _object(json.loads(decoded), path, number)
        except (ValueError, RecursionError) as error:
            return Rejected(source=path_text(path), offset=number, reason=f"not JSON: {json_problem(error)}")


def _object(value: Any, path: str, number: int) -> Mapping[str, Any] | Rejected:
    return value if isinstance(value, dict) else Rejected(source=path_text(path), offset=number, reason=_NO_OBJECT)


def _missing_field(names: Sequence[str], fields: RowFields) -> str:
    return f"no field {missing_role(names, fields)[1]!r}: {fields_found(names)}"


def _row(record: Mapping[str, Any], path: str, number: int, fields: RowFields) -> RawDocument | Rejected:
    if not record.keys() >= _needed(fields):
        return Rejected(source=path_text(path), offset=number, reason=_missing_field([*record], fields))
    return _document({role: record.get(field) for role, field in fields.by_role.items()}, fields, path, number)


def _read_parquet(unit: Unit) -> Iterator[RawDocument | Rejected]:
    path = unit.files[0].path
    columns = list(dict.fromkeys(unit.fields.by_role.values()))
    try:
        # Without a buffer pyarrow 25 holds whole columns of a row group; with one, only a page.
        with open_parquet(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet:
            metadata = parquet.metadata
            row = 1 + sum(metadata.row_group(group).num_rows for group in range(unit.first))
            for group in range(unit.first, unit.last):
                num_rows = metadata.row_group(group).num_rows
                unpacked, problem = _unpacked_bytes(metadata.row_group(group), columns)
                if problem is not None:
                    yield Rejected(source=path_text(path), offset=row, reason=f"{num_rows} rows: {problem}")
                    row += num_rows
                    continue
                size = _batch_rows(num_rows, metadata.row_group(group).total_byte_size)
                size = max(1, min(size, _MOST_BATCH_BYTES // max(1, unpacked)))
                for batch in parquet.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
                    yield from _batch_documents(batch, unit.fields, path, row)
                    row += batch.num_rows
    except READ_ERRORS as error:
        raise unreadable(path, error, "Parquet") from error


def _batch_rows(num_rows: int, num_bytes: int) -> int:
    """Return the number of rows to decode at once, so that long documents do not accumulate in memory."""
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * num_rows // max(1, num_bytes)))


def _unpacked_bytes(group: pq.RowGroupMetaData, columns: Sequence[str]) -> tuple[int, str | None]:
    """Return what the largest row of a row group may take in memory, and the reason to leave all of them out."""
    unpacked = 0
    for place in range(group.num_columns):
        column = group.column(place)
        if not any(column.path_in_schema == name or column.path_in_schema.startswith(f"{name}.") for name in columns):
            continue
        is_text = column.physical_type == "BYTE_ARRAY"
        size = column.total_uncompressed_size if is_text else 8 * column.num_values
        # Masks and weights are often one value for all tokens.
        most = MOST_BYTES if is_text else _MOST_BATCH_BYTES
        if size > max(most, _PACKED_TIMES * column.total_compressed_size):
            small = column.total_compressed_size
            return size, f"{column.path_in_schema!r} unpacks from {small:,} bytes to {size:,}"
        unpacked += size
    return unpacked, None


def _read_dataset(unit: Unit) -> Iterator[RawDocument | Rejected]:
    path = unit.files[0].path
    columns = list(dict.fromkeys(unit.fields.by_role.values()))
    opened, _ = open_dataset(path, unit.split)
    if dataset_stamp(path, opened) != unit.files[0]:
        raise changed(path)
    dataset = opened.select_columns(columns).with_format("arrow")
    size = _batch_rows(unit.last - unit.first, unit.num_bytes)
    for first in range(unit.first, unit.last, size):
        try:
            table = dataset[first : min(first + size, unit.last)]
        except READ_ERRORS as error:
            raise unreadable(path, error, "data set's") from error
        row = first + 1
        for batch in table.combine_chunks().to_batches():
            yield from _batch_documents(batch, unit.fields, path, row)
            row += batch.num_rows
    if dataset_state(path, opened) != unit.state:
        raise changed(path)


def _batch_documents(
    batch: pa.RecordBatch, fields: RowFields, path: str, first_row: int
) -> Iterator[RawDocument | Rejected]:
    by_role = {role: batch.column(batch.schema.get_field_index(field)) for role, field in fields.by_role.items()}
    for place in range(batch.num_rows):
        try:
            row = {role: _value(column, place, role) for role, column in by_role.items()}
        except RowError as error:
            yield Rejected(source=path_text(path), offset=first_row + place, reason=str(error))
            continue
        yield _document(row, fields, path, first_row + place)


def _value(column: pa.Array, place: int, role: FieldRole) -> object:
    """Return a value; lists of integers as arrays, since a million Python integers take a second.

    Raises:
        RowError: Python has no such value: text that is not UTF-8, a time before the year 1, a list of too many levels;
            or the value takes too much memory.
    """
    if column.nbytes > MOST_BYTES and column.slice(place, 1).nbytes > MOST_BYTES:
        raise RowError(f"the {role} is {TOO_LARGE}")
    scalar = column[place]
    values = scalar.values if isinstance(scalar, pa.ListScalar) else None
    if isinstance(values, pa.IntegerArray) and values.null_count == 0:
        return values.to_numpy(zero_copy_only=False)
    try:
        found = scalar.as_py()
        # A weight of each token is a million numbers, and holds no objects.
        return found if values is not None and pa.types.is_primitive(values.type) else _without_nulls(found)
    except UnicodeDecodeError as error:
        raise RowError(_not_utf8(error)) from error
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise RowError(f"the {role} can't be read: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the null fields of its objects, all of which have the fields of each."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
