"""Converts a corpus of format 3, whose shards are Parquet files, in its directory; plans and rows stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus, read_corpus_json, unreadable
from ray_ulysses.data.corpus.flat_file import FlatInfo, FlatWriter
from ray_ulysses.data.corpus.format import (
    CORPUS_FILE,
    DOCUMENTS_FILE,
    INDEX_DTYPE,
    INDEX_FILE,
    OLD_FORMAT,
    SHARDS_DIRECTORY,
    CorpusInfo,
    ShardInfo,
)
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.prepare.directory_lock import directory_lock
from ray_ulysses.data.prepare.merge import remove_working_files
from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import atomic_file, file_crc32, sync, write_text
from ray_ulysses.storage.folder import LocalFolder, open_folder
from ray_ulysses.storage.patience import PATIENCE, READ_ERRORS, Patience, is_transient
from ray_ulysses.validation import ContentError

_BATCH_ROWS = 1 << 16


def convert_corpus(path: Path | str, say: Callable[[str], None], patience: Patience = PATIENCE) -> Corpus:
    """Write the shards and the index of the present format, then ``corpus.json``, and remove the old shards.

    The corpus is of one format or of the other at every moment; a conversion that was interrupted is repeated.

    Args:
        path: The corpus directory.
        say: Called with one line per shard.
        patience: How long to wait for the storage.

    Raises:
        UserError: It is no corpus of that format, it is damaged, or another process writes to it.
        RunError: The directory can't be written; a ``StorageAwayError`` if its storage did not answer in time.
    """
    folder = open_folder(path)
    if not isinstance(folder, LocalFolder):
        raise UserError(
            f"corpus {folder}: can't be converted on an object store; convert a copy of it in a directory, and upload "
            "that under another name"
        )
    directory = folder.path
    patience.call_or_fail(directory, lambda: read_corpus_json(folder))
    with directory_lock(directory, patience):
        fields = patience.call_or_fail(directory, lambda: read_corpus_json(folder))
        if fields["format_version"] == OLD_FORMAT:
            patience.call_or_fail(directory, lambda: _convert(directory, fields, say))
        corpus = Corpus.open(directory, patience=patience)
        # Of the old format, or of a conversion that was killed.
        remove_working_files(directory, corpus.info)
    return corpus


def _convert(directory: Path, fields: dict[str, Any], say: Callable[[str], None]) -> None:
    known = dict(fields)
    if known.pop("checksum", None) != stable_hash(known):
        raise unreadable(directory / CORPUS_FILE, "its fields were changed: they do not give its checksum")
    fingerprint = known.pop("fingerprint")
    dtype = np.dtype(fields["dtype"])
    shards, starts, first_of_shard = [], [], 0
    for number, old in enumerate(fields["shards"]):
        shard, first_tokens = _convert_shard(directory / SHARDS_DIRECTORY, old, dtype)
        shards.append(shard)
        starts.append(first_tokens + first_of_shard)
        first_of_shard += shard.num_tokens
        say(f"shard {number + 1} of {len(fields['shards'])}: {shard.num_tokens:,} tokens")
    index = _write_index(directory, fields["documents_crc32"], starts)
    del known["format_version"], known["shards"]
    try:
        info = CorpusInfo.from_fields({**known, "shards": shards, "index": index})
    except ContentError as error:
        raise unreadable(directory / CORPUS_FILE, error) from error
    if info.fingerprint != fingerprint:
        raise unreadable(directory / CORPUS_FILE, "its files do not give its fingerprint")
    for folder in (directory / SHARDS_DIRECTORY, directory):
        sync(folder)
    write_text(directory / CORPUS_FILE, json.dumps(info.to_json(), indent=2) + "\n")


def _convert_shard(folder: Path, old: dict[str, Any], dtype: np.dtype[Any]) -> tuple[ShardInfo, NDArray[np.int64]]:
    """Write one shard; return it, and the place of the first token of each row of the old one."""
    path = folder / old["name"]
    name = f"{path.stem}.tokens"
    lengths: list[NDArray[np.int64]] = []
    with atomic_file(folder / name) as temporary:
        writer = FlatWriter(temporary, dtype)
        for tokens, row_lengths in _old_rows(path):
            writer.add(tokens)
            lengths.append(row_lengths)
        info = writer.close()
    sizes = np.concatenate([np.zeros(1, dtype=np.int64), *lengths])
    if (sizes.size - 1, info.num_items, info.crc32) != (old["num_rows"], old["num_tokens"], old["tokens_crc32"]):
        raise unreadable(path, "its tokens are not those that prepare wrote")
    shard = ShardInfo(name=name, num_chunks=old["num_rows"], num_documents=old["num_documents"], tokens=info)
    return shard, np.cumsum(sizes)


def _old_rows(path: Path) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Yield the tokens of some rows at a time, and the rows' lengths."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=["tokens"], use_threads=False).column(0).combine_chunks()
                yield rows.flatten().to_numpy(), rows.value_lengths().to_numpy().astype(np.int64)
    except READ_ERRORS as error:
        if is_transient(error):
            raise
        raise unreadable(path, error) from error


def _write_index(directory: Path, documents_crc32: int, starts: list[NDArray[np.int64]]) -> FlatInfo:
    """Write the index from the table of documents, which names the shard and the first row of each."""
    path = directory / DOCUMENTS_FILE
    if file_crc32(path) != documents_crc32:
        raise unreadable(path, "its checksum differs from the one prepare wrote")
    first_shards = np.cumsum([0, *(part.size for part in starts)])
    places = np.concatenate(starts)
    columns = ["shard", "first_row", "length"]
    with (
        atomic_file(directory / INDEX_FILE) as temporary,
        pq.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        writer = FlatWriter(temporary, INDEX_DTYPE)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
            shard, first_row, length = (batch.column(name).to_numpy() for name in columns)
            writer.add(np.stack([places[first_shards[shard] + first_row], length], axis=1))
        return writer.close()
