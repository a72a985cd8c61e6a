"""The progress and the diagnostics of a hang that a child shares with its supervisor in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.elastic.hang import RankProgress
from ray_ulysses.supervision.order import STACKS_SIGNAL
from ray_ulysses.supervision.shared_progress import SharedProgress, read_dump
from tests.polling import wait_until


def progress(shared: SharedProgress, idle_since: float) -> RankProgress:
    return shared.progress(0, idle_since=idle_since, state="R")


def test_both_sides_see_what_the_other_has_written() -> None:
    supervisor = SharedProgress.create()
    child = SharedProgress(os.dup(supervisor.descriptor))
    before = time.monotonic() - 60.0
    assert progress(supervisor, before).idle_s >= 60.0, "since it was asked for"
    child.beat("start", 0)
    for _ in range(3):
        child.beat("step", 7)
    first = progress(supervisor, before)
    assert (first.step, first.phase, first.micro_batch, first.steps) == (7, "step", 2, 0)
    assert first.idle_s < 60.0
    child.beat("step", 8)
    second = progress(supervisor, before)
    assert (second.step, second.micro_batch, second.steps) == (8, 0, 1) and second.step_s > 0, "step 7 is done"
    child.wait_for_row(True)
    assert progress(supervisor, before).waits_for_row
    child.wait_for_row(False)
    assert not progress(supervisor, before).waits_for_row
    child.beat("evaluation", 8)
    child.beat("save", 8)
    assert progress(supervisor, before).steps == 2, "each step counts once, whatever follows it"
    assert child.notice() is None
    for notice in (Notice(deadline=1700000000.5), Notice(), None):
        supervisor.set_notice(notice)
        assert child.notice() == notice
    supervisor.close()
    child.beat("save", 8)
    child.close()


_CHILD = """
import ctypes, os, sys, threading
from ray_ulysses.supervision.shared_progress import HangDump
dump = HangDump(int(sys.argv[1]))
if sys.argv[2]:
    dump.on_hang(lambda: sys.argv[2] + threading.current_thread().name)
never, _ = os.pipe()
def hangs_in_c():
    print("ready", flush=True)
    ctypes.CDLL(None).read(never, ctypes.create_string_buffer(1), 1)
hangs_in_c()
"""


def dumps_of(left: str, times: int) -> list[tuple[str, str | None]]:
    """Return what a child leaves each time when it is asked."""
    stacks, found = os.memfd_create("stacks", os.MFD_CLOEXEC), []
    command = [sys.executable, "-c", _CHILD, str(stacks), left]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[stacks]) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            for _ in range(times):
                os.ftruncate(stacks, 0)
                os.lseek(stacks, 0, os.SEEK_SET)
                assert read_dump(stacks, 1 << 16) == ("", None)
                child.send_signal(STACKS_SIGNAL)
                wait_until(lambda: read_dump(stacks, 1 << 16)[1] is not None, "the dump is whole")
                found.append(read_dump(stacks, 1 << 16))
            assert child.poll() is None
        finally:
            child.send_signal(signal.SIGKILL)
            os.close(stacks)
    return found


@pytest.mark.parametrize("folder", ["diagnostics/a-by-", ""], ids=["left", "nothing to leave yet"])
def test_a_thread_that_hangs_in_c_shows_its_stack_and_another_leaves_the_rest(folder: str) -> None:
    for text, left in dumps_of(folder, times=2):
        assert "in hangs_in_c" in text
        assert left == ("diagnostics/a-by-hang-dump" if folder else "")


def test_long_stacks_are_cut_and_what_is_left_is_found_behind_them() -> None:
    stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
    os.write(stacks, b"x" * 100_000 + b"\nleft: diagnostics/b\n")
    assert read_dump(stacks, 10) == ("x" * 10, "diagnostics/b")
    os.close(stacks)
