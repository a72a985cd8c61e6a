"""Reading the documents of one unit; what can't be a document is rejected with its reason."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from ray_ulysses.data.shard import READ_ERRORS
from ray_ulysses.data.sources import Rejected, Unit, open_dataset
from ray_ulysses.errors import UserError

_BATCH_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RawDocument:
    """The text of one document and where it came from.

    Attributes:
        text: The text, not empty and valid as UTF-8.
        source: File or data set.
        offset: Line (from 1) or row (from 0) in it; 0 for a whole file.
    """

    text: str
    source: str
    offset: int


def read_unit(unit: Unit) -> Iterator[RawDocument | Rejected]:
    """Yield the unit's documents in their order, and in their place those that are left out.

    Raises:
        UserError: A file can't be read as what it is; the text names it.
    """
    readers = {"text": _read_texts, "jsonl": _read_jsonl, "parquet": _read_parquet, "datasets": _read_dataset}
    yield from readers[unit.kind](unit)


def _document(text: object, source: str, offset: int) -> RawDocument | Rejected:
    if not isinstance(text, str):
        return Rejected(source=source, offset=offset, reason=f"the text is {_json_type(text)}, not a string")
    if not text:
        return Rejected(source=source, offset=offset, reason="empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Rejected(source=source, offset=offset, reason=f"a lone surrogate at character {error.start}")
    return RawDocument(text=text, source=source, offset=offset)


def _json_type(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _decode(data: bytes, source: str, offset: int) -> str | Rejected:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        return Rejected(source=source, offset=offset, reason=reason)


def _read_texts(unit: Unit) -> Iterator[RawDocument | Rejected]:
    for file in unit.files:
        try:
            data = Path(file.path).read_bytes()
        except OSError as error:
            yield Rejected(source=file.path, offset=0, reason=f"can't be read: {error.strerror}")
            continue
        text = _decode(data, file.path, 0)
        yield text if isinstance(text, Rejected) else _document(text, file.path, 0)


def _read_jsonl(unit: Unit) -> Iterator[RawDocument | Rejected]:
    path = unit.files[0].path
    num_parsed, num_broken = 0, 0
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                parsed = _parse_line(line, path, number, unit.text_field)
                num_broken += isinstance(parsed, Rejected) and parsed.reason.startswith("not JSON")
                num_parsed += 1
                yield parsed
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"source={path}: the JSONL file can't be read ({error}); restore or remove it") from error
    if num_parsed and num_broken == num_parsed:
        raise UserError(f"source={path}: none of its {num_parsed} lines is a JSON object; is it a JSONL file?")


def _parse_line(line: bytes, path: str, number: int, text_field: str) -> RawDocument | Rejected:
    decoded = _decode(line, path, number)
    if isinstance(decoded, Rejected):
        return decoded
    try:
        record = json.loads(decoded)
    except ValueError as error:
        return Rejected(source=path, offset=number, reason=f"not JSON: {error}")
    if not isinstance(record, dict):
        return Rejected(source=path, offset=number, reason="not JSON object")
    if text_field not in record:
        return Rejected(source=path, offset=number, reason=f"no field '{text_field}'")
    return _document(record[text_field], path, number)


def _read_parquet(unit: Unit) -> Iterator[RawDocument | Rejected]:
    path = unit.files[0].path
    try:
        with pq.ParquetFile(path) as parquet:
            metadata = parquet.metadata
            row = sum(metadata.row_group(group).num_rows for group in range(unit.first))
            for batch in parquet.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=range(unit.first, unit.last), columns=[unit.text_field]
            ):
                for value in batch.column(0):
                    yield _document(value.as_py(), path, row)
                    row += 1
    except READ_ERRORS as error:
        raise UserError(f"source={path}: the Parquet file can't be read ({error}); restore or remove it") from error


def _read_dataset(unit: Unit) -> Iterator[RawDocument | Rejected]:
    path = unit.files[0].path
    dataset = open_dataset(path, unit.split).select_columns([unit.text_field])
    for first in range(unit.first, unit.last, _BATCH_ROWS):
        rows = dataset[first : min(first + _BATCH_ROWS, unit.last)]
        for row, value in enumerate(rows[unit.text_field], start=first):
            yield _document(value, path, row)
