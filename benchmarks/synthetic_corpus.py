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
    dtype, folder = token_dtype(loaded.info.vocab_size), directory / SHARDS_DIRECTORY
    lengths = log_normal(NUM_SHARDS * SHARD_DOCUMENTS, seed=seed).astype(np.int64)
    folder.mkdir(parents=True)
    rng, shards, held = np.random.default_rng(seed), [], 0
    for number in range(NUM_SHARDS):
        writer = FlatWriter(folder / f"shard-{number:05d}.tokens", dtype)
        for length in lengths[number * SHARD_DOCUMENTS : (number + 1) * SHARD_DOCUMENTS]:
            writer.add(rng.integers(0, 256, int(length)))
        tokens = writer.close()
        shards.append(ShardInfo(name=f"shard-{number:05d}.tokens", num_documents=SHARD_DOCUMENTS, tokens=tokens))
        held += tokens.num_items
    num_tokens, lengths_crc32, index = _write_documents(directory, num_documents, lengths, seed)
    num_copies = max(-(-num_documents // lengths.size), -(-num_tokens // held))
    for number in range(NUM_SHARDS, num_copies * NUM_SHARDS):
        shard = shards[number % NUM_SHARDS]
        shards.append(replace(shard, name=f"shard-{number:05d}.tokens"))
        os.link(folder / shard.name, folder / shards[-1].name)
    info = CorpusInfo(
        tokenizer=loaded.info, vocabulary=loaded.tokens.vocabulary(),
        encoding=EncodingInfo(bos_token_id=None, eos_token_id=loaded.info.eos_token_id), dtype=dtype.name,
        num_documents=num_documents, num_tokens=num_tokens, max_token_id=255, num_quarantined=0, shards=tuple(shards),
        documents_bytes=(directory / DOCUMENTS_FILE).stat().st_size,
        documents_crc32=crc32_of(LocalStore(directory), DOCUMENTS_FILE), lengths_crc32=lengths_crc32, index=index,
        byte_unigram_nats=None, token_unigram_nats=None, signature="synthetic",
    )  # fmt: skip
    write_text(directory / CORPUS_FILE, json.dumps(info.to_json(), indent=2) + "\n")
    return Corpus.open(directory)


def _write_documents(
    directory: Path, num_documents: int, lengths: NDArray[np.int64], seed: int
) -> tuple[int, int, FlatInfo]:
    """Write the table of documents and the index; return the tokens of all, the checksum of the lengths, the index."""
    rng = np.random.default_rng(seed + 1)
    num_tokens = crc32 = 0
    firsts, held = np.cumsum(lengths) - lengths, int(lengths.sum())
    parts = pa.array([f"/data/part-{number:05d}.jsonl.zst" for number in range(NUM_SHARDS)])
    with atomic_file(directory / DOCUMENTS_FILE) as temporary, atomic_file(directory / INDEX_FILE) as index_temporary:
        writer, index = RowGroupWriter(temporary, DOCUMENT_SCHEMA), FlatWriter(index_temporary, INDEX_DTYPE)
        for first in range(0, num_documents, _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, num_documents))
            chosen = rng.integers(0, lengths.size, numbers.size)
            part = lengths[chosen]
            num_tokens += int(part.sum())
            crc32 = zlib.crc32(part.astype("<i8").tobytes(), crc32)
            # No two documents have the same digest, in corpora of different seeds either: a number, scattered.
            unique = numbers.astype(np.uint64) + np.uint64(seed << 40)
            digests = pa.py_buffer(unique[:, None] * np.array([0x9E3779B97F4A7C15, 1], np.uint64))
            rows = {
                "length": part,
                "max_token_id": np.full(part.size, 255, dtype=np.int64),
                "source": parts.take(pa.array(chosen // SHARD_DOCUMENTS)),
                "offset": numbers,
                "id": pa.repeat("", part.size),
                "content": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), part.size, [None, digests]),
            }
            writer.add(pa.table(rows))
            index.add(np.stack([firsts[chosen] + numbers // lengths.size * held, part], axis=1))
        writer.close(crc32)
        return num_tokens, crc32, index.close()
