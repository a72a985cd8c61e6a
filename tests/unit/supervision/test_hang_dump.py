"""A child whose main thread runs no Python still gives its stacks, and what its attempt leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ray_ulysses.supervision.order import STACKS_SIGNAL
from ray_ulysses.supervision.shared_progress import read_dump
from tests.polling import wait_until

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


def test_a_thread_that_hangs_in_c_shows_its_stack_and_another_leaves_the_rest() -> None:
    for text, left in dumps_of("diagnostics/a-by-", times=2):
        assert "in hangs_in_c" in text
        assert left == "diagnostics/a-by-hang-dump"


def test_an_attempt_that_has_nothing_to_leave_yet_is_not_waited_for() -> None:
    ((text, left),) = dumps_of("", times=1)
    assert "in hangs_in_c" in text and left == ""


def test_long_stacks_are_cut_and_what_is_left_is_found_behind_them() -> None:
    stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
    os.write(stacks, b"x" * 100_000 + b"\nleft: diagnostics/b\n")
    assert read_dump(stacks, 10) == ("x" * 10, "diagnostics/b")
    os.close(stacks)
