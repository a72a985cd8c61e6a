"""A process that imports the training libraries once for all launchers on a machine, and forks them.

Four workers of an embedded Ray would otherwise import the same libraries at the same time, perhaps on only two cores.
The ``train`` command starts the image before it plans, so that the imports also overlap with planning and with Ray's
start. If the image ends, its launchers end too, and each supervisor executes its own launcher instead.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ray_ulysses.clock import SystemClock
from ray_ulysses.supervision.order import IMAGE, Exited, Launch, receive, send, without_token

_BACKLOG = 64


@contextmanager
def warm_image(launcher: str = "ray_ulysses.supervision.launcher") -> Iterator[None]:
    """Run an image inside the block, for the supervisors in processes that inherit this process's environment.

    Args:
        launcher: Module with ``warm_up`` and ``serve``, from which the image forks launchers.
    """
    # The directory can be entered only by this user, and so can the socket in it.
    with (
        tempfile.TemporaryDirectory(prefix="ray-ulysses-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = str(Path(folder) / "image")
        listener.bind(path)
        listener.listen(_BACKLOG)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), launcher],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            # If the imports fail, the launcher that a supervisor executes instead reports the error.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=without_token(),
        )
        # With the image's copy as the only one, connecting fails as soon as the image has ended.
        listener.close()
        os.environ[IMAGE] = path
        try:
            yield
        finally:
            del os.environ[IMAGE]
            process.kill()
            process.wait()


@dataclass(kw_only=True, slots=True)
class _Launcher:
    """A forked launcher: its process ID, a pidfd that is readable after its end, and its supervisor's connection."""

    pid: int
    process: int
    supervisor: socket.socket
    is_wanted: bool = True


def main(descriptor: str, module: str) -> None:
    """Import the libraries, and fork launchers until the process that started the image is gone."""
    launcher: Any = importlib.import_module(module)
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    launcher.die_with_parent(os.getppid())
    launcher.warm_up()
    if not launcher.is_safe_to_fork():
        return
    launchers: list[_Launcher] = []
    while True:
        watched: list[Any] = [listener, *(one.process for one in launchers)]
        watched += [one.supervisor for one in launchers if one.is_wanted]
        readable, _, _ = select.select(watched, [], [])
        for one in list(launchers):
            if one.process in readable:
                launchers.remove(one)
                _reap(one)
            elif one.supervisor in readable:
                # The supervisor has ended, or wants its launcher to end.
                one.is_wanted = False
                # Before a launcher has called `setsid`, killpg does not reach it.
                signal.pidfd_send_signal(one.process, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
        if listener in readable:
            _accept(launcher, listener, launchers)


def _accept(launcher: Any, listener: socket.socket, launchers: list[_Launcher]) -> None:
    connection, _ = listener.accept()
    try:
        request, descriptors = receive(connection)
    except (EOFError, OSError):
        connection.close()
        return
    image, pid = os.getpid(), os.fork()
    if pid == 0:
        launcher.die_with_parent(image)
        for one in (listener, connection, *(other.supervisor for other in launchers)):
            one.close()
        for other in launchers:
            os.close(other.process)
        _become(launcher, request, *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    launchers.append(_Launcher(pid=pid, process=os.pidfd_open(pid), supervisor=connection))


def _become(launcher: Any, request: Launch, orders: int, stdout: int, stderr: int) -> NoReturn:
    """Serve a supervisor in this forked process, with the supervisor's environment and output."""
    code = 1
    try:
        os.setsid()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        launcher.serve(socket.socket(fileno=orders), request.supervisor)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(launcher: _Launcher) -> None:
    _, status = os.waitpid(launcher.pid, 0)
    os.close(launcher.process)
    with launcher.supervisor, contextlib.suppress(OSError):
        send(launcher.supervisor, Exited(code=os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    # Read the clock once for all launchers, because the wall clock may jump before a fork.
    SystemClock().now()
    main(*sys.argv[1:])
