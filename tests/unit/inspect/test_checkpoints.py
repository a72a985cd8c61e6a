"""All checkpoint folders are listed, and every byte of a checkpoint is verified."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.checkpoint import Damage, Manifest, newest_committed, set_aside
from ray_ulysses.checkpoint.fence import claim_attempt, start_attempt
from ray_ulysses.checkpoint.manifest import read_manifest
from ray_ulysses.checkpoint.shard_table import ShardTable
from ray_ulysses.clock import SystemClock
from ray_ulysses.config import load_config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.inspect import checkpoint_listing
from ray_ulysses.inspect.checkpoint_listing import CheckpointReport, list_checkpoints
from ray_ulysses.inspect.checkpoint_verification import CheckpointVerdict, verify_checkpoint
from ray_ulysses.inspect.run_data import open_run_storage, read_run
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.run.start_point import start_of
from ray_ulysses.run_names import shard_file, step_folder
from ray_ulysses.storage import LocalStore, Store, run_claim
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.tracking.journal import claim_journal
from tests.breadth import fast_only
from tests.s3_server import S3Server
from tests.stores import CountingStore
from tests.unit.inspect.saved import WRITTEN, cut, denied, flip, make_folder, make_foreign, manifest, save, shard
from tests.unit.tracking.journals import commit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "demo"


@pytest.fixture
def store(folder: Path) -> LocalStore:
    return make_folder(folder)


def by_step(folder: Path) -> dict[int, CheckpointReport]:
    return {report.step: report for report in list_checkpoints(folder).checkpoints}


def files_bytes(folder: Path, step: int) -> int:
    where = folder / "checkpoints" / f"step-{step:08d}"
    return sum(path.stat().st_size for path in where.rglob("*") if path.is_file())


def record_commits(folder: Path, *steps: int) -> None:
    journal = claim_journal(folder)
    for step in steps:
        journal.append(commit(step))
    journal.close()


def test_a_listed_checkpoint_has_its_origin_layout_and_size(folder: Path, store: LocalStore) -> None:
    metrics = {"loss": 4.0, "eval_loss": 4.5}
    save(store, 20, attempt=3, world_size=4, ring_size=2, zero_stage=1, metrics=metrics)
    sizes: dict[str, int] = {"world_size": 4, "sp_size": 2, "ring_size": 2, "dp_size": 2, "zero_stage": 1}
    assert by_step(folder)[20] == CheckpointReport(
        step=20,
        path="checkpoints/step-00000020",
        committed=True,
        condition="whole",
        attempt=3,
        **sizes,
        num_bytes=files_bytes(folder, 20),
        written_at=WRITTEN + 20,
        reason="steps",
        metrics=metrics,
        kept=("last 3",),
    )
    listing = list_checkpoints(folder)
    assert (listing.name, listing.location, listing.resumes_from) == ("demo", str(folder), 20)


def test_all_file_sizes_come_from_one_store_listing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an object store, each opened file is a blocking request."""
    store = CountingStore(make_folder(folder))
    for step in (10, 20, 30):
        save(store, step)
    cut(shard(folder, 20), 1)
    place = replace(open_run_storage(folder), store=store)
    monkeypatch.setattr(checkpoint_listing, "open_run_storage", lambda run_dir, **options: place)
    store.log.clear()
    assert [report.condition for report in list_checkpoints(folder).checkpoints] == ["whole", "damaged", "whole"]
    assert sum(call == ("list", "checkpoints") for call in store.log) == 1
    shards = {key for kind, key in store.log if kind == "open" and "attempt-" in key}
    assert shards == {f"{step_folder(20)}/{shard_file(1, 1, 2)}"}, "only where sizes are wrong"


def test_the_listing_has_the_retention_rules_of_each_checkpoint(folder: Path) -> None:
    changes = {"checkpoint__keep_last": 1, "checkpoint__keep_every_steps": 20, "checkpoint__keep_best": 1}
    store = make_folder(folder, **changes, checkpoint__best_metric="loss")
    for step, loss in ((10, 1.0), (20, 3.0), (30, 4.0), (40, 2.0)):
        save(store, step, metrics={"loss": loss})
    kept = {step: report.kept for step, report in by_step(folder).items()}
    assert kept == {10: ("best loss",), 20: ("every 20",), 30: (), 40: ("last 1", "every 20")}


def test_a_checkpoint_with_an_unreadable_manifest_is_kept(folder: Path) -> None:
    store = make_folder(folder, checkpoint__keep_last=1)
    for step in (10, 20, 30):
        save(store, step)
    with denied(manifest(folder, 10)):
        assert {step: one.kept for step, one in by_step(folder).items()} == {
            10: ("unread manifest",), 20: (), 30: ("last 1",)
        }  # fmt: skip


