"""Uploads a prepared corpus to an object store; ``corpus.json`` is uploaded last and commits the corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.format import (
    CORPUS_FILE,
    DOCUMENTS_FILE,
    INDEX_FILE,
    PREPARATION_FILE,
    QUARANTINE_FILE,
    SHARDS_DIRECTORY,
    SPANS_FILE,
)
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.store import AlreadyExistsError, Store, file_pieces
from ray_ulysses.validation import parse_json

_PARALLEL_FILES = 4


class CorpusUpload:
    """Upload of one corpus to a folder in an object store.

    An upload may be interrupted and repeated. The first attempt reserves the folder for the corpus's sources and
    options, so a file of the expected size is known to be the expected file.

    Args:
        store: The folder.
        name: The folder's location, for errors.
        signature: Signature of the sources and options, as in ``corpus.json``.
    """

    def __init__(self, store: Store, name: str, signature: str) -> None:
        self._store, self._name, self._signature = store, name, signature

    def is_complete(self) -> bool:
        """Return whether the folder contains the complete corpus.

        Raises:
            UserError: The folder contains another corpus, possibly incomplete.
            RunError: The store does not respond.
        """
        with _storing(self._name):
            if (found := self._signature_in(CORPUS_FILE)) is None:
                claimed = self._signature_in(PREPARATION_FILE)
                self._check(claimed or self._signature)
                return False
            self._check(found)
            return True

    def run(self, directory: Path, say: Callable[[str], None]) -> None:
        """Upload the corpus unless the folder already contains it.

        Args:
            directory: Directory of the prepared corpus with this upload's signature.
            say: Function called with each progress message.

        Raises:
            UserError: The folder contains another corpus, possibly incomplete.
            RunError: The store can't be read or written. Uploaded files remain, and a repeated upload continues.
        """
        if self.is_complete():
            return
        with _storing(self._name):
            claim = json.dumps({"signature": self._signature}).encode()
            try:
                self._store.create(PREPARATION_FILE, [claim])
            except AlreadyExistsError:
                self._check(self._signature_in(PREPARATION_FILE) or self._signature)
            # Largest files first.
            shards = [f"{SHARDS_DIRECTORY}/{shard.name}" for shard in Corpus.open(directory).info.shards]
            others = (DOCUMENTS_FILE, INDEX_FILE, SPANS_FILE, QUARANTINE_FILE)
            keys = [*shards, *(name for name in others if (directory / name).is_file())]
            there = self._store.sizes(SHARDS_DIRECTORY)
            missing = [key for key in keys if there.get(key) != (directory / key).stat().st_size]
            with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
                copied = pool.map(lambda key: self._store.replace(key, file_pieces(directory / key)), missing)
                for number, _ in enumerate(copied, 1):
                    say(f"copying the corpus: {number} of {len(missing)} files")
            # Another upload of the same corpus may have finished first.
            with suppress(AlreadyExistsError):
                self._store.create(CORPUS_FILE, [(directory / CORPUS_FILE).read_bytes()])
            self._check(self._signature_in(CORPUS_FILE) or self._signature)
        with suppress(OSError, RunError):
            self._store.delete(PREPARATION_FILE)

    def _signature_in(self, key: str) -> str | None:
        """Return the signature stored in a file, or None if the file does not exist."""
        try:
            content = self._store.read_whole(key)
        except FileNotFoundError:
            return None
        try:
            return str(parse_json(content)["signature"])
        except (ValueError, KeyError, TypeError):
            return f"unreadable {key}"

    def _check(self, signature: str) -> None:
        if signature != self._signature:
            raise UserError(
                f"--out={self._name}: contains a complete or partial corpus made from other sources, options or source "
                "files; nothing was overwritten. Choose another folder, or delete this one first"
            )


@contextmanager
def _storing(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{name}: can't be written or read ({error}); make the storage reachable, then run the same command "
            "again to continue"
        ) from error
