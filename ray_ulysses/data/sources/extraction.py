"""Extracts documents from one unit of a source. A row that cannot become a document is rejected with a reason."""

from __future__ import annotations

import codecs
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.sources.files import changed, left_out, open_parquet, path_text, unreadable
from ray_ulysses.data.sources.records import (
    LineCounts,
    array_values,
    decoded_text,
    fasta_records,
    filled_records,
    json_records,
    line_records,
    not_utf8,
)
from ray_ulysses.data.sources.rows import (
    MOST_BYTES,
    OPTIONAL_ROLES,
    TOO_LARGE,
    CompletionRow,
    Content,
    FieldRole,
    PairRow,
    Rejected,
    RowError,
    RowFields,
    TokenRow,
    describe_type,
    fields_found,
    fitting_options,
    missing_role,
    option,
    row_content,
    utf8_text,
)
from ray_ulysses.data.sources.token_files import mds_rows, token_rows
from ray_ulysses.data.sources.units import TOKENIZED, Unit, dataset_stamp, dataset_state, open_dataset
from ray_ulysses.errors import UserError
from ray_ulysses.storage.retry import READ_ERRORS

_BATCH_ROWS = 64
_BATCH_BYTES = 4 << 20
# A value stored once for many rows may expand to this size when a batch is decoded.
_MOST_BATCH_BYTES = 4 * MOST_BYTES
# Text and tokens never compress by more than this factor.
_PACKED_TIMES = 1000
_BUFFER_BYTES = 1 << 20
_PEEKED_LINES = 8
_FIRST_ROWS = 1000
_BINARY_CHARACTERS = 8000
_LARGEST_WEIGHT = 1_000_000
_ANSWER_LABELS = dict.fromkeys(("true", "1", "1.0"), "true") | dict.fromkeys(("false", "0", "0.0"), "false")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawDocument:
    """One document before tokenization, with its origin."""

    content: Content
    """Non-empty valid UTF-8 text, tokens, a chat, a prompt with its completion, or a pair of answers."""
    source: str
    """Path of the source file, or path or Hub id of the dataset."""
    offset: int
    """Line or row number within the source, from 1, or 0 if the document is an entire file."""
    id: str = ""
    """Row id from the source, or an empty string if the row has no id."""
    weight: float | NDArray[np.float32] = 1.0
    """Loss weight of all tokens in the document, or one weight per token."""
    label: str | None = None
    """Class of the document, or None if the corpus has no classes."""


def read_unit(unit: Unit) -> Iterator[RawDocument | Rejected | LineCounts]:
    """Yield the unit's documents in order, and a `Rejected` for each row that cannot become a document.

    A JSONL or FASTA unit also has `LineCounts`, of lines or records. Their numbers start at 1 in the unit's byte range.

    Raises:
        UserError: A file can't be read in its format.
    """
    readers: dict[str, Callable[[Unit], Iterator[RawDocument | Rejected | LineCounts]]]
    readers = {
        "text": lambda unit: (_text_document(file.path) for file in unit.files),
        "json": _read_json,
        "jsonl": _read_jsonl,
        "fasta": _read_fasta,
        "parquet": _read_parquet,
        "datasets": _read_dataset,
        **dict.fromkeys(TOKENIZED, _read_tool_files),
    }
    found = readers[unit.kind](unit)
    yield from _with_other_answers(found) if unit.fields.kind == "answer" else found


def _with_other_answers(
    found: Iterator[RawDocument | Rejected | LineCounts],
) -> Iterator[RawDocument | Rejected | LineCounts]:
    """Follow each answer by its prompt with the next answer of the unit, and the last one by that with the first.

    Prompts with answers of others estimate the KL divergence of KTO.
    """
    first = held = None
    for one in found:
        if not isinstance(one, RawDocument):
            yield one
            continue
        if held is not None:
            yield _followed(held, one)
        first, held = first or one, one
    if first is not None and held is not None:
        reason = "the only labeled answer of its file or part of a file, but the KL divergence needs another"
        yield left_out(first.source, reason, first.offset) if held is first else _followed(held, first)


def _followed(document: RawDocument, other: RawDocument) -> RawDocument:
    own, foreign = document.content, other.content
    assert isinstance(own, CompletionRow) and isinstance(foreign, CompletionRow)
    return replace(document, content=PairRow(chosen=own, rejected=replace(own, completion=foreign.completion)))


