"""CPU time of the direct reader per row by mean document length, beside a flat file of the same tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.stored_result import NOT_MEASURED, met, origin, spread, table
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.sources.units import SourceSpec
from tests.local_preparation import prepare_local

MEAN_LENGTHS = (100, 300, 1_000, 20_000)
MOST_RATIO = 2.0
_STORES = ("first", "direct", "flat")
_PEERS = ("datasets", "Mosaic", "Megatron")
_ARRAYS = ("input_ids", "labels", "position_ids")


class FlatStore:
    """The tokens of a corpus in one memory-mapped file, without checksums: the least that reading can take."""

    def __init__(self, corpus: Corpus, path: Path) -> None:
        self._starts = np.concatenate([[0], np.cumsum(corpus.lengths, dtype=np.int64)]).tolist()
        with path.open("wb") as file:
            for document, length in enumerate(corpus.lengths.tolist()):
                corpus.read(document, 0, length).astype(corpus.info.dtype).tofile(file)
        self._tokens = np.memmap(path, dtype=corpus.info.dtype, mode="r")

    def read(self, document: int, start: int, length: int) -> NDArray[np.int64]:
        """Return ``length`` tokens of a document from ``start`` on."""
        first = self._starts[document] + start
        return self._tokens[first : first + length].astype(np.int64)

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing."""

    has_weights = False

    def label_weights(self, document: int, first: int, last: int) -> None:
        """Return None: every token may be a label, of weight 1."""


def random_documents(folder: Path, mean_length: int, num_tokens: int) -> Path:
    """Write documents of random letters whose lengths lie evenly between half and one and a half of the mean."""
    rng = np.random.default_rng(mean_length)
    folder.mkdir(parents=True)
    path = folder / "documents.jsonl"
    with path.open("w") as file:
        for length in rng.integers(mean_length // 2, mean_length * 3 // 2, num_tokens // mean_length).tolist():
            text = rng.integers(ord("a"), ord("z") + 1, length, dtype=np.uint8).tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")
    return path


def random_corpus(folder: Path, mean_length: int, num_tokens: int) -> Corpus:
    """Prepare such documents, a token a letter."""
    path = random_documents(folder, mean_length, num_tokens)
    return prepare_local(
        PrepareRequest(sources=SourceSpec(paths=(str(path),)), out=folder / "corpus", duplicates="keep")
    )


def row_cost(corpus: Corpus, plan: Plan, flat_file: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    """Return the CPU seconds per row of each round, by both stores in turn, after comparing their rows."""
    sources = plan.newest.sources
    flat = RowReader(FlatStore(corpus, flat_file), plan)
    rows = range(min(num_rows, plan.num_rows))
    found: dict[str, Any] = {name: [] for name in ("first", "direct", "flat")}
    for _ in range(rounds):
        # A reader that has read nothing yet compares every block with its checksum.
        direct = RowReader(CorpusSet(sources, [Corpus.open(corpus.path)]), plan)
        for name, reader in (("first", direct), ("direct", direct), ("flat", flat)):
            begin = time.process_time()
            for row in rows:
                reader.read("train", row, 0, 1)
            found[name].append((time.process_time() - begin) / len(rows))
        one, other = (reader.read("train", 0, 0, 1) for reader in (direct, flat))
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in _ARRAYS)
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    rows, others = [], []
    for length, cost in record["lengths"].items():
        times = [_milliseconds(cost[name]) for name in _STORES]
        ratios = [
            [ours / flat for ours, flat in zip(cost[name], cost["flat"], strict=True)] for name in ("first", "direct")
        ]
        said = [spread(one, "{:.1f}") for one in ratios]
        rows.append([f"{int(length):,}", *times, *said, met(max(map(median, ratios)) <= MOST_RATIO)])
        others.append([f"{int(length):,}", times[1], *(_milliseconds(cost["peers"].get(name)) for name in _PEERS)])
    head = [
        "mean document", "read first", "read again", "flat file", "ratio, first", "again", f"at most {MOST_RATIO:.0f}",
    ]  # fmt: skip
    about = (
        "CPU time of one process per row of 131,072 tokens, by mean document length in tokens; documents are shuffled "
        "and packed as in training. **Read first** are rows by a reader that has read nothing yet, which compares each "
        "block of 4 KiB with its checksum; **read again** are the same rows once more. The peer is the same reader on "
        "a flat memory-mapped file of the same tokens, without checksums; both give the same rows, in turn."
    )
    of_others = (
        "The same documents through other projects' files, read by number in a random order and joined to as many "
        "token ids: a `datasets` table as NumPy arrays, Mosaic's shards (`StreamingDataset`, in an environment of its "
        "own), and Megatron's indexed files by a reader of their documented format. They give ids alone; ours gives "
        "labels and positions as well, and packs documents."
    )
    return "\n\n".join(
        [
            "# Rows by document length", origin(record), about, table(head, rows), "## Other readers", of_others,
            table(["mean document", "ours, read again", *_PEERS], others),
        ]
    )  # fmt: skip


def _milliseconds(seconds: Sequence[float] | None) -> str:
    return NOT_MEASURED if seconds is None else spread([1e3 * one for one in seconds], "{:.1f}") + " ms"
