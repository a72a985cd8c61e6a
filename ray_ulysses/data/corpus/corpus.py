"""Opens and reads a prepared corpus; nothing that grows with its documents is read before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.document_table import DocumentSource, DocumentTable, SpanTable
from ray_ulysses.data.corpus.flat_file import FlatFiles
from ray_ulysses.data.corpus.format import (
    CORPUS_FILE,
    DOCUMENTS_FILE,
    FORMAT_VERSION,
    INDEX_DTYPE,
    INDEX_FILE,
    PREPARATION_FILE,
    SPANS_FILE,
    CorpusInfo,
)
from ray_ulysses.data.corpus.shard import read_shards
from ray_ulysses.data.tokenize.spans import LabelSpans
from ray_ulysses.errors import UserError, shown
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.patience import PATIENCE, READ_ERRORS, Patience, is_transient
from ray_ulysses.storage.place import FileStore, open_folder
from ray_ulysses.storage.store import crc32_of
from ray_ulysses.validation import ContentError, adapter, read_json


class Corpus:
    """Documents by number, from 0 on.

    Reads from storage that does not answer are retried for a while (``Patience``); then they raise
    ``StorageAwayError``.

    Attributes:
        folder: The corpus' files.
        info: The content of ``corpus.json``.
    """

    def __init__(
        self,
        folder: FileStore,
        info: CorpusInfo,
        *,
        patience: Patience = PATIENCE,
    ) -> None:
        self.folder = folder
        self.info = info
        self._patience = patience
        self._shards = read_shards(folder, info.shards, np.dtype(info.dtype), patience)
        self._index = FlatFiles(
            folder, [INDEX_FILE], [info.index], INDEX_DTYPE, unreadable=unreadable, patience=patience
        )

    @classmethod
    def open(cls, location: Path | str, *, patience: Patience = PATIENCE) -> Corpus:
        """Open what ``prepare`` has written; reads no document, regardless of their number.

        Args:
            location: A directory, or the URI of a folder of an object store.
            patience: How long to wait for its storage.

        Raises:
            UserError: It is missing, is no prepared corpus, is empty, or what describes its documents can't be read.
        """
        folder = open_folder(location)
        try:
            info = patience.call(folder, lambda: _read_info(folder))
        except OSError as error:
            raise unreadable(folder, error.strerror) from error
        if info.num_documents == 0:
            raise UserError(f"data.path={folder}: the corpus is empty; prepare sources that hold documents")
        corpus = cls(folder, info, patience=patience)
        corpus._check_sidecars()
        _ = corpus._documents
        corpus._index.check()
        _ = corpus._span_table
        return corpus

    @property
    def path(self) -> Path:
        """Return the directory of a corpus that lies in one."""
        assert isinstance(self.folder, LocalStore), f"{self.folder} is no directory"
        return Path(self.folder.name)

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return self.info.num_documents

    @property
    def fingerprint(self) -> str:
        """Return the identity of the content."""
        return self.info.fingerprint

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        """Return the tokens of each document, including end tokens; uint32, read-only, read on first use.

        Raises:
            UserError: The sidecar can't be read, or is not the one that ``corpus.json`` describes.
        """
        with _reading(self.folder.named(DOCUMENTS_FILE)):
            return self._documents.lengths()

    @cached_property
    def spans(self) -> LabelSpans | None:
        """Return the tokens that may be labels, read on first use; None if all may.

        Raises:
            UserError: The spans can't be read, or are not those that ``corpus.json`` describes.
        """
        if self._span_table is None:
            return None
        with _reading(self.folder.named(SPANS_FILE)):
            return self._span_table.all()

    def label_mask(self, document: int, first: int, last: int) -> NDArray[np.bool_] | None:
        """Return for each token ``[first, last)`` of a document whether it may be a label; None if all may.

        The label at input position ``j`` is token ``j + 1``. Reads the spans of the document's row group only.

        Raises:
            UserError: The spans can't be read.
        """
        if self._span_table is None:
            return None
        with _reading(self.folder.named(SPANS_FILE)):
            return self._span_table.mask(document, first, last)

    @property
    def has_weights(self) -> bool:
        """Return whether a token has a loss weight other than 1."""
        return self.info.spans is not None and self.info.spans.weights is not None

    def label_weights(self, document: int, first: int, last: int) -> NDArray[np.float32] | None:
        """Return the loss weight of each token ``[first, last)`` of a document, as a label; None if all are 1.

        Raises:
            UserError: The spans can't be read.
        """
        if self._span_table is None or not self.has_weights:
            return None
        with _reading(self.folder.named(SPANS_FILE)):
            return self._span_table.weights(document, first, last)

    def read(self, document: int, start: int, length: int) -> NDArray[np.integer]:
        """Return ``length`` tokens of a document from ``start`` on, in the type in which they are stored.

        Raises:
            UserError: The shard or the index can't be read.
        """
        return self._shards.read(self._first(document, start + length) + start, length)

    def _first(self, document: int, length: int) -> int:
        """Return the place of a document's first token; UserError if the index gives it less than ``length`` tokens."""
        first, size = self._index.read(2 * document, 2).tolist()
        if length > size or not self._shards.holds(first, size):
            name = self.folder.named(INDEX_FILE)
            raise unreadable(name, f"document {document} has {size} tokens from {first} on there, which can't be")
        return int(first)

    def fetch(self, stretches: Sequence[tuple[int, int, int]]) -> None:
        """Bring stretches ``(document, start, length)`` near by requests at the same time; nothing for a directory.

        Raises:
            UserError: A shard or the index can't be read.
        """
        if isinstance(self.folder, LocalStore):
            return
        self._index.fetch((2 * document, 2) for document, _, _ in stretches)
        self._shards.fetch(
            (self._first(document, start + length) + start, length) for document, start, length in stretches
        )

    def source(self, document: int) -> DocumentSource:
        """Return the file a document came from, its line or row there (0 for a whole file), and its own id.

        Raises:
            UserError: The sidecar can't be read.
        """
        with _reading(self.folder.named(DOCUMENTS_FILE)):
            return self._documents.source(document)

    def digests(self) -> NDArray[np.uint64]:
        """Return digests that are equal for equal content, in any corpus; uint64 [documents, 2].

        Raises:
            UserError: The sidecar can't be read.
        """
        name = self.folder.named(DOCUMENTS_FILE)
        with _reading(name):
            return self._patience.call(name, self._documents.digests)

    def check_files(self, *, checksums: bool = False) -> None:
        """Check the size of every file and what it says of itself; with ``checksums`` (slow), its whole content.

        Raises:
            UserError: Names the first file that is missing, truncated, or not what ``prepare`` wrote.
        """
        self._check_sidecars(checksums=checksums)
        self._index.check()
        self._shards.check()
        if checksums:
            self._index.check_blocks()
            self._shards.check_blocks()

    def _check_sidecars(self, *, checksums: bool = False) -> None:
        info = self.info
        self._check_file(DOCUMENTS_FILE, info.documents_bytes, info.documents_crc32 if checksums else None)
        if info.spans is not None:
            self._check_file(SPANS_FILE, info.spans.num_bytes, info.spans.crc32 if checksums else None)

    def _check_file(self, key: str, num_bytes: int, crc32: int | None) -> None:
        """Compare a file's size, and its checksum where one is given, with what ``prepare`` wrote."""
        name = self.folder.named(key)
        try:
            found = self._patience.call(name, lambda: self.folder.size(key))
            if found != num_bytes:
                raise unreadable(name, f"{found} bytes where prepare wrote {num_bytes}")
            if crc32 is not None and self._patience.call(name, lambda: crc32_of(self.folder, key)) != crc32:
                raise unreadable(name, "its checksum differs from the one prepare wrote")
        except OSError as error:
            raise unreadable(name, error.strerror) from error

    @cached_property
    def _documents(self) -> DocumentTable:
        with _reading(self.folder.named(DOCUMENTS_FILE)):
            return DocumentTable(self.folder, self.info, self._patience)

    @cached_property
    def _span_table(self) -> SpanTable | None:
        if self.info.spans is None:
            return None
        with _reading(self.folder.named(SPANS_FILE)):
            return SpanTable(self.folder, self.info.spans, self.num_documents, self._patience)


