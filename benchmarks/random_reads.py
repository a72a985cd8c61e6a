"""Reading documents at random: from our shards, and from a Parquet file as pyarrow writes it by default."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.flat_file import BLOCK_BYTES
from ray_ulysses.data.corpus.format import INDEX_DTYPE, INDEX_FILE
from ray_ulysses.data.plan.plan import Plan

TokenRange = tuple[int, int, int]
"""Document, first token, tokens."""


def ours(corpus: Corpus, ranges: Sequence[TokenRange]) -> dict[str, Any]:
    """Time reads of ranges of documents, and count what the blocks hold that they touch."""
    times = _times([lambda s=s: corpus.read(*s) for s in ranges])
    return {"ms": [1e3 * one for one in times], **blocks_read(corpus, ranges)}


def default_parquet(corpus: Corpus, path: Path, documents: NDArray[np.int64]) -> dict[str, Any]:
    """Write the corpus as one Parquet file, a document a row, and time reads of whole documents."""
    tokens = [corpus.read(number, 0, int(length)) for number, length in enumerate(corpus.lengths)]
    dtype = np.dtype(corpus.info.dtype)
    offsets = np.concatenate([[0], np.cumsum(corpus.lengths)])
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(tokens).astype(dtype)))
    pq.write_table(pa.table({"tokens": column}), path)
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        starts = np.cumsum([0, *sizes])

        def read(document: int) -> int:
            group = int(np.searchsorted(starts, document, side="right")) - 1
            row = file.read_row_group(group, columns=["tokens"], use_threads=False).column(0)
            return len(row[document - int(starts[group])].values)

        times = _times([lambda d=int(d): read(d) for d in documents])
        groups = np.searchsorted(starts, documents, side="right") - 1
        found = np.asarray([_group_size(file.metadata, int(group)) for group in groups]).sum(axis=0)
    asked = int(corpus.lengths[documents].sum())
    return {"ms": [1e3 * one for one in times], **_decoded(found, asked, dtype.itemsize)}


def whole_documents(corpus: Corpus, documents: NDArray[np.int64]) -> list[TokenRange]:
    """Return documents as ranges."""
    return [(int(document), 0, int(corpus.lengths[document])) for document in documents]


def row_pieces(plan: Plan, rows: range) -> list[TokenRange]:
    """Return the pieces of rows as they are read for one rank: with the token that is a label alone."""
    return [
        (piece.document, piece.start, max(piece.length, piece.num_labels + 1))
        for row in rows
        for piece in plan.pieces(row)
    ]


def blocks_read(corpus: Corpus, ranges: Sequence[TokenRange]) -> dict[str, int]:
    """Return the tokens that are asked for, and those of the blocks that hold them: what a first read takes.

    A block counts anew for each range, as if nothing were kept between two reads.
    """
    size = np.dtype(corpus.info.dtype).itemsize
    index = np.fromfile(corpus.path / INDEX_FILE, INDEX_DTYPE, 2 * corpus.num_documents).reshape(-1, 2)
    shards = np.cumsum([0, *(shard.num_tokens for shard in corpus.info.shards)])
    num_bytes = 0
    for document, start, length in ranges:
        first = int(index[document, 0]) + start
        shard = int(np.searchsorted(shards, first, side="right")) - 1
        begin, end = ((place - int(shards[shard])) * size for place in (first, first + length))
        whole = int(corpus.info.shards[shard].num_tokens) * size
        num_bytes += min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, whole) - begin // BLOCK_BYTES * BLOCK_BYTES
    return _decoded(np.asarray([num_bytes // size, num_bytes]), sum(length for _, _, length in ranges), size)


def _decoded(found: NDArray[np.int64], asked_tokens: int, token_bytes: int) -> dict[str, int]:
    return {
        "decoded_tokens": int(found[0]),
        "unpacked_bytes": int(found[1]),
        "asked_tokens": asked_tokens,
        "asked_bytes": asked_tokens * token_bytes,
    }


def _group_size(footer: pq.FileMetaData, number: int) -> tuple[int, int]:
    """Return the tokens of a row group, and the bytes that they are unpacked to."""
    group = footer.row_group(number)
    columns = [group.column(column) for column in range(group.num_columns)]
    (tokens,) = (one for one in columns if one.path_in_schema.startswith("tokens"))
    return tokens.num_values, tokens.total_uncompressed_size


def _times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the seconds of each call, after one that is not counted."""
    calls[0]()
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds
