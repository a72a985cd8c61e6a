from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from ray_ulysses.checkpoint import CheckpointRef, KeepRules, Retention, newest_committed
from ray_ulysses.checkpoint.choice import examine
from ray_ulysses.checkpoint.manifest import ManifestError, read_manifest
from ray_ulysses.errors import UlyssesError
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import Store
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from tests.breadth import fast_only
from tests.s3_server import BUCKET, FaultyProxy, S3Server
from tests.unit.checkpoint.fakes import save
from tests.unit.checkpoint.manifests import signed

# Five hundred names take minutes.
pytestmark = pytest.mark.timeout(1800)

_PARTS = [
    "..",
    ".",
    "",
    "%2e%2e",
    "other",
    "run",
    "attempt-0001",
    "\\..",
    "step-00000002",
    "\x00",
    "?x=1",
    "#x",
    "../..",
]
_SHARD = "rank-00000-of-00002.safetensors"


def foreign_names(count: int, seed: int) -> Iterator[str]:
    drawn = random.Random(seed)
    yield from (f"../../../other/{_SHARD}", f"/other/{_SHARD}", f"attempt-0001/../../../../other/{_SHARD}")
    yield from (f"attempt-0001/%2e%2e/%2e%2e/other/{_SHARD}", f"s3://{BUCKET}/other/{_SHARD}", "..", "/", "")
    for _ in range(count):
        name = "/".join(drawn.choices(_PARTS, k=drawn.randint(1, 7))) + drawn.choice(("", f"/{_SHARD}"))
        if name != f"attempt-0001/{_SHARD}":
            yield name


def with_names(content: bytes, name: str) -> bytes:
    tree = json.loads(content)
    for number, shard in enumerate(tree["shards"]):
        shard["file"] = name + ("" if number == 0 else f"-{number}")
    return signed(tree)


def _refused(store: Store) -> str:
    """Use a checkpoint as commands do; return the reason why its manifest was refused."""
    for call in (
        lambda: newest_committed(store),
        lambda: examine(store, 4),
        lambda: Retention(store, KeepRules(last=1)).apply(CheckpointRef(step=6, attempt=1, world_size=2)),
    ):
        with contextlib.suppress(OSError, UlyssesError):
            call()
    with pytest.raises(ManifestError) as refused:
        read_manifest(store, 6)
    return str(refused.value)


def _store(uri: str) -> ObjectStore:
    place = place_of(uri)
    assert isinstance(place, ObjectLocation)
    return open_store(place)


def _outside(proxy: FaultyProxy, prefix: str) -> list[str]:
    """Return the requests for keys outside the run; deletions are requests to the bucket itself."""
    found = []
    for one in proxy.exchanges:
        url = urlsplit(one.path)
        key = parse_qs(url.query).get("prefix", [unquote(url.path).removeprefix(f"/{BUCKET}/")])[0]
        if not key.startswith(f"{prefix}/run/") and (one.method, url.path) != ("POST", f"/{BUCKET}"):
            found.append(f"{one.method} {one.path}")
    return found


@pytest.mark.parametrize("count", fast_only((0, 500), 0))
def test_foreign_names_reach_nothing_outside(s3: S3Server, proxy: FaultyProxy, prefix: str, count: int) -> None:
    store, other = _store(s3.uri(f"{prefix}/run", proxy.port)), _store(s3.uri(f"{prefix}/other"))
    for key in (_SHARD, f"attempt-0001/{_SHARD}"):
        other.create(key, [b"canary"])
    for step in (4, 6):
        save(store, step)
    sound = {step: store.read_whole(manifest_key(step)) for step in (4, 6)}
    for name in foreign_names(count, seed=count):
        for step in (4, 6):
            store.replace(manifest_key(step), [with_names(sound[step], name)])
        assert "shards[0].file" in _refused(store), name
    assert not _outside(proxy, prefix)
    assert other.list("attempt-0001") == [f"attempt-0001/{_SHARD}"]
    assert all(other.read_whole(key) == b"canary" for key in (_SHARD, f"attempt-0001/{_SHARD}"))


@pytest.mark.parametrize("count", fast_only((0, 300), 0))
def test_no_call_reaches_a_key_outside(s3: S3Server, proxy: FaultyProxy, prefix: str, count: int) -> None:
    store = _store(s3.uri(f"{prefix}/run", proxy.port))
    calls: tuple[Callable[[str], object], ...] = (
        *(store.read_whole, store.size, store.modified_at, store.list, store.sizes, store.delete, store.open),
        *(partial(store.read_ranges, ranges=[(0, 1)]), lambda key: store.delete_files([key])),
        *(partial(store.create, chunks=[b"x"]), partial(store.replace, chunks=[b"x"])),
    )
    for name in foreign_names(count, seed=count):
        for call in calls:
            with contextlib.suppress(OSError, ValueError):
                call(name)
    assert not _outside(proxy, prefix)
    assert _store(s3.uri(prefix)).root_names() in ([], ["run"])
