"""Stores log-probabilities of a corpus's pairs of answers under a reference model, beside the corpus.

A corpus's folder then contains, for each combination of corpus, model and dtype::

    reference/KEY/0000000000-0000004096    flat file: two values for each pair of a range of documents
    reference/KEY/reference.json           created last: if it exists, the values of all documents are there
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.flat_file import FlatFiles, FlatInfo, flat_content
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.errors import UserError
from ray_ulysses.storage.place import FileStore
from ray_ulysses.storage.retry import READ_ERRORS, RETRY
from ray_ulysses.storage.store import Store, create_if_absent
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, Text, Whole, adapter, read_json

FOLDER, REFERENCE_FILE = "reference", "reference.json"
VALUE = np.dtype(np.float64)
Part = tuple[int, int]
"""A range of documents: the first, and the one after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A reference model of a corpus's pairs."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    corpus: Text
    """Fingerprint of the corpus."""
    digest: Text
    """Digest of the model's weights and configuration."""
    dtype: Text
    """Dtype of the computation."""
    model: Text
    """The model's directory or id, for messages."""

    @property
    def folder(self) -> str:
        """Key of the folder of the values in the corpus's folder."""
        return f"{FOLDER}/{stable_hash([self.corpus, self.digest, self.dtype])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """The content of ``reference.json``."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    reference: Reference
    parts: tuple[tuple[Whole, Whole], ...]
    files: tuple[FlatInfo, ...]


def parts_of(lengths: NDArray[np.integer], part_tokens: int) -> list[Part]:
    """Divide documents into ranges of about ``part_tokens`` tokens, or of one longer document."""
    ends = np.cumsum(lengths, dtype=np.int64)
    stops = np.unique(np.append(np.searchsorted(ends, np.arange(part_tokens, ends[-1], part_tokens)) + 1, ends.size))
    return list(zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True))


def missing_parts(store: Store, reference: Reference, parts: Sequence[Part]) -> list[Part]:
    """Return the parts that are not stored yet."""
    stored = {*store.list(reference.folder)}
    return [part for part in parts if _key(reference, part) not in stored]


def write_part(store: Store, reference: Reference, part: Part, values: NDArray[np.float64]) -> None:
    """Store a part, unless it exists.

    Args:
        store: The corpus's folder.
        reference: The reference model.
        part: Range of documents.
        values: fp64 ``[documents, 2]``, log-probabilities of each pair's chosen and rejected answer.
    """
    assert values.shape == (part[1] - part[0], 2)
    create_if_absent(store, _key(reference, part), flat_content(values.flatten())[0])


def commit(store: Store, reference: Reference, parts: Sequence[Part]) -> None:
    """Check all parts, and commit them.

    Raises:
        UserError: A part is damaged.
    """
    files = []
    for part in parts:
        content = store.read_whole(_key(reference, part))
        values = np.frombuffer(content, VALUE.newbyteorder("<"), count=min(2 * (part[1] - part[0]), len(content) // 8))
        expected, info = flat_content(values)
        if content != expected or values.size != 2 * (part[1] - part[0]) or not np.isfinite(values).all():
            name = _key(reference, part)
            raise UserError(
                f"{name} in the corpus's folder is damaged; delete it, and run `ray-ulysses reference` again"
            )
        files.append(info)
    stored = asdict(_Stored(reference=reference, parts=tuple(parts), files=tuple(files)))
    create_if_absent(store, f"{reference.folder}/{REFERENCE_FILE}", json.dumps(stored).encode())


def has_reference(corpus: Corpus, reference: Reference) -> bool:
    """Return whether a reference model's values of all pairs are committed.

    Raises:
        UserError: The file that commits them is damaged.
    """
    return _read(corpus.folder, reference.folder) is not None


def read_reference(corpus: Corpus, reference: Reference) -> NDArray[np.float64] | None:
    """Return the log-probabilities of each pair's chosen and rejected answer, or None if they are not committed.

    Returns:
        fp64 ``[documents, 2]``: 16 bytes for each pair.

    Raises:
        UserError: The values can't be read.
    """
    stored = _read(corpus.folder, reference.folder)
    if stored is None:
        return None
    keys = [_key(reference, part) for part in stored.parts]
    files = FlatFiles(corpus.folder, keys, stored.files, VALUE, unreadable=_unreadable, retry=RETRY)
    values = [files.read(2 * first, 2 * (stop - first)) for first, stop in stored.parts]
    return np.concatenate(values).astype(VALUE).reshape(-1, 2)


def stored_references(corpus: Corpus) -> list[Reference]:
    """Return all reference models with stored values, of this corpus or of one that was in the same folder."""
    ends = f"/{REFERENCE_FILE}"
    keys = RETRY.call(corpus.folder, lambda: corpus.folder.list(FOLDER))
    found = [_read(corpus.folder, key.removesuffix(ends)) for key in keys if key.endswith(ends)]
    return [one.reference for one in found if one is not None]


def _read(folder: FileStore, key: str) -> _Stored | None:
    name = folder.named(f"{key}/{REFERENCE_FILE}")
    try:
        content = RETRY.call(name, lambda: folder.read_whole(f"{key}/{REFERENCE_FILE}"))
        return read_json(adapter(_Stored), content)
    except FileNotFoundError:
        return None
    except (*READ_ERRORS, ContentError) as error:
        raise _unreadable(name, error) from error


def _key(reference: Reference, part: Part) -> str:
    return f"{reference.folder}/{part[0]:010}-{part[1]:010}"


def _unreadable(name: str, reason: object) -> UserError:
    return UserError(
        f"data.path: {name} can't be used ({reason}); delete its folder, and compute the log-probabilities again with "
        "`ray-ulysses reference`"
    )
