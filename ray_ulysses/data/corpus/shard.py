"""Shards: the tokens of documents, one after another, in flat files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.flat_file import MAX_OPEN_FILES, MAX_OPEN_OBJECTS, FlatFiles, FlatWriter
from ray_ulysses.data.corpus.format import SHARDS_DIRECTORY, ShardInfo
from ray_ulysses.errors import UserError
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.patience import Patience
from ray_ulysses.storage.place import FileStore


class ShardWriter:
    """Appends documents to one file."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._writer = FlatWriter(path, dtype)
        self.num_documents = 0

    @property
    def num_tokens(self) -> int:
        """Return the tokens so far."""
        return self._writer.num_items

    def add(self, ids: NDArray[np.integer[Any]]) -> int:
        """Append one document and return the place of its first token."""
        first = self._writer.num_items
        self._writer.add(ids)
        self.num_documents += 1
        return first

    def add_all(self, ids: NDArray[np.integer[Any]], lengths: NDArray[np.int64]) -> int:
        """Append documents of these lengths and return the place of the first one's first token."""
        first = self._writer.num_items
        self._writer.add(ids)
        self.num_documents += lengths.size
        return first

    def add_parts(self, parts: Iterable[NDArray[np.integer[Any]]]) -> tuple[int, int]:
        """Append one document that comes in parts, and return the place of its first token and its tokens."""
        first = self._writer.num_items
        for ids in parts:
            self._writer.add(ids)
        length = self._writer.num_items - first
        self.num_documents += length > 0
        return first, length

    def close(self, name: str) -> ShardInfo:
        """Write what is pending, and describe the file, which is going to have the name."""
        return ShardInfo(
            name=name,
            num_documents=self.num_documents,
            tokens=self._writer.close(),
        )

    def abandon(self) -> None:
        """Close the file without writing what is pending; errors are ignored, since the file is discarded."""
        self._writer.abandon()


def read_shards(folder: FileStore, shards: Sequence[ShardInfo], dtype: np.dtype[Any], patience: Patience) -> FlatFiles:
    """Return the tokens of all shards of a corpus, in the order of the shards."""
    keys = [f"{SHARDS_DIRECTORY}/{shard.name}" for shard in shards]
    infos = [shard.tokens for shard in shards]
    # A row of short documents takes a document from each of thousands; opening one of a store waits for two requests.
    max_open = MAX_OPEN_FILES if isinstance(folder, LocalStore) else MAX_OPEN_OBJECTS
    return FlatFiles(folder, keys, infos, dtype, unreadable=unreadable_shard, patience=patience, max_open=max_open)


def unreadable_shard(name: str, reason: object) -> UserError:
    """Return the error for a shard that can't be read."""
    return UserError(
        f"data.path: the shard {name} can't be read ({reason}); restore the file, "
        "or prepare the corpus again into another directory"
    )
