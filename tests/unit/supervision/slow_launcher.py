"""A launcher whose children end well at once, and go only once a file exists: as if their memory were slow to free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from ray_ulysses.supervision import launcher
from ray_ulysses.supervision.launcher import is_safe_to_fork
from ray_ulysses.supervision.order import STACKS_SIGNAL, Exited, Order, Ready, Result, Started, Stop, receive, send
from ray_ulysses.supervision.shared_progress import SharedProgress

__all__ = ["die_with_parent", "is_safe_to_fork", "serve", "warm_up"]
WORDS = {
    "aborts": "echo terminate called >&2; echo '  what(): no' >&2; kill -ABRT $$",
    "waits": "echo NCCL WARN no route >&2; exec sleep 600",
}
"""What the shell runs as the child, by the host of its rank 0."""
NOTICED = "noticed"
"""The host of rank 0 whose child ends well once it has a notice."""


def warm_up() -> None:
    """Import nothing."""


def die_with_parent(parent: int) -> None:
    """Do as the launcher, and stop a forked process that leads no session yet where the test asks for it."""
    launcher.die_with_parent(parent)
    if "TEST_STOPS_EARLY" in os.environ and os.getsid(0) != os.getpid():
        os.kill(os.getpid(), signal.SIGSTOP)


def serve(orders: socket.socket, supervisor: int) -> None:
    """Serve orders until the supervisor is gone."""
    sys.stderr.write("-" * int(os.environ.get("TEST_STDERR_BYTES", "0")))
    send(orders, Ready(pid=os.getpid()))
    # Children inherit it; a trap of the shell might come too late.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    child: subprocess.Popen[bytes] | None = None
    while True:
        try:
            order, descriptors = receive(orders)
        except (EOFError, OSError):
            return
        if isinstance(order, Stop) and child is not None:
            child.kill()
        if not isinstance(order, Order):
            continue
        for one in descriptors[1:]:
            os.close(one)
        progress = SharedProgress(descriptors[0])
        child = subprocess.Popen(["sh", "-c", WORDS.get(order.host, "exec sleep 600")], start_new_session=True)
        send(orders, Started(pid=child.pid))
        if order.host == NOTICED:
            threading.Thread(target=_await_notice, args=(orders, progress), daemon=True).start()
        elif order.host not in WORDS:
            ahead = f", ahead {order.ahead_s:.3g}" if order.ahead_s else ""
            tested = ", tested" * order.is_tested
            send(orders, Result(status=f"generation {order.generation}{ahead}{tested}"))
        threading.Thread(target=_reap, args=(orders, child), daemon=True).start()


def _await_notice(orders: socket.socket, progress: SharedProgress) -> None:
    while (notice := progress.notice()) is None:
        time.sleep(0.02)
    send(orders, Result(status=f"noticed {notice.deadline}"))


def _reap(orders: socket.socket, child: subprocess.Popen[bytes]) -> None:
    code = child.wait()
    while not Path(os.environ["TEST_FREED"]).exists():
        time.sleep(0.02)
    send(orders, Exited(code=code))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), os.getppid())
