"""A stop ends a command that has nothing to save at once, and one that has after it was saved."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ray_ulysses.cluster import signals as module
from ray_ulysses.cluster.signals import StopSignals
from ray_ulysses.run.requests import clear_stop, stop_requested
from ray_ulysses.run_names import SAVE_FILE
from ray_ulysses.tracking.journal import AttemptJournal, claim_journal
from tests.unit.tracking.journals import STARTED

STARTED = {
    "event": "attempt_started", **STARTED, "world_size": 1, "sp_size": 1, "dp_size": 1, "nodes": (), "resumed_step": 0,
    "resumed_from": None,
}  # fmt: skip
STEP = {"event": "step", "step": 1, "loss": 1.0, "tokens": 1, "rows": (0, 1), "digest": "0" * 16, "seconds": 1.0}
STOP = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def say(journal: AttemptJournal, *records: dict[str, object]) -> None:
    for record in records:
        journal.append(record)


def received(number: signal.Signals) -> None:
    """Send this process a signal, and let it arrive."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """Let a SIGHUP arrive, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The times that this process was told to end, whatever it is doing."""
    told: list[bool] = []
    monkeypatch.setattr(module, "_end_in_time", lambda: told.append(True))
    return told


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("number", STOP)
def test_before_the_workers_start_a_stop_ends_the_command_where_it_is(
    number: signal.Signals, tmp_path: Path, console: Console
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopSignals(tmp_path, "one", console):
        received(number)
    assert shown(console) == f"{number.name}: there is no step to save yet; stopping now\n"
    assert signal.getsignal(number) == before


LOST = {
    "event": "attempt_ended", "reason": "lost", "restarts": True, "memory_step": 1, "committed_step": 0,
}  # fmt: skip
NEXT = {"event": "next attempt"}
NOTHING_TO_SAVE: dict[str, tuple[dict[str, object], ...]] = {
    "no attempt yet": (),
    "started": (STARTED,),
    "failed": (STARTED, STEP, {"event": "attempt_ended", "reason": "failed: RuntimeError: lost"}),
    "started again": (STARTED, STEP, NEXT, STARTED),
    "failed for good": (STARTED, STEP, LOST | {"restarts": False}),
    "nothing in peer memory": (STARTED, STEP, LOST | {"memory_step": None}),
    "committed": (STARTED, STEP, LOST | {"committed_step": 1}),
    "started again without peer memory": (STARTED, STEP, LOST, NEXT, STARTED),
}


def write(folder: Path, records: tuple[dict[str, object], ...]) -> None:
    journal = claim_journal(folder)
    for record in records:
        if record is NEXT:
            journal = claim_journal(folder)
        else:
            say(journal, record)


@pytest.mark.parametrize("records", NOTHING_TO_SAVE.values(), ids=NOTHING_TO_SAVE)
def test_a_stop_ends_a_command_that_has_no_step_to_save(
    records: tuple[dict[str, object], ...], tmp_path: Path, console: Console
) -> None:
    with StopSignals(tmp_path, "one", console) as signals:
        signals.workers_start()
        write(tmp_path, records)
        signals.check(workers_are_whole=True)
        received(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=True)
    assert "there is no step to save yet; stopping now" in shown(console)


def test_steps_of_an_earlier_command_and_of_the_time_after_the_stop_do_not_delay_it(
    tmp_path: Path, console: Console
) -> None:
    journal = claim_journal(tmp_path)
    with StopSignals(tmp_path, "one", console) as signals:
        say(journal, STARTED, STEP)
        signals.workers_start()
        journal = claim_journal(tmp_path)
        say(journal, STARTED)
        signals.check(workers_are_whole=True)
        received(signal.SIGTERM)
        say(journal, STEP)
        with pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=True)
    assert stop_requested(tmp_path, "one") is None


@pytest.mark.parametrize("number", STOP)
def test_a_step_is_saved_before_the_command_ends(
    number: signal.Signals, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = claim_journal(tmp_path)
    with StopSignals(tmp_path, "one", console) as signals:
        signals.workers_start()
        say(journal, STARTED, STEP)
        signals.check(workers_are_whole=True)
        received(number)
        signals.check(workers_are_whole=True)
        assert stop_requested(tmp_path, "one") == "stop"
        # Workers that were to change their number have taken it for theirs, and removed it.
        clear_stop(tmp_path)
        monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.0)
        signals.check(workers_are_whole=True)
        assert stop_requested(tmp_path, "one") == "stop"
        # It is saved; the workers end, one after another.
        say(journal, {"event": "attempt_ended", "reason": "stopped"})
        signals.check(workers_are_whole=True)
        signals.check(workers_are_whole=False)
    assert shown(console).startswith(f"{number.name}: saving after this step, then stopping")


@pytest.mark.parametrize("again", [(), (NEXT, STARTED | {"resumed_step": 1})], ids=["failed", "started-again"])
def test_steps_that_peer_memory_alone_holds_are_saved_before_the_command_ends(
    again: tuple[dict[str, object], ...], tmp_path: Path, console: Console
) -> None:
    with StopSignals(tmp_path, "one", console) as signals:
        signals.workers_start()
        write(tmp_path, (STARTED, STEP, LOST, *again))
        signals.check(workers_are_whole=False)
        received(signal.SIGTERM)
        assert stop_requested(tmp_path, "one") == "stop"
        signals.check(workers_are_whole=False)
    assert "SIGTERM: saving after the next step, then stopping" in shown(console)


@pytest.mark.parametrize("memory_step", [1, None])
def test_steps_in_peer_memory_are_saved_if_the_stop_comes_while_the_command_connects_to_ray_again(
    tmp_path: Path, console: Console, memory_step: int | None
) -> None:
    journal = claim_journal(tmp_path)
    with StopSignals(tmp_path, "one", console) as signals:
        signals.workers_start()
        say(journal, STARTED, STEP)
        signals.check(workers_are_whole=True)
        say(journal, LOST | {"memory_step": memory_step})
        # Ray has ended; the command starts everything again.
        received(signal.SIGTERM)
        signals.workers_start()
        with contextlib.nullcontext() if memory_step else pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=True)
        assert stop_requested(tmp_path, "one") == "stop"


def test_a_stop_does_not_wait_for_workers_of_which_one_is_lost(tmp_path: Path, console: Console) -> None:
    with StopSignals(tmp_path, "one", console) as signals:
        signals.workers_start()
        write(tmp_path, (STARTED, STEP))
        signals.check(workers_are_whole=True)
        received(signal.SIGTERM)
        signals.check(workers_are_whole=True)
        with pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=False)


def test_two_signals_that_close_together_are_one_and_a_later_one_ends_at_once(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch, ends: list[bool]
) -> None:
    with StopSignals(tmp_path, "one", console) as signals:
        signals.workers_start()
        write(tmp_path, (STARTED, STEP))
        signals.check(workers_are_whole=True)
        received(signal.SIGTERM)
        received(signal.SIGTERM)
        assert not ends
        monkeypatch.setattr(module, "_SAME_REQUEST_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            received(signal.SIGINT)
        assert ends, "whatever the interrupt meets on its way out"


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path, console: Console) -> None:
    # The fixture restores it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals(tmp_path, "one", console):
        received(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert shown(console) == ""


def test_a_request_to_save_never_ends_the_command(tmp_path: Path, console: Console) -> None:
    with StopSignals(tmp_path / "run", "one", console) as signals:
        # Before there is a directory, too, where the signal itself would end the process.
        received(signal.SIGUSR1)
        assert "the request to save could not be written" in shown(console)
        (tmp_path / "run").mkdir()
        signals.workers_start()
        received(signal.SIGUSR1)
        assert (tmp_path / "run" / SAVE_FILE).exists()
        signals.check(workers_are_whole=False)


def test_a_start_that_swallows_the_interrupt_ends_in_time_all_the_same(tmp_path: Path) -> None:
    script = """
import contextlib, os, signal, sys, time
from pathlib import Path
from rich.console import Console
from ray_ulysses.cluster.signals import StopSignals
with StopSignals(Path(sys.argv[1]), "one", Console()):
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    time.sleep(100)
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=90, check=False)
    assert done.returncode == 130
    assert time.monotonic() - started < 60