def refuse_missing_fields(units: Sequence[Unit]) -> None:
    """Refuse JSONL and JSON files whose first rows all lack the required fields, before reading any file completely.

    Raises:
        UserError: The first rows lack a required field. The message lists the fields found and suggests options.
    """
    example: tuple[str, list[str]] | None = None
    may_be_text = False
    for unit in units:
        if unit.kind not in ("jsonl", "json"):
            return
        needed, may_be_text = _needed(unit.fields), unit.kind == "json" and not unit.fields.are_named
        for file in unit.files if unit.first == 0 else ():
            records = filled_records(file.path) if unit.kind == "jsonl" else json_records(file.path)
            rows: list[list[str]] = []
            # An unreadable JSON file yields no more rows.
            with suppress(UserError):
                for _, record in itertools.islice(records, _FIRST_ROWS):
                    if isinstance(record, Rejected):
                        continue
                    if record.keys() >= needed:
                        return
                    rows.append([*record])
            # JSON that does not look like rows is read as text.
            if may_be_text and not (rows[1:] and fitting_options(rows[0])):
                return
            example = example or next(((file.path, names) for names in rows), None)
    if example is not None:
        path, names = example
        role, name = missing_role(names, units[0].fields)
        raise UserError(
            f"{option(role)}={name}: none of the first rows of {path_text(path)} has this field; "
            f"{fields_found(names)}{', or --kind text for whole files' if may_be_text else ''}"
        )


@functools.lru_cache(maxsize=8)
def _needed(fields: RowFields) -> frozenset[str]:
    return frozenset(field for role, field in fields.by_role.items() if role not in OPTIONAL_ROLES)


def _document(row: Mapping[FieldRole, Any], fields: RowFields, path: str, offset: int) -> RawDocument | Rejected:
    try:
        content = row_content(row, fields.kind)
        label_of = _answer_label if fields.kind == "answer" else _row_label
        return RawDocument(
            content=content,
            source=path_text(path),
            offset=offset,
            id=row_id(row.get("id")),
            weight=row_weight(row.get("weight"), content),
            label=None if fields.label is None else label_of(row["label"]),
        )
    except RowError as error:
        return left_out(path, str(error), offset)


def row_id(value: object) -> str:
    """Return a row's id as text, or an empty string if the id is null; raise RowError for any other type."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"the id is {describe_type(value)}, not a string or an integer")
    return utf8_text(str(value))


def _row_label(value: object) -> str:
    """Return the class of a row's document as text; raise RowError unless it is an integer or a string."""
    # A boolean is a class of 0 or 1.
    if not isinstance(value, str | int):
        raise RowError(f"the class is {describe_type(value)}, not an integer or a string")
    if value == "":
        raise RowError("the class is empty")
    return utf8_text(value) if isinstance(value, str) else str(int(value))


def _answer_label(value: object) -> str:
    """Return ``true`` for a desirable answer and ``false`` for another; raise RowError unless it is one of them."""
    label = _ANSWER_LABELS.get(str(value).lower())
    if label is None:
        raise RowError(f"the label is {value!r:.40}, not true, false, 1 or 0 (other classes need --text-field)")
    return label


def row_weight(value: object, content: Content) -> float | NDArray[np.float32]:
    """Return the row's loss weight, or one weight per token. The default is 1.

    Raises:
        RowError: A weight is negative or not a number, or the list's length is not the number of tokens.
    """
    if value is None:
        return 1.0
    if not isinstance(value, list | np.ndarray):
        return _weight(value, "the weight")
    if not isinstance(content, TokenRow):
        raise RowError("the weight is a list, but only rows of tokens can have one weight per token")
    if len(value) != content.tokens.size:
        raise RowError(f"there are {len(value)} weights for {content.tokens.size} tokens")
    # A mask may contain booleans.
    numbers = (float(one) if isinstance(one, bool | np.bool_) else one for one in value)
    return np.array([_weight(one, f"weight {place}") for place, one in enumerate(numbers)], dtype=np.float32)


def _weight(value: object, name: str) -> float:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise RowError(f"{name} is {describe_type(number)}, not a number")
    if not 0 <= number <= _LARGEST_WEIGHT:
        raise RowError(f"{name} is {number!r:.40}, not a number from 0 to {_LARGEST_WEIGHT:,}")
    return float(np.float32(number))


