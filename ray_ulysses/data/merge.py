"""The end of a preparation: notes become the length sidecar, and ``corpus.json`` commits the corpus."""

from __future__ import annotations

import json
import shutil
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.atomic import atomic_file, file_crc32, write_text
from ray_ulysses.data.format import (
    CORPUS_FILE,
    DOCUMENT_SCHEMA,
    DOCUMENTS_FILE,
    PREPARATION_FILE,
    QUARANTINE_FILE,
    SHARDS_DIRECTORY,
    UNITS_DIRECTORY,
    CorpusInfo,
    token_dtype,
)
from ray_ulysses.data.shard import ShardReader
from ray_ulysses.data.sources import Rejected
from ray_ulysses.data.tokenizers import TokenizerInfo
from ray_ulysses.data.unit_writer import UnitResult, unit_file
from ray_ulysses.errors import UserError

Duplicates = Literal["quarantine", "keep"]
_SIDECAR_GROUP_ROWS = 1 << 18


def merge(
    out: Path,
    results: Sequence[UnitResult],
    *,
    tokenizer: TokenizerInfo,
    rejected: Sequence[Rejected],
    duplicates: Duplicates,
    signature: str,
) -> CorpusInfo:
    """Write the sidecar, the quarantine and, last, ``corpus.json``; then drop the units' notes.

    Raises:
        UserError: No document is left.
    """
    with_shards = [result for result in results if result.shard is not None]
    notes = [pq.read_table(unit_file(out, result.index, "parquet")) for result in with_shards]
    repeats = _repeats(notes) if duplicates == "quarantine" else [np.zeros(len(n), dtype=np.int64) - 1 for n in notes]
    rejected = [*rejected, *_repeated_documents(notes, repeats)]
    num_quarantined, reasons = _write_quarantine(out, results, rejected)
    documents = _documents(notes, repeats)
    if documents.num_rows == 0:
        common = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        raise UserError(
            f"the sources hold no usable document: {num_quarantined} were left out: {common}. "
            f"{out / QUARANTINE_FILE} names each"
        )
    with atomic_file(out / DOCUMENTS_FILE) as temporary:
        pq.write_table(documents, temporary, compression="zstd", row_group_size=_SIDECAR_GROUP_ROWS)
    lengths = documents.column("length").to_numpy().astype("<i8")
    byte_entropy, token_entropy = _entropies(out, with_shards, notes, repeats)
    info = CorpusInfo(
        tokenizer=tokenizer,
        dtype=token_dtype(tokenizer.vocab_size).name,
        num_documents=documents.num_rows,
        num_tokens=int(lengths.sum()),
        max_token_id=int(documents.column("max_token_id").to_numpy().max()),
        num_quarantined=num_quarantined,
        shards=tuple(result.shard for result in with_shards if result.shard is not None),
        documents_bytes=(out / DOCUMENTS_FILE).stat().st_size,
        documents_crc32=file_crc32(out / DOCUMENTS_FILE),
        lengths_crc32=zlib.crc32(lengths.tobytes()),
        byte_unigram_nats=byte_entropy,
        token_unigram_nats=token_entropy,
        signature=signature,
    )
    write_text(out / CORPUS_FILE, json.dumps(info.to_json(), indent=2) + "\n")
    shutil.rmtree(out / UNITS_DIRECTORY, ignore_errors=True)
    (out / PREPARATION_FILE).unlink(missing_ok=True)
    return info


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Return the Shannon entropy, in nats, of a distribution given by its counts."""
    positive = counts[counts > 0].astype(np.float64)
    shares = positive / positive.sum()
    return float(-(shares * np.log(shares)).sum())


def _repeats(notes: Sequence[pa.Table]) -> list[NDArray[np.int64]]:
    """Return for each document the number (over all units) of the first one with the same text, or -1."""
    if not notes:
        return []
    sizes = [len(table) for table in notes]
    chunks = [chunk for table in notes for chunk in table.column("content").chunks]
    views = [np.frombuffer(chunk.buffers()[1], dtype=np.uint64).reshape(-1, 2) for chunk in chunks]
    halves = np.concatenate([v[c.offset : c.offset + len(c)] for v, c in zip(views, chunks, strict=True)])
    order = np.lexsort((np.arange(len(halves)), halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    firsts = order[np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))]
    repeated = np.full(len(order), -1, dtype=np.int64)
    repeated[order] = np.where(starts, -1, firsts)
    return list(np.split(repeated, np.cumsum(sizes)[:-1]))


def _repeated_documents(notes: Sequence[pa.Table], repeats: Sequence[NDArray[np.int64]]) -> list[Rejected]:
    if not notes:
        return []
    places = pa.concat_tables(notes).select(["source", "offset"])
    firsts = np.concatenate(repeats)
    found = []
    for number in np.flatnonzero(firsts >= 0).tolist():
        first = places.slice(int(firsts[number]), 1).to_pylist()[0]
        here = places.slice(number, 1).to_pylist()[0]
        reason = f"the same text as {first['source']}" + (f" at {first['offset']}" if first["offset"] else "")
        found.append(Rejected(source=here["source"], offset=here["offset"], reason=reason))
    return found


def _documents(notes: Sequence[pa.Table], repeats: Sequence[NDArray[np.int64]]) -> pa.Table:
    parts = []
    first = 0
    for shard, (table, repeated) in enumerate(zip(notes, repeats, strict=True)):
        kept = table.filter(pa.array(repeated < 0))
        numbers = np.arange(first, first + len(kept), dtype=np.int64)
        columns = {
            "document": pa.array(numbers),
            "shard": pa.array(np.full(len(kept), shard, dtype=np.int32)),
            **{name: kept.column(name) for name in ("length", "max_token_id", "first_row", "source", "offset")},
        }
        parts.append(pa.table({name: columns[name] for name in DOCUMENT_SCHEMA.names}).cast(DOCUMENT_SCHEMA))
        first += len(kept)
    return pa.concat_tables(parts) if parts else DOCUMENT_SCHEMA.empty_table()


def _write_quarantine(
    out: Path, results: Sequence[UnitResult], rejected: Sequence[Rejected]
) -> tuple[int, Counter[str]]:
    """Write everything that was left out into one file; return how much, and how often for each reason."""
    lines = [json.dumps(asdict(one)) for one in rejected]
    for result in results:
        lines.extend(unit_file(out, result.index, "quarantine.jsonl").read_text(encoding="utf-8").splitlines())
    write_text(out / QUARANTINE_FILE, "".join(line + "\n" for line in lines))
    return len(lines), Counter(json.loads(line)["reason"].split(":")[0] for line in lines)


def _entropies(
    out: Path, results: Sequence[UnitResult], notes: Sequence[pa.Table], repeats: Sequence[NDArray[np.int64]]
) -> tuple[float | None, float | None]:
    """Return the entropy of the raw bytes and of the token ids over the documents that are kept."""
    known = [result.token_counts for result in results if result.token_counts is not None]
    if len(known) < len(results):
        return None, None
    reader = ShardReader(out / SHARDS_DIRECTORY)
    counts = np.asarray(known, dtype=np.int64).sum(axis=0)
    for result, table, repeated in zip(results, notes, repeats, strict=True):
        assert result.shard is not None
        for dropped in table.filter(pa.array(repeated >= 0)).select(["first_row", "length"]).to_pylist():
            tokens = reader.read(result.shard.name, dropped["first_row"], 0, dropped["length"])
            counts -= np.bincount(tokens, minlength=counts.size)
    return entropy_nats(counts[:256]), entropy_nats(counts)
