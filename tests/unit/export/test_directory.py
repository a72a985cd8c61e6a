"""An export appears whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export import directory
from ray_ulysses.export.directory import RECORD_FILE, Identity, Record, already_exported, refuse_place, unpublished
from tests.unit.export.runs import IDENTITY as SAME
from tests.unit.export.runs import REPORT


def publish(out: Path, identity: Identity = SAME, text: str = "one") -> None:
    with unpublished(out, 10) as folder:
        (folder / "file").write_text(text)
        record = Record(identity=identity, report=replace(REPORT, files={"file": len(text)}))
        (folder / RECORD_FILE).write_bytes(record.to_bytes())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_directory_is_published_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep/out"
    with unpublished(out, 10) as folder:
        (folder / "file").write_text("x")
        assert not out.exists()
        assert folder.parent == out.parent
    assert names(out) == ["file"]
    assert names(out.parent) == ["out"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert already_exported(tmp_path / "out", SAME, overwrite=False) is None
    publish(tmp_path / "out")
    assert names(tmp_path / "out") == ["file", RECORD_FILE]


def test_what_a_link_leads_to_is_published_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "disk/place").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk/place")
    for text in ("one", "two"):
        publish(tmp_path / "out", text=text)
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "disk/place/file").read_text() == text
        assert names(tmp_path) == ["disk", "out"] and names(tmp_path / "disk") == ["place"]


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path) -> None:
    def export(error: Exception) -> None:
        with unpublished(tmp_path / "out", 10) as folder:
            (folder / "file").write_text("x")
            raise error

    with pytest.raises(KeyError):
        export(KeyError())
    assert names(tmp_path) == []
    with pytest.raises(RunError) as error:
        export(OSError(28, "No space left on device"))
    assert str(error.value) == (
        f"--out='{tmp_path}/out': could not be written (No space left on device); nothing was published. Make room, or "
        "give another directory"
    )
    assert names(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    said = r"takes 1e\+06 TB and a reserve of .*B, but only .*B are free; make room or give another directory"
    with pytest.raises(RunError, match=said), unpublished(tmp_path / "out", 10**18):
        pytest.fail("must not begin")
    assert names(tmp_path) == []


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
        with pytest.raises(RunError, match="another process is exporting to it; wait for it, or stop it"):
            publish(out)
        assert len(names(tmp_path)) == 1
    finally:
        process.kill()
        process.wait(timeout=20)
    assert not out.exists()
    assert names(tmp_path)[0].startswith(".out.exporting-")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            publish(out)
            break
        except RunError:
            time.sleep(0.05)
    assert names(tmp_path) == ["out"]
    assert names(out) == ["file", RECORD_FILE]


def test_the_same_export_is_done_already(tmp_path: Path) -> None:
    publish(tmp_path / "out")
    found = already_exported(tmp_path / "out", SAME, overwrite=False)
    assert found is not None and found.identity == SAME
    assert already_exported(tmp_path / "out", SAME, overwrite=True) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"manifest": "cc"}, "it is of another checkpoint"),
        ({"weights": "fp32"}, "its weights are --dtype model"),
        ({"max_shard_bytes": 6, "tokenizer": "x"}, "its files hold up to 5 B; its tokenizer is different"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_another_export_is_replaced_only_on_request(tmp_path: Path, change: dict[str, object], said: str) -> None:
    out = tmp_path / "out"
    publish(out)
    other = replace(SAME, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError) as error:
        already_exported(out, other, overwrite=False)
    assert str(error.value) == (
        f"--out='{out}': holds another export of ray-ulysses ({said}); add --overwrite to replace it, or give another "
        "directory"
    )
    assert already_exported(out, other, overwrite=True) is None
    publish(out, other, "two")
    assert (out / "file").read_text() == "two"
    assert names(tmp_path) == ["out"]


def test_an_unchecked_export_does_not_stand_for_a_checked_one(tmp_path: Path) -> None:
    unchecked = replace(SAME, checked=False)
    assert unchecked.differences(SAME) == []
    assert SAME.differences(unchecked) == ["it was not checked"]


def test_an_export_that_lost_a_file_is_not_done(tmp_path: Path) -> None:
    publish(tmp_path / "out")
    (tmp_path / "out/file").write_text("shorter or longer")
    with pytest.raises(UserError, match="file is not what was exported"):
        already_exported(tmp_path / "out", SAME, overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_export_is_never_overwritten(tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(UserError) as error:
        already_exported(out, SAME, overwrite=overwrite)
    assert str(error.value) == (
        f"--out='{out}': holds something that is not an export of ray-ulysses, which is never overwritten; give "
        "another directory, or empty it"
    )
    with pytest.raises(UserError, match="is a file; give a directory"):
        already_exported(out / "thesis.tex", SAME, overwrite=overwrite)


def test_overwriting_an_export_spares_what_others_put_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out)
    (out / "my_eval_results.txt").write_text("hours of work")
    (out / "nested").mkdir()
    (out / "nested/k").write_text("x")
    # Nothing is deleted where nothing is to be written.
    assert already_exported(out, SAME, overwrite=False) is not None
    with pytest.raises(UserError) as error:
        already_exported(out, SAME, overwrite=True)
    assert str(error.value) == (
        f"--out='{out}': holds files that were not exported (my_eval_results.txt, nested), which are never "
        "overwritten; move that elsewhere, or give another directory"
    )
    for number in range(3):
        (out / f"a{number}").write_text("x")
    with pytest.raises(UserError, match=r"\(a0, a1, a2 and 2 more\)"):
        already_exported(out, SAME, overwrite=True)


def test_what_others_put_there_while_an_export_is_written_is_spared_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out)
    with pytest.raises(RunError) as error, unpublished(out, 10):
        (out / "notes.txt").write_text("x")
    assert str(error.value) == (
        f"--out='{out}': holds files that were not exported (notes.txt), which are never overwritten; nothing was "
        "published. Give another directory"
    )
    assert names(out) == ["file", "notes.txt", RECORD_FILE]
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(RunError, match="now holds something that is not an export"), unpublished(new, 10):
        (new / "thesis.tex").write_text("x")
    assert names(new) == ["thesis.tex"]
    assert names(tmp_path) == ["new", "out"]


@pytest.mark.parametrize("place", ["", "checkpoints/step-00000008", "export", "exports/a", "plan"])
def test_nothing_is_published_among_a_runs_own_files(tmp_path: Path, place: str) -> None:
    run, link = tmp_path / "run", tmp_path / "link"
    (run / "checkpoints").mkdir(parents=True)
    link.symlink_to(run)
    for given in (run, link):
        with pytest.raises(UserError) as error:
            refuse_place(given / place, [run], run / "export")
        assert str(error.value) == (
            f"--out='{given / place}': is in {run}, where the run keeps and deletes its own files; give a "
            f"directory below {run}/export, or elsewhere"
        )


def test_an_export_may_lie_below_the_runs_folder_of_exports_or_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
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


def test_a_name_with_brackets_is_guarded_and_swept_like_any_other(tmp_path: Path) -> None:
    out = tmp_path / "g[1]"
    other = tmp_path / ".g1.exporting-0"
    other.mkdir()
    with unpublished(out, 10) as folder:
        with pytest.raises(RunError, match="another process is exporting to it"), unpublished(out, 10):
            pytest.fail("must not begin")
        assert folder.is_dir()
    dead = tmp_path / ".g[1].exporting-dead"
    dead.mkdir()
    publish(out)
    assert names(tmp_path) == [other.name, "g[1]"]


@pytest.mark.parametrize(
    ("num_bytes", "free", "reserve"), [(110_000, 1_100_000, "1.05 MB"), (128 * 10**9, 128 * 10**9, "1 GB")]
)
def test_the_reserve_is_small_beside_the_export_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, free: int, reserve: str
) -> None:
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    said = f" and a reserve of {reserve}, but only .* are free"
    with pytest.raises(RunError, match=said), unpublished(tmp_path / "out", num_bytes):
        pytest.fail("must not begin")
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=1.01 * free + 2**20))
    with unpublished(tmp_path / "out", num_bytes):
        pass


def test_a_place_that_can_not_be_looked_into_is_named(tmp_path: Path) -> None:
    # A name too long is refused by every call, to root as well, as a folder without rights is to others.
    out = tmp_path / ("x" * 300)
    with pytest.raises(RunError) as error:
        already_exported(out, SAME, overwrite=False)
    assert str(error.value) == f"--out='{out}': can't be read (File name too long); give another directory"