def _text_document(path: str) -> RawDocument | Rejected:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        # A rejection would silently drop the document, although the error may be temporary.
        raise unreadable(path, error) from error
    if len(data) > MOST_BYTES:
        return left_out(path, TOO_LARGE)
    text = decoded_text(data.removeprefix(codecs.BOM_UTF8), path)
    if isinstance(text, Rejected):
        return text
    # Git's rule for binary files. Token ids below 128 and archives of texts are valid UTF-8.
    if (place := text.find("\0", 0, _BINARY_CHARACTERS)) >= 0:
        return left_out(path, f"a binary file: NUL at character {place}")
    return _document({"text": text}, RowFields(), path, 0)


def _read_json(unit: Unit) -> Iterator[RawDocument | Rejected]:
    fields = unit.fields
    for file in unit.files:
        if fields.are_named or _is_list_of_rows(file.path, fields) or _has_row_per_line(file.path, fields):
            yield from _json_rows(file.path, fields)
        else:
            yield _text_document(file.path)


def _is_list_of_rows(path: str, fields: RowFields) -> bool:
    """Return whether the file is a JSON list of objects, at least one of which has the required fields."""
    needed, has_fields = _needed(fields), False
    try:
        for value in array_values(path):
            if not isinstance(value, dict):
                return False
            has_fields = has_fields or value.keys() >= needed
    except RecursionError:
        return False
    except RowError:
        # Decide by the rows before the oversized value.
        return has_fields
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        if has_fields:
            raise unreadable(path, error, "JSON") from error
        return False
    return has_fields


def _has_row_per_line(path: str, fields: RowFields) -> bool:
    """Return whether a ``.json`` file begins like JSON Lines: two objects, at least one with the required fields."""
    found = [record for _, record in itertools.islice(filled_records(path), _PEEKED_LINES)]
    objects = [record for record in found if not isinstance(record, Rejected)]
    return len(objects) > 1 and any(record.keys() >= _needed(fields) for record in objects)


def _json_rows(path: str, fields: RowFields) -> Iterator[RawDocument | Rejected]:
    """Yield one document per row of a JSON file, or a single `Rejected` if no row has the required fields."""
    held: list[RawDocument | Rejected] | None = []
    for number, record in json_records(path):
        found = _row(record, path, number, fields)
        if held is None:
            yield found
            continue
        held.append(found)
        # Stop buffering: the file may have millions of lines that are not rows.
        if len(held) == _FIRST_ROWS or (not isinstance(record, Rejected) and record.keys() >= _needed(fields)):
            yield from held
            held = None
    if held is not None:
        first = next((one.reason for one in held if isinstance(one, Rejected)), "empty")
        yield left_out(path, f"no row has the required fields: {first}")


def _read_jsonl(unit: Unit) -> Iterator[RawDocument | Rejected | LineCounts]:
    path = unit.files[0].path
    number, num_filled, num_broken = 0, 0, 0
    for number, record in line_records(path, unit.first, unit.last or math.inf):
        if record is not None:
            yield _row(record, path, number, unit.fields)
            num_filled += 1
            num_broken += isinstance(record, Rejected)
    yield LineCounts(source=path, num_lines=number, num_filled=num_filled, num_broken=num_broken)


def _read_fasta(unit: Unit) -> Iterator[RawDocument | Rejected | LineCounts]:
    path, number = unit.files[0].path, 0
    for number, (name, sequence) in enumerate(fasta_records(path, unit.first, unit.last or math.inf), start=1):
        if len(sequence) > MOST_BYTES:
            yield left_out(path, TOO_LARGE, number)
            continue
        text = decoded_text(bytes(sequence), path, number, begins_file=False)
        found = text if isinstance(text, Rejected) else _document({"text": text, "id": name}, unit.fields, path, number)
        sequence.clear()
        yield found
    yield LineCounts(source=path, num_lines=number, num_filled=number, num_broken=0)


def _row(record: Mapping[str, Any] | Rejected, path: str, number: int, fields: RowFields) -> RawDocument | Rejected:
    if isinstance(record, Rejected):
        return record
    if not record.keys() >= _needed(fields):
        names = [*record]
        return left_out(path, f"no field {missing_role(names, fields)[1]!r}: {fields_found(names)}", number)
    return _document({role: record.get(field) for role, field in fields.by_role.items()}, fields, path, number)