def test_a_torn_manifest_is_damage_and_the_shards_identify_the_attempt(folder: Path, store: LocalStore) -> None:
    save(store, 10)
    cut(manifest(folder, 10), 50)
    report = by_step(folder)[10]
    assert (report.condition, report.committed) == ("damaged", True)
    assert (report.attempt, report.world_size, report.dp_size) == (1, 2, None)


def test_a_checkpoint_set_aside_has_reason_attempt_and_time(folder: Path, store: LocalStore) -> None:
    save(store, 20)
    cut(shard(folder, 20), 5)
    (damage,) = newest_committed(store).damaged
    claim_journal(folder).close()
    journal = claim_journal(folder)
    set_aside(store, damage, attempt=journal.attempt)
    journal.append({"event": "checkpoint_set_aside", "step": 20, "reason": damage.reason})
    report = by_step(folder)[20]
    assert (report.condition, report.committed, report.why) == ("set_aside", False, damage.reason)
    assert report.is_swept
    # These values come from the manifest in the note.
    assert (report.attempt, report.world_size, report.metrics) == (1, 2, {"loss": 4.8})
    (aside,) = report.set_aside
    assert (aside.attempt, aside.reason) == (2, damage.reason)
    assert aside.at is not None and aside.at > WRITTEN - 10**9
    save(store, 20, attempt=2)
    again = by_step(folder)[20]
    assert (again.condition, again.attempt, again.set_aside) == ("whole", 2, (aside,))
    assert again.leftover_bytes > 0 and again.num_bytes + again.leftover_bytes == files_bytes(folder, 20)


def test_a_late_commit_of_a_dead_attempt_is_superseded(folder: Path, store: LocalStore) -> None:
    save(store, 10, attempt=1)
    save(store, 30, attempt=1)
    start_attempt(store, 2, 10)
    save(store, 20, attempt=2)
    found = by_step(folder)
    assert {step: report.condition for step, report in found.items()} == {10: "whole", 20: "whole", 30: "superseded"}
    assert found[30].kept == ()
    assert list_checkpoints(folder).resumes_from == 20


def test_shards_without_a_manifest_are_left_over_or_being_written(folder: Path, store: LocalStore) -> None:
    claim_attempt(store, 1)
    save(store, 10)
    save(store, 20)
    manifest(folder, 20).unlink()
    report = by_step(folder)[20]
    assert (report.condition, report.committed, report.attempt, report.world_size) == ("not_committed", False, 1, 2)
    assert report.num_bytes == files_bytes(folder, 20)
    assert str(report.why).startswith("left by attempt 1, which ended before the commit")
    with run_claim(folder):
        assert by_step(folder)[20].condition == "being_written"
        claim_attempt(store, 2)
        assert by_step(folder)[20].condition == "not_committed"


def test_an_unreadable_manifest_is_not_taken_for_an_uncommitted_checkpoint(folder: Path, store: LocalStore) -> None:
    save(store, 10)
    save(store, 20)
    with denied(manifest(folder, 20)):
        listing = list_checkpoints(folder)
    older, report = listing.checkpoints
    assert (report.condition, report.committed, report.attempt, older.condition) == ("unreadable", True, 1, "whole")
    assert (listing.resumes_from, listing.unless, listing.refusal) == (10, (20,), None)
    with denied(shard(folder, 20)):
        assert by_step(folder)[20].condition == "unreadable"
    manifest(folder, 10).unlink()
    with denied(manifest(folder, 20)):
        listing = list_checkpoints(folder)
    assert (listing.resumes_from, listing.unless) == (None, (20,))
    assert "the checkpoint of step 20 can't be read" in str(listing.refusal)


@pytest.mark.parametrize(
    "newest", fast_only(["whole", "cut", "torn", "foreign", "denied", "fenced", "gone"], "whole", "foreign", "denied")
)
@pytest.mark.parametrize("older", fast_only(["whole", "cut", "foreign", "gone"], "whole", "cut"))
def test_the_listing_refuses_what_train_refuses(folder: Path, store: LocalStore, newest: str, older: str) -> None:
    for step, state in ((10, older), (20, newest)):
        save(store, step)
        if state == "cut":
            cut(shard(folder, step), 5)
        elif state == "torn":
            cut(manifest(folder, step), 50)
        elif state == "foreign":
            make_foreign(manifest(folder, step))
        elif state == "gone":
            manifest(folder, step).unlink()
    record_commits(folder, 10, 20)
    if newest == "fenced":
        start_attempt(store, 2, 10)
    with denied(manifest(folder, 20)) if newest == "denied" else nullcontext():
        listing, choice = list_checkpoints(folder), newest_committed(store, "sizes")
        run = replace(resolve_run(load_config(folder / "config.yaml")), store=store)
        refusal = start_of(run, {"storage": choice.manifest.step} if choice.manifest else {}, choice.damaged).refusal
    assert listing.refusal == refusal
    if refusal is None:
        assert listing.resumes_from == (choice.manifest.step if choice.manifest else None)


