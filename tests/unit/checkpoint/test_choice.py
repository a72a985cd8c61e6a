from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_ulysses.checkpoint import KeepRules, Retention, newest_committed, read_manifest, set_aside
from ray_ulysses.checkpoint.choice import Damage, any_is_committed, committed_steps
from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.checkpoint.retention import nameable
from ray_ulysses.run.checkpoint_store import found_fields
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import LocalStore
from tests.s3_server import FaultyProxy, S3Server
from tests.stores import FaultyStore, HookedStore, Kind, permission_lost
from tests.unit.checkpoint.fakes import save
from tests.unit.checkpoint.manifests import signed
from tests.unit.storage.conftest import object_store


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def _data(run: Path) -> int:
    return read_manifest(LocalStore(run), 30).shards[1].intervals[0].offset + 3


SHARD = "checkpoints/step-00000030/attempt-0001/rank-00001-of-00002.safetensors"
MANIFEST, OTHER = manifest_key(30), manifest_key(20)
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte in a shard": (lambda run: _flip(run / SHARD, _data(run)), "checksum of fp32/a"),
    "a flipped byte in a table": (lambda run: _flip(run / SHARD, -1), "checksum table"),
    "a flipped byte in a manifest": (lambda run: _flip(run / MANIFEST, 700), "manifest's checksum|not JSON"),
    "a flipped byte in a header": (lambda run: _flip(run / SHARD, 20), "header's checksum"),
    "a truncated shard": (lambda run: _cut(run / SHARD, 7), "bytes instead of"),
    "an empty shard": (lambda run: (run / SHARD).write_bytes(b""), "has 0 bytes instead of"),
    "a longer shard": (lambda run: (run / SHARD).write_bytes((run / SHARD).read_bytes() + b"x"), "bytes instead of"),
    "a missing shard": (lambda run: (run / SHARD).unlink(), "is missing"),
    "a torn manifest": (lambda run: _cut(run / MANIFEST, 99), "is truncated or is not JSON"),
    "a manifest of another step": (lambda run: shutil.copy(run / OTHER, run / MANIFEST), "step 30 belongs to step 20"),
}


