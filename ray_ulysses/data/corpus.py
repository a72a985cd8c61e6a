"""A prepared corpus, opened: document lengths in memory, tokens read on demand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ray_ulysses.data.atomic import file_crc32
from ray_ulysses.data.format import (
    CORPUS_FILE,
    DOCUMENTS_FILE,
    FORMAT_VERSION,
    PREPARATION_FILE,
    SHARDS_DIRECTORY,
    CorpusInfo,
)
from ray_ulysses.data.shard import READ_ERRORS, ShardReader, unreadable_shard
from ray_ulysses.data.tokenizers import TokenizerInfo
from ray_ulysses.errors import UserError


class Corpus:
    """Documents by number, from 0 on.

    Attributes:
        path: The corpus directory.
        info: What ``corpus.json`` says.
        lengths: int64, the tokens of each document, its end token included.
    """

    def __init__(self, path: Path, info: CorpusInfo, lengths: NDArray[np.int64]) -> None:
        self.path = path
        self.info = info
        self.lengths = lengths
        self._places: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None
        self._shards = ShardReader(path / SHARDS_DIRECTORY)

    @classmethod
    def open(cls, path: Path | str) -> Corpus:
        """Open a directory that ``prepare`` has written; reads the lengths, no token.

        Raises:
            UserError: It is missing, is no prepared corpus, is empty, or its sidecar can't be read.
        """
        directory = Path(path).expanduser()
        info = _read_info(directory)
        sidecar = directory / DOCUMENTS_FILE
        _check_size(sidecar, info.documents_bytes)
        try:
            lengths = pq.read_table(sidecar, columns=["length"]).column(0).to_numpy().astype(np.int64)
        except READ_ERRORS as error:
            raise _unreadable(sidecar, error) from error
        if lengths.size == 0:
            raise UserError(f"data.path={directory}: the corpus is empty; prepare sources that hold documents")
        if (lengths.size, int(lengths.sum())) != (info.num_documents, info.num_tokens):
            raise _unreadable(sidecar, f"its lengths do not add up to {CORPUS_FILE}")
        lengths.setflags(write=False)
        return cls(directory, info, lengths)

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return self.info.num_documents

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, end tokens included."""
        return self.info.num_tokens

    @property
    def max_token_id(self) -> int:
        """Return the largest token id, which must be below the model's vocabulary."""
        return self.info.max_token_id

    @property
    def fingerprint(self) -> str:
        """Return the identity of the content."""
        return self.info.fingerprint

    @property
    def tokenizer(self) -> TokenizerInfo:
        """Return what is known of the tokenizer."""
        return self.info.tokenizer

    def read(self, document: int, start: int, length: int) -> NDArray[np.int64]:
        """Return ``length`` tokens of a document from ``start`` on, as int64.

        Raises:
            UserError: The shard can't be read.
        """
        assert start >= 0 and start + length <= self.lengths[document], (document, start, length)
        shards, first_rows = self._document_places()
        shard = self.info.shards[int(shards[document])]
        return self._shards.read(shard.name, int(first_rows[document]), start, length)

    def source(self, document: int) -> tuple[str, int]:
        """Return the file a document came from and its line or row there (0 for a whole file)."""
        table = pq.read_table(
            self.path / DOCUMENTS_FILE, columns=["source", "offset"], filters=[("document", "==", document)]
        )
        row = table.to_pylist()[0]
        return str(row["source"]), int(row["offset"])

    def check_files(self, *, checksums: bool = False) -> None:
        """Look at every shard before a worker is taken: its size and footer, or (slow) its checksum.

        Raises:
            UserError: Names the first file that is missing, cut short, or not what ``prepare`` wrote.
        """
        for shard in self.info.shards:
            path = self.path / SHARDS_DIRECTORY / shard.name
            _check_size(path, shard.num_bytes)
            try:
                num_rows = pq.read_metadata(path).num_rows
            except READ_ERRORS as error:
                raise unreadable_shard(path, error) from error
            if num_rows != shard.num_rows:
                raise unreadable_shard(path, f"{num_rows} rows where {CORPUS_FILE} says {shard.num_rows}")
            if checksums and file_crc32(path) != shard.crc32:
                raise unreadable_shard(path, "its checksum differs from the one prepare wrote")
        if checksums and file_crc32(self.path / DOCUMENTS_FILE) != self.info.documents_crc32:
            raise _unreadable(self.path / DOCUMENTS_FILE, "its checksum differs from the one prepare wrote")

    def _document_places(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        if self._places is None:
            try:
                table = pq.read_table(self.path / DOCUMENTS_FILE, columns=["shard", "first_row"])
            except READ_ERRORS as error:
                raise _unreadable(self.path / DOCUMENTS_FILE, error) from error
            self._places = (table.column("shard").to_numpy(), table.column("first_row").to_numpy())
        return self._places


def _read_info(directory: Path) -> CorpusInfo:
    if not directory.exists():
        raise UserError(f"data.path={directory}: does not exist; make it with `ray-ulysses prepare`")
    path = directory / CORPUS_FILE
    if not path.is_file():
        if (directory / PREPARATION_FILE).is_file():
            raise UserError(
                f"data.path={directory}: its preparation is not finished; run the same `ray-ulysses prepare` "
                "again, "
                "which goes on where it stopped"
            )
        raise UserError(
            f"data.path={directory}: is not a prepared corpus (no {CORPUS_FILE}); make one with `ray-ulysses prepare`"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"data.path={directory}: the corpus has format {version}, this version reads {FORMAT_VERSION}; "
            "prepare it again into another directory"
        )
    try:
        info = CorpusInfo.from_json(fields)
    except (KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    if fields.get("fingerprint") != info.fingerprint:
        raise _unreadable(path, "its fields do not give its fingerprint")
    return info


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if found != num_bytes:
        raise _unreadable(path, f"{found} bytes where prepare wrote {num_bytes}")


def _unreadable(path: Path, reason: object) -> UserError:
    return UserError(
        f"data.path: {path} can't be used ({reason}); restore the file, "
        "or prepare the corpus again into another directory"
    )