def corpus_exists(location: Path | str, patience: Patience = PATIENCE) -> bool:
    """Return whether there is something at the location of a corpus.

    Raises:
        UserError: The location can't be used.
        StorageAwayError: Its storage did not answer in time.
    """
    folder = open_folder(location)
    try:
        return patience.call(folder, folder.exists)
    except OSError as error:
        raise unreadable(folder, error.strerror) from error


def _no_corpus(folder: FileStore) -> UserError:
    """Return the error for a folder without ``corpus.json``."""
    try:
        folder.size(PREPARATION_FILE)
    except FileNotFoundError:
        return UserError(
            f"data.path={folder}: is not a prepared corpus (no {CORPUS_FILE}); create one with `ray-ulysses prepare`"
        )
    return UserError(
        f"data.path={folder}: its preparation is not finished; run the same `ray-ulysses prepare` again to continue it"
    )


def _read_info(folder: FileStore) -> CorpusInfo:
    if not folder.exists():
        raise UserError(f"data.path={folder}: does not exist; create it with `ray-ulysses prepare`")
    name = folder.named(CORPUS_FILE)
    try:
        fields = read_json(adapter(dict[str, Any]), folder.read_whole(CORPUS_FILE))
    except FileNotFoundError:
        raise _no_corpus(folder) from None
    except (OSError, ContentError) as error:
        if is_transient(error):
            raise
        raise unreadable(name, error) from error
    if "format_version" not in fields:
        raise unreadable(name, "format_version is missing")
    version = fields["format_version"]
    if version != FORMAT_VERSION:
        raise UserError(
            f"data.path={folder}: the corpus has format {shown(version)}, this version reads {FORMAT_VERSION}; "
            "prepare it again into another directory"
        )
    try:
        return CorpusInfo.from_json(fields)
    except ContentError as error:
        raise unreadable(name, error) from error


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn an error of reading a file into one that names it; ValueError where spans are inconsistent."""
    try:
        yield
    except UserError:
        raise
    except (*READ_ERRORS, ValueError) as error:
        raise unreadable(name, error) from error


def unreadable(name: object, reason: object) -> UserError:
    """Return the error for a file of a corpus that can't be read."""
    return UserError(
        f"data.path: {name} can't be used ({reason}); restore the file, "
        "or prepare the corpus again into another directory"
    )
