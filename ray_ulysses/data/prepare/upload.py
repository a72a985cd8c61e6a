"""Uploads a prepared corpus to an object store; ``corpus.json`` is uploaded last and commits it."""

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
    """The upload of one corpus to a folder of an object store.

    It may be killed and repeated: the folder belongs to the sources and options that first wrote to it, so a file of
    the right size is the right file.

    Args:
        store: The folder.
        name: Its location, for errors.
        signature: The signature of sources and options in ``corpus.json``.
    """

    def __init__(self, store: Store, name: str, signature: str) -> None:
        self._store, self._name, self._signature = store, name, signature

    def is_complete(self) -> bool:
        """Return whether the folder holds this corpus.

        Raises:
            UserError: The folder holds another corpus, or a part of one.
            RunError: The store does not answer.
        """
        with _storing(self._name):
            if (found := self._signature_in(CORPUS_FILE)) is None:
                claimed = self._signature_in(PREPARATION_FILE)
                self._check(claimed or self._signature)
                return False
            self._check(found)
            return True

    def run(self, directory: Path, say: Callable[[str], None]) -> None:
        """Upload a corpus unless the folder already holds it.

        Args:
            directory: The corpus, which has the signature.
            say: Called with progress messages.

        Raises:
            UserError: The folder holds another corpus, or a part of one.
            RunError: The store can't be read or written; uploaded files stay, and a repetition continues.
        """
        if self.is_complete():
            return
        with _storing(self._name):
            claim = json.dumps({"signature": self._signature}).encode()
            try:
                self._store.create(PREPARATION_FILE, [claim])
            except AlreadyExistsError:
                self._check(self._signature_in(PREPARATION_FILE) or self._signature)
            # The largest files first.
            shards = [f"{SHARDS_DIRECTORY}/{shard.name}" for shard in Corpus.open(directory).info.shards]
            others = (DOCUMENTS_FILE, INDEX_FILE, SPANS_FILE, QUARANTINE_FILE)
            keys = [*shards, *(name for name in others if (directory / name).is_file())]
            there = self._store.sizes(SHARDS_DIRECTORY)
            missing = [key for key in keys if there.get(key) != (directory / key).stat().st_size]

            def copy(key: str) -> None:
                self._store.replace(key, file_pieces(directory / key))

            with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
                for number, _ in enumerate(pool.map(copy, missing), 1):
                    say(f"copying the corpus: {number} of {len(missing)} files")
            # Another upload of the same corpus may have been faster.
            with suppress(AlreadyExistsError):
                self._store.create(CORPUS_FILE, [(directory / CORPUS_FILE).read_bytes()])
            self._check(self._signature_in(CORPUS_FILE) or self._signature)
        with suppress(OSError, RunError):
            self._store.delete(PREPARATION_FILE)

    def _signature_in(self, key: str) -> str | None:
        """Return the signature in a file; None if the file does not exist."""
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
                f"--out={self._name}: holds a corpus of other sources, options or source files, or a part of one; "
                "nothing was overwritten. Choose another folder, or delete this one first"
            )


@contextmanager
def _storing(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{name}: can't be written or read ({error}); make it reachable and run the same command again, which "
            "continues"
        ) from error
