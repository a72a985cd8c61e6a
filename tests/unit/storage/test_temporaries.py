"""The sweep takes what dead writers left, and never what a live one, however slow, still writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ray_ulysses.storage import LocalStore, sweep_temporaries
from ray_ulysses.storage.atomic import TEMPORARY_PREFIX

_WRITER = """
import sys
from ray_ulysses.storage import LocalStore
def chunks():
    yield b"half"
    print("writing", flush=True)
    sys.stdin.readline()
    yield b"whole"
LocalStore(sys.argv[1]).create("a/b/key", chunks())
print("written", flush=True)
"""


def _start_writer(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, str(root)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    return writer


def _make_old(root: Path) -> list[Path]:
    """Let every temporary file look untouched for a week."""
    found = sorted(root.rglob(f"{TEMPORARY_PREFIX}*"))
    for path in found:
        os.utime(path, (time.time() - 7 * 86400,) * 2)
    return found


def test_a_live_writer_s_file_stays_however_old(tmp_path: Path) -> None:
    writer = _start_writer(tmp_path)
    try:
        assert len(_make_old(tmp_path)) == 1
        writer.send_signal(signal.SIGSTOP)
        assert sweep_temporaries(tmp_path) == ()
        writer.send_signal(signal.SIGCONT)
        assert writer.communicate("\n", timeout=20)[0] == "written\n"
    finally:
        writer.kill()
        writer.wait(timeout=10)
    assert LocalStore(tmp_path).list("a") == ["a/b/key"]
    assert list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*")) == []


def test_a_killed_writer_s_file_goes_once_it_has_settled(tmp_path: Path) -> None:
    writer = _start_writer(tmp_path)
    writer.kill()
    writer.communicate(timeout=10)
    assert sweep_temporaries(tmp_path) == ()
    left = _make_old(tmp_path)
    assert len(left) == 1
    assert sweep_temporaries(tmp_path) == tuple(left)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_files_that_were_written_are_none_of_its_business(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a/key", [b"1"])
    store.replace("a/other", [b"2"])
    (tmp_path / f"{TEMPORARY_PREFIX}link").symlink_to(tmp_path / "a" / "key")
    assert sweep_temporaries(tmp_path, settle_s=-1.0) == ()
    assert store.list("a") == ["a/key", "a/other"]
    assert sweep_temporaries(tmp_path / "absent") == ()
