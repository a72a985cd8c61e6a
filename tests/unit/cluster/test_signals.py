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
Records = tuple[dict[str, object], ...]
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
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Ending]:
    """The times that this process was told to end, whatever it is doing, and that were not taken back."""
    told: list[Ending] = []
    monkeypatch.setattr(module, "_end_in_time", lambda: Ending(told))
    return told


class Ending:
    def __init__(self, told: list[Ending]) -> None:
        self.told = told
        told.append(self)

    def cancel(self) -> None:
        self.told.remove(self)


class Command:
    """A command with a journal, whose signals are handled within a block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.console = folder, Console(file=io.StringIO(), width=200)

    def signals(self) -> StopSignals:
        return StopSignals(self.folder, "one", self.console)

    def write(self, *records: dict[str, object]) -> AttemptJournal:
        journal = claim_journal(self.folder)
        for record in records:
            if record is NEXT:
                journal = claim_journal(self.folder)
            else:
                say(journal, record)
        return journal

    @contextlib.contextmanager
    def training(self, *records: dict[str, object], whole: bool = True) -> Iterator[StopSignals]:
        """Start workers, which write these records, and look at them once."""
        with self.signals() as signals:
            signals.workers_start()
            self.write(*records)
            signals.check(workers_are_whole=whole)
            yield signals

    @property
    def shown(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()

    @property
    def requested(self) -> str | None:
        return stop_requested(self.folder, "one")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


LOST = {
    "event": "attempt_ended", "reason": "lost", "restarts": True, "memory_step": 1, "committed_step": 0,
}  # fmt: skip
NEXT: dict[str, object] = {"event": "the next attempt's journal"}
NOTHING_TO_SAVE: dict[str, Records] = {
    "no attempt yet": (),
    "started": (STARTED,),
    "failed": (STARTED, STEP, {"event": "attempt_ended", "reason": "failed: RuntimeError: lost"}),
    "started again": (STARTED, STEP, NEXT, STARTED),
    "failed for good": (STARTED, STEP, LOST | {"restarts": False}),
    "nothing in peer memory": (STARTED, STEP, LOST | {"memory_step": None}),
    "committed": (STARTED, STEP, LOST | {"committed_step": 1}),
    "started again without peer memory": (STARTED, STEP, LOST, NEXT, STARTED),
}


@pytest.mark.parametrize("number", STOP)
def test_before_the_workers_start_a_stop_ends_the_command_where_it_is(number: signal.Signals, command: Command) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), command.signals():
        received(number)
    assert command.shown == f"{number.name}: there is no step to save yet; stopping now\n"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("records", NOTHING_TO_SAVE.values(), ids=NOTHING_TO_SAVE)
def test_a_stop_ends_a_command_without_a_step(records: Records, command: Command) -> None:
    with command.training(*records) as signals:
        received(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=True)
    assert "there is no step to save yet; stopping now" in command.shown


def test_steps_of_an_earlier_command_and_of_the_time_after_the_stop_do_not_delay_it(command: Command) -> None:
    with command.signals() as signals:
        command.write(STARTED, STEP)
        signals.workers_start()
        journal = command.write(STARTED)
        signals.check(workers_are_whole=True)
        received(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=True)
        say(journal, STEP)
        with pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=True)
    assert command.requested is None


def test_a_step_that_ended_since_the_last_look_is_saved(command: Command, ends: list[Ending]) -> None:
    with command.signals() as signals:
        signals.workers_start()
        journal = command.write(STARTED)
        signals.check(workers_are_whole=True)
        say(journal, STEP)
        received(signal.SIGTERM)
        assert len(ends) == 1, "whatever Ray does until the next look"
        assert command.shown == "SIGTERM: stopping\n"
        signals.check(workers_are_whole=True)
        assert command.requested == "stop" and not ends
    assert "\nSIGTERM: saving after this step, then stopping" in command.shown


@pytest.mark.parametrize("number", STOP)
def test_a_step_is_saved_before_the_command_ends(
    number: signal.Signals, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with command.signals() as signals:
        signals.workers_start()
        journal = command.write(STARTED, STEP)
        signals.check(workers_are_whole=True)
        received(number)
        signals.check(workers_are_whole=True)
        assert command.requested == "stop"
        # Workers that were to change their number have taken it for theirs, and removed it.
        clear_stop(command.folder)
        monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.0)
        signals.check(workers_are_whole=True)
        assert command.requested == "stop"
        # It is saved; the workers end, one after another.
        say(journal, {"event": "attempt_ended", "reason": "stopped"})
        signals.check(workers_are_whole=True)
        signals.check(workers_are_whole=False)
    assert command.shown.startswith(f"{number.name}: saving after this step, then stopping")


@pytest.mark.parametrize("again", [(), (NEXT, STARTED | {"resumed_step": 1})], ids=["failed", "started-again"])
def test_steps_in_peer_memory_alone_are_saved_before_the_command_ends(again: Records, command: Command) -> None:
    with command.training(STARTED, STEP, LOST, *again, whole=False) as signals:
        # Ray may have ended; the command then starts everything again.
        received(signal.SIGTERM)
        assert command.requested == "stop"
        signals.workers_start()
        signals.check(workers_are_whole=bool(again))


def test_two_signals_that_close_together_are_one_and_a_later_one_or_a_lost_worker_ends_at_once(
    command: Command, monkeypatch: pytest.MonkeyPatch, ends: list[Ending]
) -> None:
    monkeypatch.setattr(module, "_SAME_REQUEST_S", 3600.0)
    with command.training(STARTED, STEP) as signals:
        received(signal.SIGTERM)
        received(signal.SIGTERM)
        signals.check(workers_are_whole=True)
        assert not ends
        with pytest.raises(KeyboardInterrupt):
            signals.check(workers_are_whole=False)
        monkeypatch.setattr(module, "_SAME_REQUEST_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            received(signal.SIGINT)
        assert len(ends) == 2, "whatever the interrupt meets on its way out"


def test_a_request_to_save_and_an_ignored_hangup_never_end_the_command(command: Command) -> None:
    command.folder /= "run"
    # The fixture restores it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with command.signals() as signals:
        received(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and command.shown == ""
        # Before there is a directory, too, where the signal itself would end the process.
        received(signal.SIGUSR1)
        assert "the save request could not be written" in command.shown
        command.folder.mkdir()
        signals.workers_start()
        received(signal.SIGUSR1)
        assert (command.folder / SAVE_FILE).exists()
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
