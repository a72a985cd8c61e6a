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

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import Claim, LocalStore, current_owner, run_claim
from ray_ulysses.storage.claim import LOCK_FOLDER
from ray_ulysses.storage.location import ObjectLocation
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
        assert holder.stdout is not None
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


def test_a_process_that_was_killed_and_not_waited_for_is_dead(tmp_path: Path) -> None:
    with _holder(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        state = Path(f"/proc/{holder.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", "it is a zombie")
        # Where it was moved, too.
        run_dir = tmp_path.rename(tmp_path.with_name("moved"))
        assert _take(run_dir).taken_over_from is not None


def test_a_process_that_got_the_holder_s_number_is_another(tmp_path: Path) -> None:
    _take(tmp_path)
    path = tmp_path / HOLDER_FILE
    note = json.loads(path.read_text())
    path.write_text(json.dumps({**note, "started": "1"}))
    assert current_owner(tmp_path, clock=_NoSleep()) is None
    assert _take(tmp_path).taken_over_from is not None


def test_the_copy_of_a_run_that_is_being_trained_is_free_after_the_lease(tmp_path: Path) -> None:
    with run_claim(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        assert current_owner(tmp_path / "copy", clock=ManualClock()) is None
        clock = ManualClock()
        claim = Claim(LocalStore(tmp_path / "copy"), run="copy", clock=clock)
        claim.acquire(beat_in_background=False)
        assert clock.time < 40


def test_a_holder_of_another_machine_is_watched_or_long_dead(s3: S3Server, prefix: str) -> None:
    place = place_of(s3.uri(prefix))
    assert isinstance(place, ObjectLocation)
    store = open_store(place)
    claim = Claim(store, run="run", machine="")
    claim.acquire(beat_in_background=False)
    written = store.modified_at(HOLDER_FILE) - ManualClock().now()
    assert current_owner(place, clock=_NoSleep(written + 3600.0)) is None
    lately = ManualClock(written + 60.0)
    assert current_owner(place, clock=lately) is None
    assert 14.9 < lately.time - written - 60.0 < 17

    class _Beating(ManualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            claim.beat()

    owner = current_owner(place, clock=_Beating(written + 60.0))
    assert owner is not None and owner.pid == os.getpid()
    claim.release()
    assert current_owner(place, clock=_NoSleep(written + 60.0)) is None


@pytest.mark.parametrize("why", ["a file", "a full disk"])
def test_a_storage_that_can_not_be_used_is_refused_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "a file":
        (tmp_path / "demo").write_text("")
    else:
        monkeypatch.setattr("ray_ulysses.storage.local.write_all", _raise_disk_full)
    with pytest.raises(UserError, match=r"^run\.storage: .*(Not a directory|No space left on device)"):
        _take(tmp_path / "demo")
    if why == "a full disk":
        monkeypatch.undo()
        assert _take(tmp_path / "demo").held


def _raise_disk_full(*_: object) -> None:
    raise disk_full()


def test_an_object_store_that_is_away_is_said_with_its_setting(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(s3.uri(prefix))
    monkeypatch.setattr("ray_ulysses.storage.claim._RETRY_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = place_of(str(place).partition("?")[0])
    with pytest.raises(UserError, match=r"run\.storage"):
        run_claim(away).acquire()


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


@pytest.mark.parametrize("wrong", [{"since": 1e300}, {"pid": -1}, {"pid": 2**62}])
def test_a_damaged_note_names_nobody_and_stops_nobody_for_ever(tmp_path: Path, wrong: dict[str, object]) -> None:
    _take(tmp_path)
    path = tmp_path / HOLDER_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    clock = ManualClock()
    claim = Claim(LocalStore(tmp_path), run="run", clock=clock)
    claim.acquire(beat_in_background=False)
    assert clock.time < 40 and (claim.taken_over_from is None or claim.taken_over_from.host == socket.gethostname())