@pytest.mark.parametrize("name", DAMAGES, ids=lambda name: name.replace(" ", "-"))
def test_damage_is_named_and_the_checkpoint_before_is_taken(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    for step in (10, 20, 30):
        save(store, step)
    plant, reason = DAMAGES[name]
    plant(tmp_path)
    choice = newest_committed(store)
    assert choice.manifest is not None and choice.manifest.step == 20
    (damage,) = choice.damaged
    assert damage.step == 30
    assert re.search(reason, damage.reason), damage.reason
    assert str(damage) == f"the checkpoint of step 30 is damaged and is not used: {damage.reason}"


OF_SIZES = ["a truncated shard", "a longer shard", "a missing shard"]


@pytest.mark.parametrize("name", OF_SIZES, ids=lambda name: name.replace(" ", "-"))
def test_shards_that_are_missing_or_of_another_size_are_found_by_sizes_alone(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    for step in (20, 30):
        save(store, step)
    plant, reason = DAMAGES[name]
    plant(tmp_path)
    choice = newest_committed(store, "sizes")
    assert choice.manifest is not None and choice.manifest.step == 20
    (damage,) = choice.damaged
    assert damage.kind == "damaged" and re.search(f"rank-00001-of-00002.* {reason}", damage.reason), damage.reason


def test_sizes_take_four_requests_however_many_shards(s3: S3Server, proxy: FaultyProxy, prefix: str) -> None:
    claim_attempt(object_store(s3.uri(prefix)), 1)
    save(object_store(s3.uri(prefix)), 30, world_size=4)
    store = object_store(s3.uri(prefix, proxy.port))
    choice = newest_committed(store, "sizes")
    assert choice.manifest is not None and len(choice.manifest.shards) == 4
    # Lists of the checkpoints, the attempts and the step's files, and the manifest.
    assert [exchange.method for exchange in proxy.exchanges] == ["GET"] * 4
    s3.client().delete_object(
        Bucket="bucket", Key=f"{prefix}/checkpoints/step-00000030/{choice.manifest.shards[3].file}"
    )
    (damage,) = newest_committed(store, "sizes").damaged
    assert damage.kind == "damaged" and damage.reason == f"{choice.manifest.shards[3].file} is missing"


def test_a_step_whose_files_can_not_be_listed_now_is_not_damaged(tmp_path: Path) -> None:
    save(LocalStore(tmp_path), 30)
    store = FaultyStore(
        LocalStore(tmp_path), fail_at=1, kinds=("list",), error=permission_lost(), only=lambda key: "/" in key
    )
    (damage,) = newest_committed(store, "sizes").damaged
    assert damage.kind == "unreadable"


def test_a_checkpoint_of_another_version_is_named_and_left_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 30)
    foreign = signed({**json.loads(store.read_whole(MANIFEST)), "schema_version": 9})
    store.replace(MANIFEST, [foreign])
    (damage,) = newest_committed(store).damaged
    assert damage.kind == "foreign"
    set_aside(store, damage, attempt=2)
    assert store.read_whole(MANIFEST) == foreign


def test_shards_without_a_manifest_are_never_loaded(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 20)
    save(store, 30)
    for step, newest in ((30, 20), (20, None)):
        store.delete(manifest_key(step))
        choice = newest_committed(store)
        assert (choice.manifest and choice.manifest.step, choice.damaged) == (newest, ())


def test_a_checkpoint_deleted_by_retention_during_the_choice_is_not_damaged(tmp_path: Path) -> None:
    class Overtaken(HookedStore):
        """A running attempt commits, and deletes what came before, once a list was made."""

        is_overtaken = False

        def after(self, kind: Kind, key: str, num_bytes: int) -> None:
            if kind == "list" and key == "checkpoints" and not self.is_overtaken:
                self.is_overtaken = True
                save(self.inner, 30)
                self.inner.delete("checkpoints/step-00000020")

    store = LocalStore(tmp_path)
    save(store, 20)
    choice = newest_committed(Overtaken(store))
    assert choice.manifest is not None and choice.manifest.step == 30 and choice.damaged == ()


def test_a_step_committed_during_the_choice_is_taken(tmp_path: Path) -> None:
    class Overtaken(HookedStore):
        """A running attempt commits the step that had no manifest yet, and deletes the step that is looked at."""

        is_overtaken = False

        def before(self, kind: Kind, key: str) -> None:
            if kind == "open" and key == OTHER and not self.is_overtaken:
                self.is_overtaken = True
                save(self.inner, 30)
                self.inner.delete("checkpoints/step-00000020")

    store = LocalStore(tmp_path)
    save(store, 20)
    store.create("checkpoints/step-00000030/attempt-0001/rank-00000-of-00003.safetensors", [b"half a save"])
    choice = newest_committed(Overtaken(store))
    assert choice.manifest is not None and choice.manifest.step == 30 and choice.damaged == ()


def test_requests_do_not_grow_with_the_shards_of_earlier_steps(s3: S3Server, proxy: FaultyProxy, prefix: str) -> None:
    claim_attempt(object_store(s3.uri(prefix)), 1)
    store = object_store(s3.uri(prefix, proxy.port))
    for step in (10, 20, 30):
        save(object_store(s3.uri(prefix)), step, world_size=4)
    proxy.exchanges.clear()
    choice = newest_committed(store, "sizes")
    assert choice.manifest is not None and len(proxy.exchanges) == 4
    proxy.exchanges.clear()
    retention = Retention(store, KeepRules(last=9))
    retention.apply(choice.manifest.ref)
    # The attempts and the steps; the names in each step's folder, and its manifest.
    assert [exchange.method for exchange in proxy.exchanges] == ["GET"] * (2 + 3 + 3)
    whole = [exchange.path for exchange in proxy.exchanges if "list-type" in exchange.path]
    assert all("delimiter" in path for path in whole if "checkpoints" in path)
    proxy.exchanges.clear()
    retention.apply(choice.manifest.ref)
    assert len(proxy.exchanges) == 3


def test_requests_for_the_committed_steps_do_not_grow_with_their_shards(
    s3: S3Server, proxy: FaultyProxy, prefix: str
) -> None:
    direct = object_store(s3.uri(prefix))
    claim_attempt(direct, 1)
    for step in (10, 20, 30):
        save(direct, step, world_size=4)
    direct.create("checkpoints/step-00000040/attempt-0001/rank-00000-of-00004.safetensors", [b"half a save"])
    store = object_store(s3.uri(prefix, proxy.port))

    def requests(ask: Callable[[], object]) -> int:
        proxy.exchanges.clear()
        ask()
        lists = [exchange.path for exchange in proxy.exchanges if "list-type" in exchange.path]
        # With a delimiter, a list has the names of a step's attempts instead of their shards.
        assert all("delimiter" in path for path in lists if "checkpoints" in path)
        return len(proxy.exchanges)

    assert committed_steps(direct) == (10, 20, 30) and [*nameable(direct)] == [10, 20, 30]
    assert requests(lambda: committed_steps(store)) == 1 + 4
    # The newest step of all has no manifest.
    assert requests(lambda: any_is_committed(store)) == 1 + 2
    # The attempts, the steps, and their manifests.
    assert requests(lambda: nameable(store)) == 1 + 1 + 4
    assert requests(lambda: found_fields(store)) == 1 + 4 + 1 + 1


def test_a_step_set_aside_can_be_committed_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 30)
    _flip(tmp_path / SHARD, -1)
    (damage,) = newest_committed(store).damaged
    content = store.read_whole(MANIFEST)
    # The second time, the note exists, as after an interruption before the manifest's deletion.
    for _ in range(2):
        store.replace(MANIFEST, [content])
        set_aside(store, damage, attempt=3)
        assert committed_steps(store) == ()
    note = json.loads((tmp_path / "checkpoints/step-00000030/set-aside-0003.json").read_text())
    assert note == {"reason": damage.reason, "kind": "damaged", "manifest": content.decode()}
    save(store, 30, attempt=3)
    # An older attempt that acts on what it found before must not undo the new commit.
    for seen in (damage, Damage(step=30, reason="its manifest was torn")):
        set_aside(store, seen, attempt=2)
        choice = newest_committed(store)
        assert choice.manifest is not None and choice.manifest.attempt == 3