@pytest.mark.parametrize("is_file", [False, True], ids=["absent", "a-file"])
def test_missing_checkpoints_that_the_journal_records_are_reported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_file: bool
) -> None:
    place = tmp_path / "not-mounted"
    make_folder(folder, checkpoint__storage=str(place))
    assert read_run(folder).checkpoints == ()
    assert (list_checkpoints(folder).refusal, caplog.text) == (None, "")
    record_commits(folder, 2, 4, 6)
    if is_file:
        (place / "demo").mkdir(parents=True)
        (place / "demo" / "checkpoints").write_text("")
    listing = list_checkpoints(folder)
    assert (listing.checkpoints, listing.resumes_from) == ((), None)
    assert "step 6" in str(listing.refusal) and "checkpoint.storage" in str(listing.refusal)
    assert read_run(folder).checkpoints == ()
    assert str(listing.refusal) in caplog.text


def test_a_missing_checkpoint_that_does_not_count_is_not_reported(folder: Path, store: LocalStore) -> None:
    record_commits(folder, 10)
    start_attempt(store, 2, 0)
    assert list_checkpoints(folder).refusal is None


def test_a_folder_that_no_attempt_wrote_is_not_swept(folder: Path) -> None:
    make_folder(folder)
    other = folder / "checkpoints" / "step-00000008" / "model.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"exported")
    report = by_step(folder)[8]
    assert (report.condition, report.is_swept) == ("not_committed", False)
    assert report.why == "no attempt wrote this folder; move it out of the run's checkpoints"


def test_a_checkpoint_deleted_during_the_listing_is_not_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_folder(folder), 10)
    read_committed = checkpoint_listing.read_committed

    def late(store: Store, step: int) -> Manifest | Damage:
        manifest(folder, 10).unlink()
        shard(folder, 10).unlink()
        return read_committed(store, step)

    monkeypatch.setattr(checkpoint_listing, "read_committed", late)
    assert (by_step(folder)[10].condition, by_step(folder)[10].committed) == ("not_committed", False)


def test_the_journal_supplies_the_time_that_a_manifest_lacks(folder: Path, store: LocalStore) -> None:
    save(store, 10, written_at=0.0)
    assert by_step(folder)[10].written_at is None
    record_commits(folder, 10)
    assert by_step(folder)[10].written_at is not None


@pytest.mark.parametrize("kind", ["folder", "object store"])
def test_checkpoints_are_found_where_the_configuration_says(
    folder: Path, tmp_path: Path, s3: S3Server, prefix: str, kind: str
) -> None:
    place = str(tmp_path / "elsewhere") if kind == "folder" else s3.uri(prefix)
    make_folder(folder, checkpoint__storage=place)
    location = place_of(place) / "demo"
    save(open_store(location), 10)
    listing = list_checkpoints(folder)
    assert (listing.location, listing.resumes_from) == (str(location), 10)
    assert [(one.step, one.committed, one.world_size) for one in read_run(folder).checkpoints] == [(10, True, 2)]
    assert verify_checkpoint(folder, 10, clock=SystemClock()).is_whole


def test_checkpoints_are_found_after_the_run_directory_is_moved(folder: Path, tmp_path: Path) -> None:
    save(make_folder(folder), 10)
    moved = folder.rename(tmp_path / "moved")
    assert list_checkpoints(moved).resumes_from == 10


def test_an_unavailable_storage_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_folder(folder)
    listed = LocalStore.list

    def away(self: LocalStore, prefix: str) -> list[str]:
        if self.root == folder and prefix != "lock":
            raise OSError(5, "Input/output error")
        return listed(self, prefix)

    monkeypatch.setattr(LocalStore, "list", away)
    with pytest.raises(RunError, match=rf"{folder} .*Input/output error"):
        list_checkpoints(folder)
    assert read_run(folder).checkpoints == ()
    assert "can't be listed (Input/output error)" in caplog.text


def test_an_unreadable_configuration_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(make_folder(folder), 10)
    (folder / "config.yaml").write_text("no: configuration")
    assert list_checkpoints(folder).resumes_from == 10
    assert f"{folder}/config.yaml can't be read (" in caplog.text


