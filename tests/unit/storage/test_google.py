"""What our client sends to Google Cloud Storage, and how it takes the answers, against a stand-in."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.storage.probe import check_storage
from ray_ulysses.storage.store import AlreadyExistsError, Store
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_reader import read_journal
from tests.google_stand_in import GoogleHandler
from tests.s3_server import FaultyProxy, S3Server, faulty_proxy


@pytest.fixture
def google(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3, GoogleHandler) as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{running.port}")
        yield running


@pytest.fixture
def store(google: FaultyProxy, prefix: str) -> Store:
    return open_store(f"gs://bucket/{prefix}", retry_s=1.0)


def test_a_bucket_that_puts_if_absent_passes_the_probe_and_keeps_a_journal(google: FaultyProxy, prefix: str) -> None:
    check_storage(f"gs://bucket/{prefix}")
    place = place_of(f"gs://bucket/{prefix}/run")
    assert isinstance(place, ObjectLocation) and not open_store(place).exists()
    journal = claim_journal(place)
    journal.append({"event": "warning", "text": "begun"})
    journal.close()
    assert [getattr(entry, "text", None) for entry in read_journal(place).entries] == ["begun"]
    assert open_store(place).exists() and open_store(place).root_names() == ["journal"]


def test_a_file_is_created_once_and_a_lost_answer_is_no_failure(google: FaultyProxy, store: Store) -> None:
    google.fail("lose-answer", lambda method, path: method == "PUT")
    assert store.create("a/file", [b"one"]) == 3
    with pytest.raises(AlreadyExistsError):
        store.create("a/file", [b"two"])
    assert store.read_whole("a/file") == b"one" and store.sizes("a") == {"a/file": 3}
    store.replace("a/file", [b"three"])
    again = pickle.loads(pickle.dumps(store))
    assert isinstance(again, ObjectStore) and again.read_whole("a/file") == b"three"
    store.delete("a")
    assert store.list("a") == []
