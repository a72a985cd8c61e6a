"""Reads the datasets of other training tools: token files of Megatron-LM and datatrove, and MDS shards.

All numbers are little-endian. The layouts are those of Megatron-LM's ``indexed_dataset.py``, datatrove's
``TokenizedFile`` and MosaicML Streaming's ``MDSWriter``:

* Megatron-LM: ``NAME.bin`` contains the tokens of sequences. ``NAME.idx`` contains 9 magic bytes, the version
  (u64), a code of the token type (u8), the number of sequences and the number of document borders (u64 each), the
  sequences' lengths (i32) and byte offsets (i64), and the borders: the index of each document's first sequence, and the
  number of sequences (i64).
* datatrove: ``NAME.ds`` contains tokens of 2 or 4 bytes, ``NAME.ds.index`` the number of tokens up to the end of each
  document (u64), and ``NAME.ds.loss`` whether each token is supervised (u8). The first line of ``NAME.ds.metadata`` is
  ``TOKENIZER|BYTES_PER_TOKEN``.
* MDS: a shard contains the number of samples N, N + 1 byte offsets of samples (u32), the columns as JSON, and the
  samples. A sample contains the size of each column of variable size (u32), and the columns' values.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.files import FileStamp, path_text, unreadable
from ray_ulysses.data.sources.records import is_packed, not_utf8, opened
from ray_ulysses.data.sources.rows import (
    MOST_BYTES,
    TOO_LARGE,
    FieldRole,
    RowError,
    RowFields,
    json_problem,
    option,
    too_large,
)
from ray_ulysses.errors import UserError
from ray_ulysses.storage.retry import READ_ERRORS
from ray_ulysses.validation import parse_json

_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
_DATATROVE_WIDTHS = {2: "u2", 4: "u4"}
_MDS_ARRAY_TYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_MDS_SCALARS = {"int": "i8"} | {
    name: name
    for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "float64")
}
# LLM Foundry's default for columns of type bytes; the format does not store their type.
_MDS_BYTES_TYPE = "i8"
_READ_BYTES = 1 << 20
_NOT_SUPERVISED = -100


@contextmanager
def _open_source(path: str) -> Iterator[BinaryIO]:
    try:
        with opened(path) as file:
            yield file
    except (*READ_ERRORS, EOFError, zlib.error) as error:
        raise unreadable(path, error, "compressed" if is_packed(path) else "") from error


def damaged(path: str, offset: int, rule: str) -> UserError:
    """Return the error for a file that violates its format's rule at a byte offset."""
    return UserError(f"source={path_text(path)}: byte {offset:,}: {rule}; restore the file, or exclude it (--exclude)")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenDocuments:
    """Consecutive documents of a token file."""

    dtype: np.dtype[Any]
    """Type of the stored tokens."""
    borders: NDArray[np.int64]
    """Position of each document's first token in the file, and the position after the last document."""


def token_documents(files: Sequence[FileStamp], first: int = 0, last: int = 0) -> TokenDocuments:
    """Read the index of a token file for the documents ``[first, last)``; with ``last=0``, for all documents.

    ``files`` are the token file, its index, and datatrove's other files.

    Raises:
        UserError: The index is damaged, or does not fit the size of the token file.
    """
    return (_megatron if files[1].path.endswith(".idx") else _datatrove)(files, first, last)


