"""A valid corpus of any number of documents, whose shards are links to a few real ones."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.document_lengths import log_normal
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.flat_file import FlatInfo, FlatWriter
from ray_ulysses.data.corpus.format import (
    CORPUS_FILE,
    DOCUMENT_SCHEMA,
    DOCUMENTS_FILE,
    INDEX_DTYPE,
    INDEX_FILE,
    SHARDS_DIRECTORY,
    CorpusInfo,
    ShardInfo,
    token_dtype,
)
from ray_ulysses.data.corpus.row_groups import RowGroupWriter
from ray_ulysses.data.tokenize.encoding import EncodingInfo
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.atomic import atomic_file, write_text
from ray_ulysses.storage.store import crc32_of

NUM_SHARDS = 4
SHARD_DOCUMENTS = 2000
_CHUNK = 1 << 20


def write_corpus(directory: Path, num_documents: int, seed: int = 0) -> Corpus:
    """Write a corpus of log-normal documents of random bytes and open it.

    Four shards hold 8,000 documents, and hard links to them are the further shards, as many as the documents' tokens
    need. The index names each document many times, in no order, in one link after another. Sources, offsets and ids
    stand there as in any corpus.
    """
    loaded = load_tokenizer("bytes")
    tokenizer = loaded.info
    dtype = token_dtype(tokenizer.vocab_size)
    pool = log_normal(NUM_SHARDS * SHARD_DOCUMENTS, seed=seed).astype(np.int64)
    firsts, shards = _write_shards(directory / SHARDS_DIRECTORY, pool, dtype, seed)
    num_tokens, lengths_crc32, index = _write_documents(directory, num_documents, pool, firsts, seed)
    shards = _link_shards(directory / SHARDS_DIRECTORY, shards, num_documents, num_tokens)
    info = CorpusInfo(
        tokenizer=tokenizer,
        vocabulary=loaded.tokens.vocabulary(),
        encoding=EncodingInfo(bos_token_id=None, eos_token_id=tokenizer.eos_token_id),
        dtype=dtype.name,
        num_documents=num_documents,
        num_tokens=num_tokens,
        max_token_id=255,
        num_quarantined=0,
        shards=shards,
        documents_bytes=(directory / DOCUMENTS_FILE).stat().st_size,
        documents_crc32=crc32_of(LocalStore(directory), DOCUMENTS_FILE),
        lengths_crc32=lengths_crc32,
        index=index,
        byte_unigram_nats=None,
        token_unigram_nats=None,
        signature="synthetic",
    )
    write_text(directory / CORPUS_FILE, json.dumps(info.to_json(), indent=2) + "\n")
    return Corpus.open(directory)


def _write_shards(
    directory: Path, lengths: NDArray[np.int64], dtype: np.dtype, seed: int
) -> tuple[NDArray[np.int64], tuple[ShardInfo, ...]]:
    """Write the shards; return the place of the first token of each document, and what the shards are."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    firsts: list[int] = []
    shards: list[ShardInfo] = []
    for number in range(NUM_SHARDS):
        path = directory / f"shard-{number:05d}.tokens"
        writer = FlatWriter(path, dtype)
        own = lengths[number * SHARD_DOCUMENTS : (number + 1) * SHARD_DOCUMENTS]
        for length in own:
            before = sum(shard.num_tokens for shard in shards)
            firsts.append(before + writer.add(rng.integers(0, 256, int(length))))
        shards.append(ShardInfo(name=path.name, num_documents=len(own), tokens=writer.close()))
    return np.asarray(firsts, dtype=np.int64), tuple(shards)


def _link_shards(
    directory: Path, shards: tuple[ShardInfo, ...], num_documents: int, num_tokens: int
) -> tuple[ShardInfo, ...]:
    """Link the shards until they hold so many documents and tokens; return all of them."""
    held = sum(shard.num_tokens for shard in shards)
    num_copies = max(-(-num_documents // (NUM_SHARDS * SHARD_DOCUMENTS)), -(-num_tokens // held))
    linked = list(shards)
    for number in range(NUM_SHARDS, num_copies * NUM_SHARDS):
        shard = shards[number % NUM_SHARDS]
        linked.append(replace(shard, name=f"shard-{number:05d}.tokens"))
        os.link(directory / shard.name, directory / linked[-1].name)
    return tuple(linked)


def _write_documents(
    directory: Path, num_documents: int, lengths: NDArray[np.int64], firsts: NDArray[np.int64], seed: int
) -> tuple[int, int, FlatInfo]:
    """Write the table of documents and the index; return the tokens of all, the checksum of the lengths, the index."""
    rng = np.random.default_rng(seed + 1)
    num_tokens = crc32 = 0
    held = int(lengths.sum())
    with atomic_file(directory / DOCUMENTS_FILE) as temporary, atomic_file(directory / INDEX_FILE) as index_temporary:
        writer, index = RowGroupWriter(temporary, DOCUMENT_SCHEMA), FlatWriter(index_temporary, INDEX_DTYPE)
        for first in range(0, num_documents, _CHUNK):
            count = min(_CHUNK, num_documents - first)
            chosen = rng.integers(0, lengths.size, count)
            part = lengths[chosen]
            num_tokens += int(part.sum())
            crc32 = zlib.crc32(part.astype("<i8").tobytes(), crc32)
            writer.add(_document_rows(first, chosen, part))
            copies = np.arange(first, first + count) // lengths.size
            index.add(np.stack([firsts[chosen] + copies * held, part], axis=1))
        writer.close(crc32)
        return num_tokens, crc32, index.close()


def _document_rows(first: int, chosen: NDArray[np.int64], lengths: NDArray[np.int64]) -> pa.Table:
    shard = (chosen // SHARD_DOCUMENTS).astype(np.int32)
    sources = pa.DictionaryArray.from_arrays(
        pa.array(shard), pa.array([f"/data/part-{number:05d}.jsonl.zst" for number in range(NUM_SHARDS)])
    )
    return pa.table(
        {
            "length": lengths,
            "max_token_id": np.full(lengths.size, 255, dtype=np.int64),
            "source": sources.cast(pa.string()),
            "offset": np.arange(first, first + lengths.size, dtype=np.int64),
            "id": pa.array([""], pa.string()).take(pa.array(np.zeros(lengths.size, dtype=np.int64))),
            "content": _digests(first, lengths.size),
        }
    )


def _digests(first: int, count: int) -> pa.Array:
    """Return a digest for each document that no other has: its number, scattered."""
    halves = np.arange(first, first + count, dtype=np.uint64)[:, None] * np.array([0x9E3779B97F4A7C15, 1], np.uint64)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(halves)])
