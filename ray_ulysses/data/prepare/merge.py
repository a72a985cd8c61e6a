"""Merges the units of a preparation: combines their notes into the sidecar files and commits the corpus.

If a JSONL file is divided into several units, each unit numbers its lines from 1, and the merge adds the number of
preceding lines. Notes are read unit by unit, but all documents' digests (16 bytes each) are in memory to find repeats.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import (
    Corpus,
    digest_halves,
    first_of_same_content,
    read_shards,
    spans_crc32,
    table_crc32,
)
from ray_ulysses.data.corpus.flat_file import FlatWriter
from ray_ulysses.data.corpus.format import (
    CORPUS_FILE,
    DOCUMENT_SCHEMA,
    DOCUMENTS_FILE,
    INDEX_DTYPE,
    INDEX_FILE,
    LABELED_SCHEMA,
    PREPARATION_FILE,
    QUARANTINE_FILE,
    SHARDS_DIRECTORY,
    SPANS_FILE,
    SPANS_SCHEMA,
    UNITS_DIRECTORY,
    WEIGHTED_SPANS_SCHEMA,
    CorpusInfo,
    SpansInfo,
    ordered_classes,
    token_dtype,
)
from ray_ulysses.data.corpus.row_groups import RowGroupWriter
from ray_ulysses.data.prepare.unit_writer import UnitResult, unit_file
from ray_ulysses.data.sources.records import number_lines, refuse_files_without_objects
from ray_ulysses.data.sources.rows import Rejected, reason_class
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, EncodingInfo
from ray_ulysses.data.tokenize.tokenizers import TokenizerInfo
from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import TEMPORARY_PREFIX, atomic_file, write_text
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.regular import sync
from ray_ulysses.storage.retry import RETRY, RetryPolicy
from ray_ulysses.storage.store import crc32_of

Duplicates = Literal["quarantine", "keep"]
_CACHED_NOTES = 8
_MOST_REASONS = 20


def merge(
    out: Path,
    results: Sequence[UnitResult],
    *,
    encoder: DocumentEncoder,
    rejected: Sequence[Rejected],
    duplicates: Duplicates,
    signature: str,
    others: Sequence[Corpus] = (),
    retry: RetryPolicy = RETRY,
) -> CorpusInfo:
    """Write the sidecar files, the quarantine file and, last, ``corpus.json``. Merging again writes the same files.

    Documents that occur in ``others`` are excluded. All files listed in ``corpus.json`` are durable before the commit.

    Raises:
        UserError: No document is left, or a JSONL file contains no JSON object.
        READ_ERRORS: The notes can't be read, or the corpus can't be written.
    """
    refuse_files_without_objects([result.lines for result in results])
    numbered = number_lines([result.lines for result in results])
    results = [replace(result, lines=lines) for result, lines in zip(results, numbered, strict=True)]
    units = [result for result in results if result.shard is not None]
    repeats = _repeats(out, units, others, duplicates)
    repeated = _repeated_documents(out, units, repeats, others)
    num_quarantined, reasons = _write_quarantine(out, results, rejected, repeated)
    if not any((repeated < 0).any() for repeated in repeats):
        # The shards contain only duplicates.
        shutil.rmtree(out / SHARDS_DIRECTORY, ignore_errors=True)
        if not num_quarantined:
            raise UserError("the sources contain no documents: the files are empty")
        common = "; ".join(f"{reason} ({count})" for reason, count in reasons[:3])
        with (out / QUARANTINE_FILE).open(encoding="utf-8") as lines:
            first = Rejected(**json.loads(next(lines)))
        where = f"{first.source} at {first.offset}" if first.offset else first.source
        raise UserError(
            f"the sources contain no usable document: {num_quarantined} were left out ({common}). The first is {where} "
            f"({first.reason})"
        )
    documents = _write_documents(out, units, repeats)
    spans = _write_spans(out, units, repeats) if any(unit.has_spans for unit in units) else None
    tokenizer, num_chats = encoder.tokenizer.info, sum(result.num_chats for result in results)
    byte_entropy, token_entropy = _entropies(out, units, repeats, tokenizer, retry)
    info = CorpusInfo(
        tokenizer=tokenizer,
        vocabulary=encoder.tokenizer.tokens.vocabulary(),
        encoding=EncodingInfo(
            bos_token_id=encoder.bos_token_id,
            eos_token_id=encoder.eos_token_id,
            chats=encoder.chat.description if num_chats else None,
            num_chats=num_chats,
            num_chat_documents=sum(result.num_chat_documents for result in results),
            num_open_turns=sum(result.num_open_turns for result in results),
            num_unknown=sum(result.num_unknown for result in results),
            chat_template=encoder.chat.template if num_chats else None,
        ),
        dtype=token_dtype(tokenizer.vocab_size).name,
        num_quarantined=num_quarantined,
        shards=tuple(unit.shard for unit in units if unit.shard is not None),
        byte_unigram_nats=byte_entropy,
        token_unigram_nats=token_entropy,
        signature=signature,
        reasons=reasons,
        spans=spans,
        turn_ends=tuple(sorted({token for unit in units for token in unit.turn_ends})),
        are_pairs=units[0].are_pairs,
        are_queries=units[0].are_queries,
        **documents,
    )
    # The files were synced when written. Syncing the folders makes the file names durable.
    for directory in (out / SHARDS_DIRECTORY, out):
        sync(directory)
    write_text(out / CORPUS_FILE, json.dumps(info.to_json(), indent=2) + "\n")
    return info


def remove_working_files(out: Path, info: CorpusInfo) -> None:
    """Remove a preparation's working files: notes, temporary files, and shards of units that no longer exist.

    Such shards remain if source files were removed before an interrupted preparation was resumed. Errors are ignored,
    since the files are harmless and the next preparation removes them.
    """
    store = LocalStore(out)
    for path in working_files(out, info):
        with suppress(OSError):
            store.delete(str(path.relative_to(out)))


def working_files(out: Path, info: CorpusInfo) -> list[Path]:
    """Return the files that the preparation left behind in a complete corpus's directory."""
    shards = {shard.name for shard in info.shards}
    found = [path for path in (out / UNITS_DIRECTORY, out / PREPARATION_FILE) if path.exists()]
    for folder in (out, out / SHARDS_DIRECTORY):
        found += folder.glob(f"{TEMPORARY_PREFIX}*")
    found += [path for path in (out / SHARDS_DIRECTORY).glob("shard-*") if path.name not in shards]
    return found


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Return the Shannon entropy in nats of the distribution with the given counts."""
    positive = counts[counts > 0].astype(np.float64)
    shares = positive / positive.sum()
    return float(-(shares * np.log(shares)).sum())


def _notes(out: Path, unit: UnitResult, columns: Sequence[str] | None = None) -> pa.Table:
    notes = pq.read_table(unit_file(out, unit.index, "parquet"), columns=columns)
    if "offset" not in notes.column_names or unit.lines is None:
        return notes
    place = notes.schema.get_field_index("offset")
    return notes.set_column(place, notes.schema.field(place), pc.add(notes.column(place), unit.lines.num_before))


def _kept_notes(
    out: Path, units: Sequence[UnitResult], repeats: Sequence[NDArray[np.int64]], columns: Sequence[str]
) -> Iterator[tuple[int, pa.Table]]:
    """Yield each unit's first document number, and the notes of the unit's documents that are not repeats."""
    first = 0
    for unit, repeated in zip(units, repeats, strict=True):
        kept = _notes(out, unit, columns).filter(pa.array(repeated < 0))
        yield first, kept
        first += kept.num_rows


def _repeats(
    out: Path, units: Sequence[UnitResult], others: Sequence[Corpus], duplicates: Duplicates
) -> list[NDArray[np.int64]]:
    """Find repeated documents; see `first_of_same_content`. With ``keep``, only documents in ``others`` count."""
    if duplicates == "keep" and not others:
        return [np.full(unit.num_documents, -1, dtype=np.int64) for unit in units]

    def digests(unit: UnitResult) -> NDArray[np.uint64]:
        chunks = _notes(out, unit, ["content"]).column("content").chunks
        return np.concatenate([np.empty((0, 2), dtype=np.uint64), *map(digest_halves, chunks)])

    known = [corpus.digests() for corpus in others]
    found = first_of_same_content([*known, *map(digests, units)])[len(known) :]
    if duplicates == "keep":
        num_known = sum(map(len, known))
        return [np.where(repeated < num_known, repeated, -1) for repeated in found]
    return found


def _repeated_documents(
    out: Path, units: Sequence[UnitResult], repeats: Sequence[NDArray[np.int64]], others: Sequence[Corpus]
) -> Iterator[Rejected]:
    """Yield a `Rejected` for each repeated document, with the first occurrence of the content as the reason."""
    sizes = [*(corpus.num_documents for corpus in others), *(repeated.size for repeated in repeats)]
    begins = np.cumsum([0, *sizes])

    @functools.lru_cache(maxsize=_CACHED_NOTES)
    def places(unit: int) -> pa.Table:
        return _notes(out, units[unit], ["source", "offset"])

    def place(number: int) -> tuple[str, int]:
        group = int(np.searchsorted(begins, number, side="right")) - 1
        row = number - int(begins[group])
        if group < len(others):
            return others[group].source(row)[:2]
        notes = places(group - len(others))
        return notes.column("source")[row].as_py(), notes.column("offset")[row].as_py()

    for begin, repeated in zip(begins[len(others) :].tolist(), repeats, strict=False):
        for row in np.flatnonzero(repeated >= 0).tolist():
            first_source, first_offset = place(int(repeated[row]))
            source, offset = place(begin + row)
            reason = f"the same content as {first_source}" + (f" at {first_offset}" if first_offset else "")
            if repeated[row] < begins[len(others)]:
                reason += " in another corpus"
            yield Rejected(source=source, offset=offset, reason=reason)


def _write_documents(out: Path, units: Sequence[UnitResult], repeats: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """Write the document table and the index, and return the ``corpus.json`` fields that describe them."""
    columns = [*LABELED_SCHEMA.names, "first_token"]
    classes: tuple[str, ...] = ()
    if units[0].has_labels:
        notes = _kept_notes(out, units, repeats, ["label"])
        classes = ordered_classes(name for _, kept in notes for name in pc.unique(kept.column("label")).to_pylist())
    schema = LABELED_SCHEMA if classes else DOCUMENT_SCHEMA
    num_documents, num_tokens, largest, crc32, labels_crc32, first_of_shard = 0, 0, 0, 0, 0, 0
    with atomic_file(out / DOCUMENTS_FILE) as temporary, atomic_file(out / INDEX_FILE) as index_temporary:
        writer, index = RowGroupWriter(temporary, schema), FlatWriter(index_temporary, INDEX_DTYPE)
        for unit, (_, kept) in zip(units, _kept_notes(out, units, repeats, columns), strict=True):
            firsts = kept.column("first_token").to_numpy() + first_of_shard
            first_of_shard += unit.num_tokens
            lengths = kept.column("length").to_numpy().astype("<i8")
            num_documents += lengths.size
            num_tokens += int(lengths.sum())
            largest = max(largest, int(kept.column("max_token_id").to_numpy().max(initial=0)))
            crc32 = zlib.crc32(lengths.tobytes(), crc32)
            if classes:
                labels = pc.index_in(kept.column("label"), value_set=pa.array(classes)).combine_chunks()
                labels_crc32 = zlib.crc32(labels.to_numpy().astype("<i4").tobytes(), labels_crc32)
                kept = kept.set_column(kept.schema.get_field_index("label"), "label", labels)
            writer.add(kept)
            index.add(np.stack([firsts, lengths], axis=1))
        writer.close(crc32)
        written = index.close()
    return {
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "max_token_id": largest,
        "documents_bytes": (out / DOCUMENTS_FILE).stat().st_size,
        "documents_crc32": crc32_of(LocalStore(out), DOCUMENTS_FILE),
        "lengths_crc32": crc32,
        "classes": classes,
        "labels_crc32": labels_crc32,
        "index": written,
    }


def _write_spans(out: Path, units: Sequence[UnitResult], repeats: Sequence[NDArray[np.int64]]) -> SpansInfo:
    """Write the label spans of all documents. A fully supervised document gets one span."""
    num_spans, num_supervised, crc32 = 0, 0, 0
    smallest, largest = math.inf, 0.0
    schema = WEIGHTED_SPANS_SCHEMA if any(unit.has_weights for unit in units) else SPANS_SCHEMA
    columns = ["length", "span_starts", "span_stops", "span_weights"]
    with atomic_file(out / SPANS_FILE) as temporary:
        writer = RowGroupWriter(temporary, schema, checksum=table_crc32, statistics=["document"])
        for first, kept in _kept_notes(out, units, repeats, columns):
            documents, starts, stops, weights = _unit_spans(kept)
            documents += first
            num_spans += starts.size
            num_supervised += int((stops - starts).sum())
            smallest, largest = min(smallest, weights.min(initial=math.inf)), max(largest, weights.max(initial=0.0))
            written = dict(zip(schema.names, (documents, starts, stops, weights), strict=False))
            crc32 = spans_crc32(list(written.values()), crc32)
            writer.add(pa.table(written))
        writer.close(crc32)
    return SpansInfo(
        num_spans=num_spans,
        num_supervised=num_supervised,
        num_bytes=(out / SPANS_FILE).stat().st_size,
        crc32=crc32_of(LocalStore(out), SPANS_FILE),
        content_crc32=crc32,
        weights=(float(smallest), float(largest)) if schema is WEIGHTED_SPANS_SCHEMA else None,
    )


def _unit_spans(
    notes: pa.Table,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return the document number (from 0), start, stop and weight of each label span in a unit."""
    starts_of = notes.column("span_starts").combine_chunks()
    is_whole = starts_of.is_null().to_numpy(zero_copy_only=False)
    counts = np.where(is_whole, 1, starts_of.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    documents = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    starts, stops = np.zeros((2, documents.size), dtype=np.int64)
    of_whole = is_whole[documents]
    stops[of_whole] = notes.column("length").to_numpy()[is_whole]
    starts[~of_whole] = starts_of.flatten().to_numpy()
    stops[~of_whole] = notes.column("span_stops").combine_chunks().flatten().to_numpy()
    weights = np.ones(documents.size, dtype=np.float32)
    weights_of = notes.column("span_weights").combine_chunks()
    weights[weights_of.is_valid().to_numpy(zero_copy_only=False)[documents]] = weights_of.flatten().to_numpy()
    return documents, starts, stops, weights


def _write_quarantine(
    out: Path, results: Sequence[UnitResult], rejected: Sequence[Rejected], repeated: Iterator[Rejected]
) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Write all excluded documents to the quarantine file; return how many there are and the most common reasons."""
    reasons: Counter[str] = Counter()
    with atomic_file(out / QUARANTINE_FILE) as temporary, temporary.open("w", encoding="utf-8") as file:
        for group in (rejected, repeated):
            for one in group:
                reasons[reason_class(one.reason)] += 1
                file.write(json.dumps(asdict(one)) + "\n")
        for result in results:
            num_before = 0 if result.lines is None else result.lines.num_before
            with unit_file(out, result.index, "quarantine.jsonl").open(encoding="utf-8") as lines:
                for line in lines:
                    one = json.loads(line)
                    reasons[reason_class(one["reason"])] += 1
                    file.write(json.dumps({**one, "offset": one["offset"] + num_before}) + "\n")
    return reasons.total(), tuple(reasons.most_common(_MOST_REASONS))


def _entropies(
    out: Path,
    units: Sequence[UnitResult],
    repeats: Sequence[NDArray[np.int64]],
    tokenizer: TokenizerInfo,
    retry: RetryPolicy,
) -> tuple[float | None, float | None]:
    """Return the unigram entropies, in nats, of the raw bytes and of the token ids in the corpus's documents."""
    known = [unit.token_counts for unit in units if unit.token_counts is not None]
    if len(known) < len(units):
        return None, None
    shards = [unit.shard for unit in units if unit.shard is not None]
    reader = read_shards(LocalStore(out), shards, token_dtype(tokenizer.vocab_size), retry)
    counts = np.asarray(known, dtype=np.int64).sum(axis=0)
    first_of_shard = 0
    for unit, repeated in zip(units, repeats, strict=True):
        dropped = repeated >= 0
        if dropped.any():
            for note in _notes(out, unit, ["first_token", "length"]).filter(pa.array(dropped)).to_pylist():
                tokens = reader.read(first_of_shard + note["first_token"], note["length"])
                counts -= np.bincount(tokens, minlength=counts.size)
        first_of_shard += unit.num_tokens
    return entropy_nats(counts[:256]), entropy_nats(counts)
