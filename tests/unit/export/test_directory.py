"""An export appears complete or not at all, on a disk and in an object store, and its record is validated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export import directory
from ray_ulysses.export.directory import (
    RECORD_FILE,
    Identity,
    Record,
    already_exported,
    read_record,
    refuse_place,
    staging_folder,
    unpublished,
    upload,
)
from ray_ulysses.export.report import CheckResult, ExportReport
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from tests.polling import wait_until
from tests.s3_server import S3Server

SAME = Identity(manifest="aa", weights="model", max_shard_bytes=5, tokenizer="bb", checked=True)
OTHER = replace(SAME, weights="fp16")
REPORT = ExportReport(
    run="run", step=4, attempt=1, trained_tokens=12, data_digest="00ff", out="/out", architecture="LlamaForCausalLM",
    parameters=3, weights="bf16", files={"file": 3}, context_tokens=256, max_positions=None, rope="", tokenizer="none",
    published_tokenizer="none", has_tokenizer=False, versions={"torch": "2.13.0"},
    check=CheckResult(tokens=8, documents=2, origin="seeded", difference=0.5, scale=1.0, bound=1e-5),
    seconds=0.0, was_there=False,
)  # fmt: skip


def fill(folder: Path, identity: Identity = SAME, text: str = "one") -> Path:
    (folder / "file").write_text(text)
    record = Record(identity=identity, report=replace(REPORT, files={"file": len(text)}))
    (folder / RECORD_FILE).write_bytes(record.to_bytes())
    return folder


def publish(out: Path, identity: Identity = SAME, text: str = "one") -> None:
    with unpublished(out, 10) as folder:
        fill(folder, identity, text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuses(error: type[Exception], *words: str) -> Any:
    """Expect an error that names the option and contains the words in this order."""
    return pytest.raises(error, match="--out=.*" + ".*".join(map(re.escape, words)))


def test_a_directory_appears_complete_and_a_link_to_it_stays(tmp_path: Path) -> None:
    for out in (tmp_path / "empty", tmp_path / "deep/absent"):
        if out.name == "empty":
            out.mkdir()
        assert already_exported(out, SAME, overwrite=False) is None
        with unpublished(out, 10) as folder:
            (folder / "file").write_text("x")
            assert not out.exists() or names(out) == []
            assert folder.parent == out.parent
        assert names(out) == ["file"]
    (tmp_path / "disk/place").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk/place")
    for text in ("one", "two"):
        publish(tmp_path / "out", text=text)
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "disk/place/file").read_text() == text
    assert names(tmp_path) == ["deep", "disk", "empty", "out"] and names(tmp_path / "disk") == ["place"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    for error, raised in ((KeyError(), pytest.raises(KeyError)), (full, refuses(RunError, "No space left on device"))):
        with raised, unpublished(tmp_path / "out", 10) as folder:
            (folder / "file").write_text("x")
            raise error
        assert names(tmp_path) == []


def is_published(out: Path) -> bool:
    try:
        publish(out)
    except RunError:
        return False
    return True


def start(out: Path) -> subprocess.Popen[str]:
    code = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from ray_ulysses.export.directory import unpublished
        with unpublished(Path({str(out)!r}), 10) as folder:
            (folder / "file").write_text("half")
            print("writing", flush=True)
            time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_live_export_is_not_disturbed_and_a_killed_one_is_cleaned(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(out)
    try:
        with refuses(RunError, "another process is exporting to this directory"):
            publish(out)
        assert len(names(tmp_path)) == 1
    finally:
        process.kill()
        process.wait(timeout=20)
    assert not out.exists()
    assert names(tmp_path)[0].startswith(".out.exporting-")
    wait_until(lambda: is_published(out), "the killed export's lock is free", timeout_s=10.0)
    assert names(tmp_path) == ["out"]
    assert names(out) == ["file", RECORD_FILE]


def test_an_identical_export_is_recognized_unless_a_file_changed(tmp_path: Path) -> None:
    publish(tmp_path / "out")
    found = already_exported(tmp_path / "out", SAME, overwrite=False)
    assert found is not None and found.identity == SAME
    assert already_exported(tmp_path / "out", SAME, overwrite=True) is None
    # An unchecked export does not replace a checked one.
    unchecked = replace(SAME, checked=False)
    assert unchecked.differences(SAME) == [] and len(SAME.differences(unchecked)) == 1
    (tmp_path / "out/file").write_text("shorter or longer")
    with pytest.raises(UserError, match="file has changed or is missing"):
        already_exported(tmp_path / "out", SAME, overwrite=False)


def test_another_export_is_replaced_only_on_request(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out)
    for change, said in (
        ({"manifest": "cc"}, "its checkpoint is different"),
        ({"max_shard_bytes": 6, "tokenizer": "x"}, "its --max-shard-size is 5 B; its tokenizer is different"),
        ({"weights": "fp32"}, "its weights have --dtype model"),
    ):
        other = replace(SAME, **change)  # type: ignore[arg-type]
        with refuses(UserError, said, "--overwrite"):
            already_exported(out, other, overwrite=False)
        assert already_exported(out, other, overwrite=True) is None
    publish(out, other, "two")
    assert (out / "file").read_text() == "two"
    assert names(tmp_path) == ["out"]


def test_files_that_are_not_an_export_are_never_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    for place in (other, other / "thesis.tex"):
        for overwrite in (False, True):
            with refuses(UserError):
                already_exported(place, SAME, overwrite=overwrite)
    # Every user, including root, is refused a name that is too long.
    with refuses(RunError, "File name too long"):
        already_exported(tmp_path / ("x" * 300), SAME, overwrite=False)
    out = tmp_path / "out"
    publish(out)
    (out / "my_eval_results.txt").write_text("hours of work")
    (out / "nested").mkdir()
    # Nothing is written, so nothing is deleted.
    assert already_exported(out, SAME, overwrite=False) is not None
    with refuses(UserError, "my_eval_results.txt, nested"):
        already_exported(out, SAME, overwrite=True)


def test_files_that_appear_during_an_export_are_not_deleted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out)
    with refuses(RunError, "notes.txt"), unpublished(out, 10):
        (out / "notes.txt").write_text("x")
    assert names(out) == ["file", "notes.txt", RECORD_FILE]
    new = tmp_path / "new"
    new.mkdir()
    with refuses(RunError), unpublished(new, 10):
        (new / "thesis.tex").write_text("x")
    assert names(new) == ["thesis.tex"]
    assert names(tmp_path) == ["new", "out"]


@pytest.mark.parametrize("place", ["", "checkpoints/step-00000008", "export", "exports/a"])
def test_nothing_is_published_among_a_runs_own_files(tmp_path: Path, place: str) -> None:
    run, link = tmp_path / "run", tmp_path / "link"
    (run / "checkpoints").mkdir(parents=True)
    link.symlink_to(run)
    for given in (run, link):
        with refuses(UserError, str(run), f"{run}/export"):
            refuse_place(given / place, [run], run / "export")
    for out in (run / "export/step-00000008", run / "export/a/b", tmp_path / "runs", tmp_path, tmp_path / "run-hf"):
        refuse_place(out, [run], run / "export")


def test_an_export_is_not_written_through_a_link_in_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "big").mkdir()
    run.mkdir()
    (run / "export").symlink_to(tmp_path / "big")
    (run / "circle").symlink_to(run / "circle")
    for out in (run / "export/step-00000008", run / "circle"):
        with pytest.raises(UserError, match="is a link"):
            refuse_place(out, [run], run / "export")
    (tmp_path / "run-link").symlink_to(run)
    (run / "export").unlink()
    refuse_place(tmp_path / "run-link/export/step-00000008", [run], tmp_path / "run-link/export")


def test_an_export_may_lose_its_folder_to_another_that_begins_or_find_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, leftover, lock_file = tmp_path / "out", tmp_path / ".out.exporting-1", directory.lock_file

    def once_deleted(path: Path, *within: Path) -> int:
        path.parent.rmdir()
        return lock_file(path, *within)

    monkeypatch.setattr(directory, "lock_file", once_deleted)
    with refuses(RunError, "another process is exporting to this directory"):
        publish(out)
    leftover.mkdir()
    directory._sweep(out)
    assert names(tmp_path) == []


def test_a_name_with_brackets_is_locked_and_cleaned_like_any_other(tmp_path: Path) -> None:
    out = tmp_path / "g[1]"
    other = tmp_path / ".g1.exporting-0"
    other.mkdir()
    with unpublished(out, 10) as folder:
        with pytest.raises(RunError, match="another process is exporting to this directory"), unpublished(out, 10):
            pytest.fail("must not begin")
        assert folder.is_dir()
    dead = tmp_path / ".g[1].exporting-dead"
    dead.mkdir()
    publish(out)
    assert names(tmp_path) == [other.name, "g[1]"]


def test_the_reserve_is_small_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_bytes, free, reserve in ((110_000, 1_100_000, "1.05 MB"), (128 * 10**9, 128 * 10**9, "1 GB")):
        space = SimpleNamespace(free=free)
        monkeypatch.setattr(directory.shutil, "disk_usage", lambda path, space=space: space)
        with refuses(RunError, f"a reserve of {reserve}"), unpublished(tmp_path / "out", num_bytes):
            pytest.fail("must not begin")
        space.free = 1.01 * free + 2**20
        with unpublished(tmp_path / "out", num_bytes):
            pass


def with_fields(folder: Path, fields: Any) -> Path:
    (folder / RECORD_FILE).write_text(json.dumps(fields))
    return folder


def test_a_complete_record_is_read_and_another_is_ignored(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    for report in (REPORT, replace(REPORT, check=None, max_positions=2048, seconds=1.5)):
        record = Record(identity=SAME, report=report)
        (tmp_path / RECORD_FILE).write_bytes(record.to_bytes())
        assert read_record(tmp_path) == record
    fields = asdict(Record(identity=SAME, report=REPORT))
    fields["report"] |= {"carbon": 1.0}
    fields["report"]["check"] |= {"device": "cpu"}
    assert read_record(with_fields(tmp_path, fields)) == Record(identity=SAME, report=REPORT), "a newer report"
    (tmp_path / RECORD_FILE).write_bytes(record.to_bytes()[:-20])
    assert read_record(tmp_path) is None
    for other in ([], {}, {"report": {"step": 4}}):
        assert read_record(with_fields(tmp_path, other)) is None


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("identity", {"adapter": "x"}),
        ("identity", {"max_shard_bytes": "5"}),
        ("identity", None),
        ("report", {"step": True}),
        ("report", {"check": {"tokens": 8}}),
        ("report", {"files": {"file": "3"}}),
    ],
)
def test_a_record_with_a_field_of_another_type_is_ignored(tmp_path: Path, place: str, value: Any) -> None:
    fields = asdict(Record(identity=SAME, report=REPORT))
    fields[place] = value if value is None else fields[place] | value
    assert read_record(with_fields(tmp_path, fields)) is None


@pytest.fixture
def published(s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectLocation:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    place = place_of(s3.uri(prefix)) / "export/step-00000020"
    assert isinstance(place, ObjectLocation)
    return place


def make(published: ObjectLocation, identity: Identity = SAME, text: str = "one") -> Path:
    folder = staging_folder(published)
    folder.mkdir(parents=True, exist_ok=True)
    return fill(folder, identity, text)


def there(published: ObjectLocation) -> dict[str, bytes]:
    store = open_store(published.parent)
    return {key.rpartition("/")[2]: store.read_whole(key) for key in store.list(published.name)}


def test_an_upload_is_recognized_and_replaced_only_on_request(published: ObjectLocation) -> None:
    assert already_exported(published, SAME, overwrite=False) is None
    folder = make(published)
    upload(folder, published)
    assert not folder.exists() and there(published)["file"] == b"one"
    found = already_exported(published, SAME, overwrite=False)
    assert found is not None and found.identity == SAME
    with pytest.raises(UserError, match="--overwrite"):
        already_exported(published, OTHER, overwrite=False)
    assert already_exported(published, OTHER, overwrite=True) is None
    open_store(published).replace("more", [b"of another version"])
    upload(make(published, OTHER, "two"), published)
    assert {name: content for name, content in there(published).items() if name != RECORD_FILE} == {"file": b"two"}
    open_store(published).replace("file", [b"damaged"])
    with pytest.raises(UserError, match="file has changed or is missing"):
        already_exported(published, OTHER, overwrite=False)


@pytest.mark.parametrize("call", range(1, 12))
def test_an_upload_with_a_failed_request_is_complete_or_has_no_record(
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
        record = already_exported(published, OTHER if found["file"] == b"another" else SAME, overwrite=False)
        assert record is not None, "the record does not match the file"
    if failed:
        upload(folder if folder.exists() else make(published, OTHER, "another"), published)
    assert already_exported(published, OTHER, overwrite=False) is not None
    assert there(published)["file"] == b"another"
