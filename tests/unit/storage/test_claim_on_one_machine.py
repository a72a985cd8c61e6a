"""The claim where the newcomer sees the holder's process: a live one is named at once, a dead one's is free at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import Claim, LocalStore, current_owner, run_claim
from ray_ulysses.storage.claim import LOCK_FOLDER
from ray_ulysses.storage.place import open_store, place_of
from tests.polling import wait_until
from tests.s3_server import S3Server
from tests.stores import disk_full
from tests.unit.storage.test_claim import ManualClock

HOLDER_FILE = f"{LOCK_FOLDER}/holder-0000001.json"
_HOLDER = """
import subprocess, sys, time
from ray_ulysses.storage import run_claim
from ray_ulysses.storage.place import open_store, place_of
run_claim(place_of(sys.argv[1])).acquire()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


class _NoSleep(ManualClock):
    """The clock of a process that waits for nothing."""

    def sleep(self, seconds: float) -> None:
        raise AssertionError("it waits")


@contextmanager
def _holder(location: Path | str) -> Iterator[subprocess.Popen[str]]:
    """Hold a run in a process with a child, which outlives it."""
    command = [sys.executable, "-c", _HOLDER, str(location)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            yield holder
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def _take(run_dir: Path) -> Claim:
    claim = Claim(LocalStore(run_dir), run=run_dir.name, setting="run.storage", clock=_NoSleep())
    claim.acquire(beat_in_background=False)
    return claim


def test_a_run_in_either_place_is_held_by_one_while_it_lives_and_free_once_it_was_killed(location: str) -> None:
    place = place_of(location) / "run"
    assert current_owner(place) is None and not open_store(place).list("lock")
    with _holder(str(place)) as holder:
        named = rf"run.name='run' is already running: run.storage is in use by process {holder.pid} on host "
        with pytest.raises(UserError, match=named):
            run_claim(place).acquire()
        owner = current_owner(place, clock=_NoSleep())
        assert owner is not None and owner.pid == holder.pid
        # One that is stopped may go on.
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match=named):
            run_claim(place).acquire()
        holder.kill()
        holder.wait(timeout=10)
        assert current_owner(place, clock=_NoSleep()) is None
        with run_claim(place) as claim:
            assert claim.taken_over_from is not None and claim.taken_over_from.pid == holder.pid
    assert current_owner(place) is None


def test_a_zombie_is_dead_also_if_its_run_was_moved(tmp_path: Path) -> None:
    with _holder(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        state = Path(f"/proc/{holder.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", "it is a zombie")
        assert _take(tmp_path.rename(tmp_path.with_name("moved"))).taken_over_from is not None


def test_the_copy_of_a_run_that_is_being_trained_is_free_after_the_lease(tmp_path: Path) -> None:
    with run_claim(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert current_owner(tmp_path / "copy", clock=ManualClock()) is None
        clock = ManualClock()
        Claim(LocalStore(tmp_path / "copy"), run="copy", clock=clock).acquire(beat_in_background=False)
        assert clock.time < 40


@pytest.mark.parametrize("wrong", [{"started": "1"}, {"since": 1e300}, {"pid": -1}, {"pid": 2**62}])
def test_a_reused_pid_or_a_damaged_note_blocks_nobody_forever(tmp_path: Path, wrong: dict[str, object]) -> None:
    _take(tmp_path)
    path, is_reused = tmp_path / HOLDER_FILE, "started" in wrong
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    if is_reused:
        assert current_owner(tmp_path, clock=_NoSleep()) is None
    clock: ManualClock = _NoSleep() if is_reused else ManualClock()
    claim = Claim(LocalStore(tmp_path), run="run", clock=clock)
    claim.acquire(beat_in_background=False)
    assert clock.time < 40 and (claim.taken_over_from is None or claim.taken_over_from.host == socket.gethostname())
    assert claim.taken_over_from is not None or not is_reused


def test_a_holder_of_another_machine_is_watched_or_long_dead(s3: S3Server, prefix: str) -> None:
    place = place_of(s3.uri(prefix))
    store = open_store(place)
    claim = Claim(store, run="run", machine="")
    claim.acquire(beat_in_background=False)
    written = store.modified_at(HOLDER_FILE) - ManualClock().now()
    assert current_owner(place, clock=_NoSleep(written + 3600.0)) is None
    lately, beating = ManualClock(written + 60.0), ManualClock(written + 60.0)
    assert current_owner(place, clock=lately) is None
    assert 14.9 < lately.time - written - 60.0 < 17
    beating.at(written + 61.0, claim.beat)
    owner = current_owner(place, clock=beating)
    assert owner is not None and owner.pid == os.getpid()
    claim.release()
    assert current_owner(place, clock=_NoSleep(written + 60.0)) is None


@pytest.mark.usefixtures("s3")
def test_an_unusable_storage_is_refused_by_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^run\.storage: .*Not a directory"):
        _take(tmp_path / "file")
    with monkeypatch.context() as full:
        full.setattr("ray_ulysses.storage.local.write_all", Mock(side_effect=disk_full()))
        with pytest.raises(UserError, match=r"^run\.storage: .*No space left on device"):
            _take(tmp_path / "demo")
    assert _take(tmp_path / "demo").held
    monkeypatch.setattr("ray_ulysses.storage.claim._RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^run\.storage: "):
        run_claim(place_of("s3://bucket/run")).acquire()


def test_a_run_directory_that_is_away_is_not_lost_and_not_made_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    clock = ManualClock()
    claim = Claim(LocalStore(run_dir), run="run", clock=clock)
    claim.acquire(beat_in_background=False)
    run_dir.rename(tmp_path / "away")
    for _ in range(10):
        clock.sleep(5.0)
        with pytest.raises(FileNotFoundError):
            claim.beat()
    assert claim.problem is None and not run_dir.exists()
    (tmp_path / "away").rename(run_dir)
    claim.beat()
    assert claim.held
    shutil.rmtree(run_dir)
    claim.release()
    assert not run_dir.exists()


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_holder_s_file_that_is_no_plain_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / LOCK_FOLDER).mkdir()
    (tmp_path / "canary").write_text("stays")
    if kind == "a link":
        (tmp_path / HOLDER_FILE).symlink_to(tmp_path / "canary")
    else:
        os.mkfifo(tmp_path / HOLDER_FILE)
    for ask in (current_owner, lambda place: run_claim(place).acquire()):
        with pytest.raises(UserError, match=rf"{HOLDER_FILE}(:)? is {kind}"):
            ask(tmp_path)
    assert (tmp_path / "canary").read_text() == "stays"
