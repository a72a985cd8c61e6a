"""Writes the formats of other training tools by their published layouts, independently of the readers.

On 29 November 2026, files written by megatron-core 0.16.1 (``IndexedDatasetBuilder``, uint16 and int32, two sequences a
document), datatrove 0.10.1 (``TokenizedFile``, 2 and 4 bytes, with a loss file) and mosaicml-streaming 0.13.0
(``MDSWriter``; text, int, ndarray, ndarray:int32 and bytes; plain, zstd and gzip) were read back identically by hand.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

Documents = Sequence[Sequence[int]]


def write_megatron(path: Path, documents: Documents, dtype: str = "uint16", cuts: Sequence[int] = ()) -> list[Path]:
    """Write ``path.bin`` and ``path.idx``. Each document is cut into sequences after ``cuts`` tokens."""
    codes = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "uint16": 8}
    sequences = [part for tokens in documents for part in np.split(np.array(tokens, dtype), cuts)]
    borders = [number * (len(cuts) + 1) for number in range(len(documents) + 1)]
    lengths = [one.size for one in sequences]
    offsets = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, codes[dtype], len(sequences), len(borders))
    index += np.array(lengths, "<i4").tobytes() + offsets.astype("<i8").tobytes() + np.array(borders, "<i8").tobytes()
    paths = [path.with_suffix(".bin"), path.with_suffix(".idx")]
    paths[0].write_bytes(b"".join(one.tobytes() for one in sequences))
    paths[1].write_bytes(index)
    return paths


def write_datatrove(
    path: Path, documents: Documents, width: int = 2, tokenizer: str | None = None, masked: int | None = None
) -> list[Path]:
    """Write ``path.ds`` with its index, its metadata, and a loss file that excludes the first ``masked`` tokens."""
    tokens = [token for document in documents for token in document]
    ends = np.cumsum([len(document) for document in documents])
    files = {".ds": np.array(tokens, f"<u{width}").tobytes(), ".ds.index": ends.astype("<u8").tobytes()}
    if tokenizer is not None:
        files[".ds.metadata"] = f"{tokenizer}|{width}\n{len(tokens)}\n{len(tokens)} T".encode()
    if masked is not None:
        files[".ds.loss"] = b"".join(bytes(place >= masked for place, _ in enumerate(one)) for one in documents)
    for suffix, data in files.items():
        path.with_suffix(suffix).write_bytes(data)
    return [path.with_suffix(suffix) for suffix in files]


def encoded(value: Any, encoding: str) -> bytes:
    """Encode a value of an MDS sample."""
    if encoding in ("str", "json"):
        return (value if encoding == "str" else json.dumps(value)).encode()
    if encoding == "bytes":
        return bytes(np.array(value, "<i8").tobytes())
    if encoding == "int":
        return struct.pack("<q", value)
    _, _, dtype = encoding.partition(":")
    values = np.array(value, dtype or "<i4")
    shape = bytes([1 << 2 | 1]) + struct.pack("<H", values.size)
    return (b"" if dtype else bytes([33])) + shape + values.tobytes()


def write_mds(
    folder: Path, columns: dict[str, str], samples: Sequence[dict[str, Any]], per_shard: int = 3, packing: str = ""
) -> list[Path]:
    """Write MDS shards and ``index.json``; ``packing`` is the suffix of compressed shards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    description = {
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [8 if columns[name] == "int" else None for name in names],
        "compression": packing or None,
        "format": "mds",
        "hashes": [],
        "version": 2,
    }
    config, entries, paths = json.dumps(description).encode(), [], list[Path]()
    for first in range(0, len(samples), per_shard):
        parts = []
        for sample in samples[first : first + per_shard]:
            values = [encoded(sample[name], columns[name]) for name in names]
            sizes = [len(value) for name, value in zip(names, values, strict=True) if columns[name] != "int"]
            parts.append(np.array(sizes, "<u4").tobytes() + b"".join(values))
        offsets = np.cumsum([4 * (len(parts) + 2) + len(config), *map(len, parts)])
        data = struct.pack("<I", len(parts)) + offsets.astype("<u4").tobytes() + config + b"".join(parts)
        packed = zstandard.compress(data) if packing == "zstd" else gzip.compress(data) if packing == "gz" else data
        name = f"shard.{len(paths):05d}.mds"
        paths.append(folder / (f"{name}.{packing}" if packing else name))
        paths[-1].write_bytes(packed)
        raw, zipped = {"basename": name, "bytes": len(data)}, {"basename": paths[-1].name, "bytes": len(packed)}
        entries.append(description | {"samples": len(parts), "raw_data": raw, "zip_data": zipped if packing else None})
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))
    return [*paths, folder / "index.json"]