def _megatron(files: Sequence[FileStamp], first: int, last: int) -> TokenDocuments:
    tokens, index = files
    with _open_source(index.path) as file:
        header = file.read(_MEGATRON_HEADER.size)
    if len(header) < _MEGATRON_HEADER.size:
        raise damaged(index.path, len(header), f"the index ends within its header of {_MEGATRON_HEADER.size} bytes")
    _, version, code, num_sequences, num_borders = _MEGATRON_HEADER.unpack(header)
    if version != 1 or code not in _MEGATRON_TYPES:
        known = ", ".join(map(str, _MEGATRON_TYPES))
        wanted = f"expected version 1 and a token type among {known}"
        raise damaged(index.path, 9, f"unsupported version {version} or token type {code}; {wanted}")
    at_offsets = len(header) + 4 * num_sequences
    at_borders = at_offsets + 8 * num_sequences
    size, num_bytes = at_borders + 8 * num_borders, index.num_bytes
    if num_borders < 1 or num_bytes != size:
        is_multimodal = num_bytes == size + num_sequences > size
        rule = (
            f"an index of {num_sequences:,} sequences and {num_borders:,} borders has {size:,} bytes, not {num_bytes:,}"
        )
        raise damaged(
            index.path, min(size, num_bytes), "multimodal datasets are not supported" if is_multimodal else rule
        )
    is_whole, last = not last, last or num_borders - 1
    borders = _numbers(index.path, at_borders + 8 * first, "i8", last - first + 1)
    if is_whole and (borders[0] or borders[-1] != num_sequences):
        raise damaged(index.path, at_borders, f"the borders do not go from sequence 0 to {num_sequences:,}")
    _refuse_decrease(index.path, at_borders + 8 * first, borders, num_sequences)
    start, num = int(borders[0]), int(borders[-1] - borders[0])
    dtype = np.dtype("<" + _MEGATRON_TYPES[code])
    lengths = _numbers(index.path, len(header) + 4 * start, "i4", num)
    offsets = _numbers(index.path, at_offsets + 8 * start, "i8", num)
    positions = np.append(0, np.cumsum(lengths)) + (offsets[0] // dtype.itemsize if start else 0)
    wrong = np.flatnonzero((lengths < 0) | (offsets != positions[:-1] * dtype.itemsize))
    if wrong.size:
        raise damaged(
            index.path, at_offsets + 8 * (start + int(wrong[0])), "the sequence does not follow the previous one"
        )
    if is_whole and positions[-1] * dtype.itemsize != tokens.num_bytes:
        raise damaged(
            tokens.path,
            tokens.num_bytes,
            f"the index lists {positions[-1]:,} tokens of {dtype.itemsize} bytes, but the file has "
            f"{tokens.num_bytes:,} bytes",
        )
    return TokenDocuments(dtype=dtype, borders=positions[borders - start])


def _datatrove(files: Sequence[FileStamp], first: int, last: int) -> TokenDocuments:
    tokens, index = files[:2]
    num_documents, rest = divmod(index.num_bytes, 8)
    if rest:
        raise damaged(index.path, index.num_bytes - rest, "the index ends within a number of 8 bytes")
    num_tokens = int(_numbers(index.path, index.num_bytes - 8, "u8", 1)[0]) if num_documents else 0
    width = tokens.num_bytes // max(1, num_tokens)
    stored = stored_tokenizer(files)[1] or width
    if num_documents and (width * num_tokens != tokens.num_bytes or width != stored or width not in _DATATROVE_WIDTHS):
        sizes = f"{stored}" if stored != width else "2 or 4"
        rule = f"the index lists {num_tokens:,} tokens, but the file does not have {sizes} bytes for each"
        raise damaged(tokens.path, tokens.num_bytes, rule)
    loss = _companion(files, ".loss")
    if loss is not None and loss.num_bytes != num_tokens:
        raise damaged(loss.path, loss.num_bytes, f"the file must have one byte for each of {num_tokens:,} tokens")
    before = max(0, first - 1)
    borders = _numbers(index.path, 8 * before, "u8", (last or num_documents) - before)
    _refuse_decrease(index.path, 8 * before, borders, num_tokens)
    return TokenDocuments(
        dtype=np.dtype("<" + _DATATROVE_WIDTHS.get(width, "u2")), borders=borders if first else np.append(0, borders)
    )


def _refuse_decrease(path: str, offset: int, borders: NDArray[np.int64], most: int) -> None:
    wrong = np.flatnonzero((np.diff(borders, prepend=0) < 0) | (borders > most))
    if wrong.size:
        raise damaged(
            path, offset + 8 * int(wrong[0]), f"the document's border is not between the previous one and {most:,}"
        )


def _numbers(path: str, offset: int, dtype: str, count: int) -> NDArray[np.int64]:
    with _open_source(path) as file:
        found = np.fromfile(file, "<" + dtype, count, offset=offset)
    if found.size < count:
        raise damaged(path, offset + found.nbytes, f"the file ends before {count - found.size:,} numbers of its index")
    return found.astype(np.int64)


def stored_tokenizer(files: Sequence[FileStamp]) -> tuple[str | None, int | None]:
    """Return the tokenizer's name and the bytes per token from a dataset's metadata; None for a missing value."""
    metadata = _companion(files, ".metadata")
    if metadata is None:
        return None, None
    with _open_source(metadata.path) as file:
        line = file.readline(_READ_BYTES).decode("utf-8", "replace").strip()
    name, mark, width = line.rpartition("|")
    if mark and not width.isdecimal():
        raise damaged(metadata.path, 0, f"the first line is {line!r:.80}, not TOKENIZER|BYTES_PER_TOKEN")
    return (name, int(width)) if mark else (line, None)


def stored_type(files: Sequence[FileStamp], fields: RowFields) -> np.dtype[Any] | None:
    """Return the type of the stored tokens, or None if an MDS shard's column of tokens does not declare one."""
    if len(files) > 1:
        return token_documents(files, 0, 1).dtype
    kind, _, form = mds_header(files[0].path).encodings.get(fields.tokens or "", "").partition(":")
    return np.dtype(form.partition(":")[0]) if kind == "ndarray" and form else None


def _companion(files: Sequence[FileStamp], suffix: str) -> FileStamp | None:
    return next((file for file in files if file.path.endswith(suffix)), None)


def token_rows(files: Sequence[FileStamp], first: int, last: int) -> Iterator[Mapping[FieldRole, Any] | RowError]:
    """Yield the tokens, and the labels if stored, of the documents ``[first, last)``, or an error for a large document.

    Raises:
        UserError: A file is damaged or truncated.
    """
    found = token_documents(files, first, last)
    width, loss = found.dtype.itemsize, _companion(files, ".loss")
    with ExitStack() as stack:
        tokens = stack.enter_context(_open_source(files[0].path))
        masks = None if loss is None else stack.enter_context(_open_source(loss.path))
        for start, stop in zip(found.borders[:-1].tolist(), found.borders[1:].tolist(), strict=True):
            if (stop - start) * width > MOST_BYTES:
                yield RowError(f"the tokens are {TOO_LARGE}")
                continue
            ids = np.frombuffer(_part(tokens, files[0].path, start * width, (stop - start) * width), found.dtype)
            row: dict[FieldRole, Any] = {"tokens": ids}
            if loss is not None and masks is not None:
                mask = np.frombuffer(_part(masks, loss.path, start, stop - start), np.uint8)
                row["labels"] = np.where(mask, ids.astype(np.int64), _NOT_SUPERVISED)
            yield row


def _part(file: BinaryIO, path: str, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise damaged(path, offset + len(data), f"the file ends before {size - len(data):,} bytes of a document")
    return data


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MdsHeader:
    """The beginning of an MDS shard."""

    offsets: NDArray[np.int64]
    """Byte offset of each sample, and the end of the last."""
    encodings: Mapping[str, str]
    """Encoding of each column, in stored order."""
    sizes: tuple[int | None, ...]
    """Size in bytes of each column, or None if its size varies."""


def mds_header(path: str) -> MdsHeader:
    """Read the header of a shard, which may be compressed.

    Raises:
        UserError: The shard is damaged or truncated.
    """
    with _open_source(path) as file:
        return _mds_header(file, path)


def _mds_header(file: BinaryIO, path: str) -> MdsHeader:
    num_samples = int.from_bytes(_next(file, path, 0, 4), "little")
    offsets = np.frombuffer(_next(file, path, 4, 4 * num_samples + 4), "<u4").astype(np.int64)
    start = 4 * num_samples + 8
    if offsets[0] < start or (np.diff(offsets) < 0).any():
        raise damaged(path, 4, f"the offsets of {num_samples:,} samples are not in order")
    try:
        columns = parse_json(_next(file, path, start, int(offsets[0]) - start))
        names, encodings, sizes = (columns[f"column_{part}"] for part in ("names", "encodings", "sizes"))
        encoded = dict(zip(map(str, names), map(str, encodings), strict=True))
        sized = tuple(None if size is None else int(size) for size in sizes)
        if len(sized) != len(encoded):
            raise ValueError(f"{len(sized)} sizes for {len(encoded)} columns")
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, start, f"the description of the columns can't be read ({error})") from error
    return MdsHeader(offsets=offsets, encodings=encoded, sizes=sized)


def _next(file: BinaryIO, path: str, offset: int, size: int) -> bytes:
    data = file.read(size) if size <= MOST_BYTES else b""
    if len(data) < size:
        raise damaged(path, offset + len(data), f"the shard ends before {size - len(data):,} bytes of its header")
    return data


def refuse_mds_columns(header: MdsHeader, fields: RowFields, path: str) -> None:
    """Refuse columns in an encoding that is not read, such as a pickle, which may run code.

    Raises:
        UserError: A field is stored in such an encoding.
    """
    for role, name in fields.by_role.items():
        encoding = header.encodings[name]
        if encoding.split(":")[0] not in ("str", "json", "bytes", "ndarray", *_MDS_SCALARS):
            raise UserError(
                f"{option(role)}={name}: {path_text(path)} stores this column as {encoding}, which can't be read; "
                "write it as str, json, bytes or ndarray"
            )


def mds_rows(path: str, fields: RowFields, first: int, last: int) -> Iterator[Mapping[FieldRole, Any] | RowError]:
    """Yield the values of the samples ``[first, last)`` by role, or an error for a sample that can't be decoded.

    With ``last=0``, all samples of the shard are read, which may be compressed.

    Raises:
        UserError: The shard is damaged or truncated.
    """
    with _open_source(path) as file:
        header = _mds_header(file, path)
        last = last or header.offsets.size - 1
        if first:
            file.seek(int(header.offsets[first]))
        for number in range(first, last):
            offset = int(header.offsets[number])
            left = int(header.offsets[number + 1]) - offset
            data = file.read(left) if left <= MOST_BYTES else b""
            if left > MOST_BYTES:
                while left and (part := file.read(min(left, _READ_BYTES))):
                    left -= len(part)
                yield RowError(f"the sample is {TOO_LARGE}")
            elif len(data) < left:
                raise damaged(path, offset + len(data), f"the shard ends within sample {number + 1:,}")
            else:
                yield _mds_row(data, header, fields, path, offset)
        if is_packed(path) and file.read(1):
            raise damaged(path, int(header.offsets[-1]), "the unpacked shard continues after its last sample")


def _mds_row(
    data: bytes, header: MdsHeader, fields: RowFields, path: str, offset: int
) -> Mapping[FieldRole, Any] | RowError:
    num_varying = header.sizes.count(None)
    varying = iter(np.frombuffer(data[: 4 * num_varying], "<u4").tolist() if len(data) >= 4 * num_varying else ())
    sizes = [next(varying, 0) if size is None else size for size in header.sizes]
    stops = 4 * num_varying + np.cumsum(sizes)
    if len(data) != 4 * num_varying + sum(sizes):
        raise damaged(path, offset, f"the sizes of the columns do not add up to the sample's {len(data):,} bytes")
    values = {
        name: data[stop - size : stop] for name, size, stop in zip(header.encodings, sizes, stops.tolist(), strict=True)
    }
    try:
        return {role: _mds_value(values[name], header.encodings[name], role) for role, name in fields.by_role.items()}
    except RowError as error:
        return error
    except (ValueError, KeyError, IndexError) as error:
        raise damaged(path, offset, f"the sample can't be decoded ({error})") from error


def _mds_value(data: bytes, encoding: str, role: FieldRole) -> Any:
    kind, _, form = encoding.partition(":")
    if kind == "ndarray":
        return _mds_array(data, form)
    if kind == "bytes" and role in ("tokens", "labels"):
        if len(data) % 8:
            raise RowError(
                f"the {role} have {len(data)} bytes; a column of type bytes must contain int64, as LLM Foundry's"
            )
        return np.frombuffer(data, "<" + _MDS_BYTES_TYPE)
    if kind in _MDS_SCALARS:
        return np.frombuffer(data, np.dtype(_MDS_SCALARS[kind]).newbyteorder("<"))[0].item()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(not_utf8(error)) from error
    if kind != "json":
        return text
    if (reason := too_large(text)) is not None:
        raise RowError(f"the {role} are {reason}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"the {role} are not JSON: {json_problem(error)}") from error


def _mds_array(data: bytes, form: str) -> NDArray[Any]:
    """Decode an array whose type and shape are in ``form``, as ``TYPE:SHAPE``, or else before the values."""
    stored_type, _, stored_shape = form.partition(":")
    at = 0 if stored_type else 1
    dtype = np.dtype(stored_type or _MDS_ARRAY_TYPES[data[0]]).newbyteorder("<")
    if stored_shape:
        shape = [int(size) for size in stored_shape.split(",")]
    else:
        num_dims, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = np.frombuffer(data, f"<u{width}", num_dims, offset=at + 1).tolist()
        at += 1 + num_dims * width
    return np.frombuffer(data, dtype, offset=at).reshape(shape)