def test_listing_changes_no_file(folder: Path, store: LocalStore) -> None:
    save(store, 10)
    save(store, 20)
    flip(shard(folder, 20), -9)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    list_checkpoints(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


FILE = "attempt-0001/rank-00001-of-00002.safetensors"


@pytest.fixture
def saved(folder: Path, store: LocalStore) -> Path:
    """A run directory with checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(store, step)
    return folder


def verify(folder: Path, step: int = 20) -> CheckpointVerdict:
    return verify_checkpoint(folder, step, clock=SystemClock())


def test_an_intact_checkpoint_is_read_completely(saved: Path) -> None:
    told: list[tuple[int, int]] = []
    verdict = verify_checkpoint(saved, 20, clock=SystemClock(), watch=lambda done, total: told.append((done, total)))
    assert verdict.is_whole
    assert (verdict.attempt, verdict.world_size, verdict.num_tensors, verdict.num_elements) == (1, 2, 2, 200_050)
    sizes = [path.stat().st_size for path in (shard(saved, 20, 0), shard(saved, 20, 1))]
    assert [(file.num_bytes, file.num_tensors, file.problem) for file in verdict.files] == [
        (size, 2, None) for size in sizes
    ]
    assert told[-1] == (sum(sizes), sum(sizes))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_flipped_bit_is_located_by_file_tensor_and_bytes(saved: Path) -> None:
    path = shard(saved, 20)
    position = path.stat().st_size // 2
    flip(path, position)
    verdict = verify(saved)
    assert not verdict.is_whole
    good, bad = verdict.files
    assert good.problem is None
    found = re.fullmatch(rf"{FILE}: the checksum of fp32/weight is wrong \(bytes (\d+) to (\d+)\)", str(bad.problem))
    assert found, bad.problem
    assert int(found[1]) <= position <= int(found[2])
    assert verify(saved, 10).is_whole


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip(path, 20), "the header's checksum is wrong"),
        (lambda path: flip(path, -1), r"the checksum table at byte \d+ is damaged"),
        (lambda path: cut(path, 7), r"has \d+ bytes instead of \d+"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["header", "checksums", "truncated", "missing"],
)
def test_other_file_damage_is_reported(saved: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(shard(saved, 20))
    verdict = verify(saved)
    assert (verdict.condition, verdict.problem, verdict.files[0].problem) == ("damaged", None, None)
    assert re.match(f"{FILE}:? {said}", str(verdict.files[1].problem))


def test_an_unreadable_file_is_not_reported_as_damaged(saved: Path) -> None:
    with denied(shard(saved, 20)):
        verdict = verify(saved)
    assert "Permission denied" in str(verdict.files[1].problem)
    assert (verdict.condition, verdict.is_whole) == ("unreadable", False)
    flip(shard(saved, 20, 0), -1)
    with denied(shard(saved, 20)):
        assert verify(saved).condition == "damaged"


@pytest.mark.parametrize(
    ("condition", "said"),
    [("unreadable", "Permission denied"), ("foreign", "schema version 99"), ("damaged", "is truncated or is not JSON")],
)
def test_only_a_torn_manifest_is_damaged(saved: Path, condition: str, said: str) -> None:
    path = manifest(saved, 20)
    if condition == "foreign":
        make_foreign(path)
    elif condition == "damaged":
        cut(path, 30)
    with denied(path) if condition == "unreadable" else nullcontext():
        verdict = verify(saved)
    assert said in str(verdict.problem)
    assert (verdict.condition, verdict.is_whole) == (condition, False)
    assert (verdict.to_json()["condition"], verdict.to_json()["whole"]) == (condition, False)


def test_a_checkpoint_deleted_during_the_verification_is_refused(saved: Path) -> None:
    def delete(done: int, total: int) -> None:
        LocalStore(saved).delete("checkpoints/step-00000020")

    shard(saved, 20).unlink()
    with pytest.raises(UserError, match="--verify-checkpoint=20: retention deleted this"):
        verify_checkpoint(saved, 20, clock=SystemClock(), watch=delete)


def test_a_manifest_without_all_ranks_does_not_cover_the_state(saved: Path) -> None:
    whole = read_manifest(LocalStore(saved), 20)
    one = ShardTable(whole.state.tensors, whole.world_size, whole.shards.records[:1])
    manifest(saved, 20).write_bytes(replace(whole, shards=one).to_bytes())
    verdict = verify(saved)
    assert not verdict.is_whole
    assert "fp32/weight" in str(verdict.problem)


def test_a_superseded_checkpoint_is_intact_but_unusable(saved: Path) -> None:
    start_attempt(LocalStore(saved), 2, 10)
    verdict = verify(saved)
    assert (verdict.condition, verdict.is_whole) == ("superseded", False)
    assert "the checkpoint is not part of the run and is never loaded" in str(verdict.problem)
    assert [file.problem for file in verdict.files] == [None, None]
    assert verify(saved, 10).is_whole


def test_an_uncommitted_step_is_refused_with_the_committed_steps(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--verify-checkpoint=30: no checkpoint of step 30 is committed in .*: 10, 20"):
        verify(saved, 30)
    make_folder(tmp_path / "empty")
    with pytest.raises(UserError, match="committed: none"):
        verify(tmp_path / "empty", 30)