def _read_parquet(unit: Unit) -> Iterator[RawDocument | Rejected]:
    path = unit.files[0].path
    columns = list(dict.fromkeys(unit.fields.by_role.values()))
    try:
        # Without a buffer, pyarrow 25 loads entire column chunks of a row group; with a buffer, only one page.
        with open_parquet(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet:
            metadata = parquet.metadata
            row = 1 + sum(metadata.row_group(group).num_rows for group in range(unit.first))
            for group in range(unit.first, unit.last):
                num_rows = metadata.row_group(group).num_rows
                unpacked, problem = _unpacked_bytes(metadata.row_group(group), columns)
                if problem is not None:
                    yield left_out(path, f"{num_rows} rows: {problem}", row)
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
    """Return the number of rows to decode at once. Long documents get smaller batches, to bound memory."""
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * num_rows // max(1, num_bytes)))


def _unpacked_bytes(group: pq.RowGroupMetaData, columns: Sequence[str]) -> tuple[int, str | None]:
    """Return the bytes that the row group's largest row may need, and a reason to reject the row group, or None."""
    unpacked = 0
    for place in range(group.num_columns):
        column = group.column(place)
        if not any(column.path_in_schema == name or column.path_in_schema.startswith(f"{name}.") for name in columns):
            continue
        is_text = column.physical_type == "BYTE_ARRAY"
        size = column.total_uncompressed_size if is_text else 8 * column.num_values
        # Masks and weights often store one value for all tokens.
        most = MOST_BYTES if is_text else _MOST_BATCH_BYTES
        if size > max(most, _PACKED_TIMES * column.total_compressed_size):
            small = column.total_compressed_size
            return size, f"{column.path_in_schema!r} expands from {small:,} to {size:,} bytes"
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
            raise unreadable(path, error, "dataset's") from error
        row = first + 1
        for batch in table.combine_chunks().to_batches():
            yield from _batch_documents(batch, unit.fields, path, row)
            row += batch.num_rows
    if dataset_state(path, opened) != unit.state:
        raise changed(path)


def _read_tool_files(unit: Unit) -> Iterator[RawDocument | Rejected]:
    path = unit.files[0].path
    fields = unit.fields if unit.kind == "mds" else RowFields(tokens="tokens")
    if unit.kind == "mds":
        rows = mds_rows(path, fields, unit.first, unit.last)
    else:
        rows = token_rows(unit.files, unit.first, unit.last)
    for number, row in enumerate(rows, unit.first + 1):
        found = left_out(path, str(row), number) if isinstance(row, RowError) else _document(row, fields, path, number)
        if unit.is_windows and isinstance(found, RawDocument) and isinstance(found.content, TokenRow):
            found = replace(found, content=replace(found.content, is_window=True))
        yield found


def _batch_documents(
    batch: pa.RecordBatch, fields: RowFields, path: str, first_row: int
) -> Iterator[RawDocument | Rejected]:
    by_role = {role: batch.column(batch.schema.get_field_index(field)) for role, field in fields.by_role.items()}
    for place in range(batch.num_rows):
        try:
            row = {role: _value(column, place, role) for role, column in by_role.items()}
        except RowError as error:
            yield left_out(path, str(error), first_row + place)
            continue
        yield _document(row, fields, path, first_row + place)


def _value(column: pa.Array, place: int, role: FieldRole) -> object:
    """Return the value at index ``place``. A list of integers becomes an array, since converting to ints is slow.

    Raises:
        RowError: The value is too large, or has no Python equivalent: text that is not UTF-8, a time before the year 1,
            a list nested too deeply.
    """
    if column.nbytes > MOST_BYTES and column.slice(place, 1).nbytes > MOST_BYTES:
        raise RowError(f"the {role} is {TOO_LARGE}")
    scalar = column[place]
    values = scalar.values if isinstance(scalar, pa.ListScalar) else None
    if isinstance(values, pa.IntegerArray) and values.null_count == 0:
        return values.to_numpy(zero_copy_only=False)
    try:
        found = scalar.as_py()
        # Weights per token may be a million numbers; a list of numbers contains no objects to clean.
        return found if values is not None and pa.types.is_primitive(values.type) else _without_nulls(found)
    except UnicodeDecodeError as error:
        raise RowError(not_utf8(error)) from error
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise RowError(f"the {role} can't be read: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Remove null fields. In Arrow, every object in a column has the same fields, and absent ones are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
