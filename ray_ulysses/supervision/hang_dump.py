"""Writes what explains a hang into a file that a child shares with its supervisor, when that asks for it by a signal.

The stacks come first, whatever the threads do. A thread that sees them there then makes what else the attempt leaves,
such as the flight record of its collectives, and adds where that is: a main thread that waits in a collective runs no
Python.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading
import time
from collections.abc import Callable

from ray_ulysses.supervision.order import STACKS_SIGNAL

_LOOK_EVERY_S = 0.1
_LEFT = re.compile(rb"\nleft: (.*)\n$")
_LONGEST_BYTES = 1 << 12


class HangDump:
    """The child's side.

    Args:
        stacks: Descriptor of the file.
    """

    def __init__(self, stacks: int) -> None:
        self._stacks = stacks
        self._leave: Callable[[], str | None] = lambda: None
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        threading.Thread(target=self._serve, name="hang-dump", daemon=True).start()

    def on_hang(self, leave: Callable[[], str | None]) -> None:
        """Make a call in another thread when the ranks hang; it returns where it has left what it wrote."""
        self._leave = leave

    def _serve(self) -> None:
        seen = 0
        while True:
            time.sleep(_LOOK_EVERY_S)
            size = os.fstat(self._stacks).st_size
            # Once the stacks are whole; the supervisor empties the file before it asks again.
            if size and size == seen and read_dump(self._stacks, 0)[1] is None:
                os.write(self._stacks, f"\nleft: {self._leave() or ''}\n".encode())
            seen = size


def read_dump(stacks: int, most_bytes: int) -> tuple[str, str | None]:
    """Return the stacks, and where the rest of the dump is: empty if nowhere, None as long as it is being written.

    Args:
        stacks: Descriptor of the file.
        most_bytes: Longest text of the stacks.
    """
    size = os.fstat(stacks).st_size
    left = _LEFT.search(os.pread(stacks, _LONGEST_BYTES, max(0, size - _LONGEST_BYTES)))
    text = os.pread(stacks, most_bytes, 0).decode(errors="replace")
    return text, None if left is None else left[1].decode(errors="replace")
