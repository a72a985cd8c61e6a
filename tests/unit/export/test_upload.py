"""An export in an object store is whole or has no record, whatever happens while it is copied there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.directory import RECORD_FILE, Identity, Record, already_exported, staging_folder, upload
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from tests.s3_server import S3Server
from tests.unit.export.runs import IDENTITY as SAME
from tests.unit.export.runs import REPORT

OTHER = replace(SAME, weights="fp16")


@pytest.fixture
def published(s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectLocation:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    place = place_of(s3.uri(prefix)) / "export/step-00000020"
    assert isinstance(place, ObjectLocation)
    return place


def make(published: ObjectLocation, identity: Identity = SAME, text: str = "one") -> Path:
    folder = staging_folder(published)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(text)
    record = Record(identity=identity, report=replace(REPORT, files={"weights": len(text)}))
    (folder / RECORD_FILE).write_bytes(record.to_bytes())
    return folder


def there(published: ObjectLocation) -> dict[str, bytes]:
    store = open_store(published.parent)
    return {key.rpartition("/")[2]: store.read_whole(key) for key in store.list(published.name)}


def test_it_is_found_again_and_another_is_only_replaced_if_it_is_asked_for(published: ObjectLocation) -> None:
    assert already_exported(published, SAME, overwrite=False) is None
    folder = make(published)
    upload(folder, published)
    assert not folder.exists() and there(published)["weights"] == b"one"
    found = already_exported(published, SAME, overwrite=False)
    assert found is not None and found.identity == SAME
    with pytest.raises(UserError, match="--overwrite"):
        already_exported(published, OTHER, overwrite=False)
    assert already_exported(published, OTHER, overwrite=True) is None
    open_store(published).replace("more", [b"of another version"])
    upload(make(published, OTHER, "two"), published)
    assert {name: content for name, content in there(published).items() if name != RECORD_FILE} == {"weights": b"two"}
    open_store(published).replace("weights", [b"damaged"])
    with pytest.raises(UserError, match="weights is not what was exported"):
        already_exported(published, OTHER, overwrite=False)


@pytest.mark.parametrize("call", range(1, 12))
def test_whichever_request_of_an_upload_fails_what_is_there_is_whole_or_has_no_record(
    published: ObjectLocation, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    upload(make(published), published)
    tried, count = ObjectStore._tried, [0]

    def failing(store: ObjectStore, key: str, attempt: Callable[[], Any]) -> Any:
        count[0] += 1
        if count[0] == call:
            raise OSError(28, "no space left", key)
        return tried(store, key, attempt)

    folder = make(published, OTHER, "another")
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "_tried", failing)
        said = ""
        try:
            upload(folder, published)
        except RunError as error:
            said = str(error)
    failed = count[0] >= call
    assert ("no space left" in said) == failed
    found = there(published)
    if RECORD_FILE in found:
        record = already_exported(published, OTHER if found["weights"] == b"another" else SAME, overwrite=False)
        assert record is not None, "a record beside weights that are not its own"
    if failed:
        upload(folder if folder.exists() else make(published, OTHER, "another"), published)
    assert already_exported(published, OTHER, overwrite=False) is not None
    assert there(published)["weights"] == b"another"
