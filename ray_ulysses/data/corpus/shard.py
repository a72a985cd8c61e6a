"""Writes shards: the tokens of documents, one after another, in flat files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.flat_file import FlatWriter
from ray_ulysses.data.corpus.format import ShardInfo


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
