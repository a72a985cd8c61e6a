"""Corpora for tests: one in memory, and one on disk that is prepared by the package."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import Preparation, PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.spans import LabelSpans, span_mask
from tests.local_preparation import prepare_local, preparing


class MemoryStore:
    """Documents whose tokens encode their document and position, so that misplaced tokens are detected."""

    fingerprint = "memory"

    def __init__(self, lengths: Sequence[int], spans: LabelSpans | None = None, has_weights: bool = False) -> None:
        self.spans, self.has_weights = spans, has_weights
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.num_tokens_read = 0

    def token(self, document: int, at: int) -> int:
        return document * 100_000 + at

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing, since all tokens are in memory."""

    def read(self, document: int, start: int, length: int) -> NDArray[np.int64]:
        assert start >= 0 and start + length <= self.lengths[document], "read past the end of a document"
        self.num_tokens_read += length
        return np.arange(start, start + length, dtype=np.int64) + document * 100_000

    def label_weights(self, document: int, first: int, last: int) -> NDArray[np.float32] | None:
        """Return the weights of the spans, or a different weight for each token of odd documents."""
        if self.spans is not None:
            return mask_of(self.spans, document, first, last).astype(np.float32)
        return np.arange(first, last, dtype=np.float32) + document if self.has_weights and document % 2 else None


def mask_of(spans: LabelSpans, document: int, first: int, last: int) -> NDArray[np.bool_]:
    """Return for each token ``[first, last)`` of a document whether it is in a span."""
    own = slice(int(spans.offsets[document]), int(spans.offsets[document + 1]))
    return span_mask(spans.starts[own], spans.stops[own], first, last)


def check_content(corpus: Corpus) -> None:
    """Compare all files of a corpus with their stored checksums, without using files that are already open."""
    corpus = Corpus(corpus.folder, corpus.info)
    corpus.check_files()
    info = corpus.info
    sums = {"documents.parquet": info.documents_crc32} | ({"spans.parquet": info.spans.crc32} if info.spans else {})
    for key, crc32 in sums.items():
        assert zlib.crc32(corpus.folder.read_whole(key)) == crc32, key
    for files, infos in ((corpus._index, [info.index]), (corpus._shards, [shard.tokens for shard in info.shards])):
        for first, one in zip(accumulate((one.num_items for one in infos), initial=0), infos, strict=False):
            files.read(first, one.num_items)


def begin(request: PrepareRequest) -> Preparation:
    """Return a preparation with its pending units, or raise its error, and unlock the directory."""
    with preparing(request) as preparation:
        return preparation


def write_texts(directory: Path, texts: Sequence[str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (directory / f"text-{number:04d}.txt").write_text(text, encoding="utf-8")
    return directory


def text_corpus(directory: Path, texts: Sequence[str], unit_bytes: int = 1 << 20) -> Corpus:
    """Prepare a byte-level corpus with one document per text."""
    sources = write_texts(directory / "texts", texts)
    return prepare_local(
        PrepareRequest(sources=SourceSpec(paths=(str(sources),)), out=directory / "corpus", unit_bytes=unit_bytes)
    )


def varied_texts(count: int, seed: int = 0, longest: int = 400) -> list[str]:
    """Return different texts of random length."""
    rng = np.random.default_rng(seed)
    return [
        f"{number}:" + "".join(chr(97 + value) for value in rng.integers(0, 26, int(rng.integers(1, longest))))
        for number in range(count)
    ]
