"""Values of a reference model beside a corpus: in parts, committed at the end, in a directory or an object store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.reference import (
    Reference,
    commit,
    missing_parts,
    parts_of,
    read_reference,
    stored_references,
    write_part,
)
from ray_ulysses.data.prepare.upload import CorpusUpload
from ray_ulysses.errors import UserError
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_folder, open_store
from tests.s3_server import S3Server
from tests.unit.data.test_pairs import prepared

ROWS = [{"prompt": f"{number}?", "chosen": "a" * number, "rejected": "b" * (30 - number)} for number in range(1, 25)]


@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_parts_are_kept_and_values_exist_once_committed(
    tmp_path: Path,
    s3: S3Server,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: Literal["directory", "object store"],
) -> None:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "cache"))
    local = prepared(tmp_path, ROWS, prompt="prompt")
    place = str(local.path)
    if kind == "object store":
        place = s3.uri(prefix)
        folder = open_folder(place)
        assert isinstance(folder, ObjectStore)
        CorpusUpload(folder, str(folder), local.info.signature).run(local.path, print)
    corpus, store = Corpus.open(place), open_store(place)
    reference = Reference(corpus=corpus.fingerprint, digest="model", dtype="fp32", model="m")
    parts = parts_of(corpus.lengths, 200)
    values = np.random.default_rng(0).normal(size=(corpus.num_documents, 2))
    assert len(parts) > 2 and missing_parts(store, reference, parts) == parts
    for first, stop in parts[:2]:
        write_part(store, reference, (first, stop), values[first:stop])
    assert missing_parts(store, reference, parts) == parts[2:]
    assert read_reference(corpus, reference) is None and stored_references(corpus) == []
    with pytest.raises(FileNotFoundError):
        commit(store, reference, parts)
    for first, stop in parts:
        # Another command may store a part first.
        write_part(store, reference, (first, stop), values[first:stop])
    commit(store, reference, parts)
    commit(store, reference, parts)
    found = read_reference(Corpus.open(place), reference)
    assert found is not None
    np.testing.assert_array_equal(found, values)
    assert stored_references(corpus) == [reference]
    for other in ({"corpus": "prepared again"}, {"digest": "trained"}, {"dtype": "bf16"}):
        assert read_reference(corpus, replace(reference, **other)) is None


@pytest.mark.parametrize("damage", ["nan", "cut", "other"])
def test_a_damaged_part_is_not_committed(tmp_path: Path, damage: str) -> None:
    corpus = prepared(tmp_path, ROWS, prompt="prompt")
    reference = Reference(corpus=corpus.fingerprint, digest="model", dtype="fp32", model="m")
    part, store = (0, corpus.num_documents), open_store(corpus.path)
    write_part(store, reference, part, np.full((corpus.num_documents, 2), np.nan if damage == "nan" else 1.0))
    (file,) = (corpus.path / reference.folder).iterdir()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "other":
        file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(UserError, match=r"damaged; delete it"):
        commit(store, reference, [part])
    assert read_reference(corpus, reference) is None


def test_a_damaged_commit_is_named(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, ROWS, prompt="prompt")
    reference = Reference(corpus=corpus.fingerprint, digest="model", dtype="fp32", model="m")
    open_store(corpus.path).replace(f"{reference.folder}/reference.json", [b"{}"])
    with pytest.raises(UserError, match=r"reference\.json can't be used .*`ray-ulysses reference`"):
        read_reference(corpus, reference)
