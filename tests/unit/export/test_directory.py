"""An export appears whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.directory import RECORD_FILE, Identity, Record, already_exported, unpublished

SAME = Identity(manifest="aa", weights="model", max_shard_bytes=5, tokenizer="bb", checked=True)


def publish(out: Path, identity: Identity = SAME, text: str = "one") -> None:
    with unpublished(out, 10) as folder:
        (folder / "file").write_text(text)
        record = Record(identity=identity, report={"files": {"file": len(text)}})
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
    said = r"the export takes 1e\+06 TB, and .*B are free there; make room or give another directory"
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
        ({"max_shard_bytes": 6, "tokenizer": "x"}, "its files hold up to 5 B; its tokenizer is another one"),
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
        f"--out='{out}': holds something that is no export of ray-ulysses, which is never overwritten; give another "
        "directory, or empty it"
    )
    with pytest.raises(UserError, match="is a file; give a directory"):
        already_exported(out / "thesis.tex", SAME, overwrite=overwrite)
