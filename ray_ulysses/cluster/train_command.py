"""Runs ``ray-ulysses train`` in a process of its own, which can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_CODE = (
    "import sys; from ray_ulysses.supervision.launcher import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "from ray_ulysses.cli import main; main(sys.argv[2:])"
)
"""It ends with the process that started it, whatever happens to that: nobody else would end it."""
_LAST_LINES = 12


class TrainCommand:
    """The command; its output goes to a file.

    Args:
        config: The configuration file.
        log: The file for its output, which is added to.
    """

    def __init__(self, config: Path, log: Path) -> None:
        self.config, self.log = config, log
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def last_lines(self) -> str:
        """The end of its output."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-_LAST_LINES:])

    def start(self) -> None:
        """Start it."""
        self.started_at = time.time()
        with self.log.open("ab") as log:
            # Signals of a terminal are for the process that started it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(os.getpid()), "train", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, timeout_s: float) -> int | None:
        """Ask it to save and to end; return its exit code, or None if it had to be killed."""
        if self.is_running:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return its exit code, or None if it had to be killed after a time."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
