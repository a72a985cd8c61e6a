"""A launcher, as its supervisor sees it: a process that takes orders, and whose end kills its child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from typing import Any

from ray_ulysses.supervision.order import pair, receive, send

_MOST_STDERR_BYTES = 1 << 14


class Stderr:
    """What a launcher and its child write to stderr: it goes on to this process's, and its end is kept."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._end = b""

    def fileno(self) -> int:
        """Return the descriptor to read from, for a selector."""
        return self._reading

    def pass_on(self) -> None:
        """Pass on what there is; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._reading, _MOST_STDERR_BYTES):
                self._end = (self._end + content)[-_MOST_STDERR_BYTES:]
                # A log that takes nothing more, as on a full disk, is no reason to end the child.
                with contextlib.suppress(OSError):
                    os.write(2, content)

    def end(self) -> str:
        """Return the end of what was written since the last `forget`."""
        self.pass_on()
        return self._end.decode(errors="replace")

    def forget(self) -> None:
        """Forget what was written until now."""
        self.pass_on()
        self._end = b""

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reading)


class LauncherProcess:
    """Starts a launcher.

    Args:
        module: Module that is executed.
        has_mlflow: Whether it imports MLflow too.

    Attributes:
        is_ready: Whether it has imported everything.
        stderr: Its stderr and its child's.
    """

    def __init__(self, module: str, *, has_mlflow: bool) -> None:
        self._connection, theirs = pair()
        self.stderr = Stderr()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *(["mlflow"] if has_mlflow else [])],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=self.stderr.writing,
            start_new_session=True,
            # It has no connection to Ray, and no use for its token.
            env={name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"},
        )
        theirs.close()
        os.close(self.stderr.writing)
        self.is_ready = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the connection's descriptor, for a selector."""
        return self._connection.fileno()

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send an order; that it is gone is seen when its answer is read."""
        with contextlib.suppress(OSError):
            send(self._connection, message, descriptors)

    def receive(self) -> Any:
        """Return its next message; waits for one.

        Raises:
            EOFError: It is gone.
        """
        while self.fileno() not in wait([self.fileno(), self.stderr.fileno()]):
            # It would be held up once the pipe is full.
            self.stderr.pass_on()
        try:
            return receive(self._connection)[0]
        except OSError as error:
            raise EOFError("the launcher is gone") from error

    def kill(self) -> None:
        """Kill it, and its child with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, within_s: float) -> int:
        """Kill it, wait for its end, and return its exit code."""
        self.kill()
        self._connection.close()
        self.stderr.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return -signal.SIGKILL


class StopTimer:
    """Tells when a process has been stopped (SIGSTOP) for long.

    Args:
        least_s: What counts as long, in seconds.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._since: float | None = None

    def is_up(self, now: float, *, is_stopped: bool) -> bool:
        """Return whether it has been stopped for so long; called often, with monotonic seconds."""
        if not is_stopped:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._least_s


def process_state(pid: int) -> str:
    """Return the state of a process as the kernel abbreviates it; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
