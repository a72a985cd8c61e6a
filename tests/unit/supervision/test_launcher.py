"""The launcher takes orders from its supervisor, looks after it, and imports all that its children need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_ulysses.peer_memory import AgentAddresses
from ray_ulysses.supervision.launcher import is_safe_to_fork
from ray_ulysses.supervision.order import MOST_BYTES, Job, Order, pair, receive, send
from tests.polling import wait_until

_LAUNCHER = """
import sys
from ray_ulysses.supervision import launcher
launcher.warm_up = lambda: None
launcher._LOOK_EVERY_S, launcher._STOPPED_S = 0.02, 0.1
launcher.main(sys.argv[1:])
"""
_SUPERVISOR = """
import subprocess, sys, time
from ray_ulysses.supervision.order import pair, receive
mine, theirs = pair()
launcher = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(theirs.fileno())], pass_fds=[theirs.fileno()])
receive(mine)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_supervisor_that_is_stopped_is_continued_by_its_launcher() -> None:
    """Its child trains on meanwhile; once the coordinator takes it for lost, a new worker has to start."""
    supervisor = subprocess.Popen([sys.executable, "-c", _SUPERVISOR, _LAUNCHER], stdout=subprocess.PIPE)
    try:
        assert supervisor.stdout is not None and supervisor.stdout.readline() == b"ready\n"
        for _ in range(2):
            supervisor.send_signal(signal.SIGSTOP)
            wait_until(lambda: os.waitid(os.P_PID, supervisor.pid, os.WCONTINUED | os.WNOHANG), "it goes on")
    finally:
        supervisor.kill()
        supervisor.communicate()


def test_children_are_forked_until_cuda_was_used(tmp_path: Path) -> None:
    # NVML opens the second and the third, from the import of DeepSpeed on.
    opened = ("/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")
    for number, path in enumerate(opened):
        (tmp_path / str(number)).symlink_to(path)
        assert is_safe_to_fork(tmp_path) is (path != "/dev/nvidia-uvm")


_IMPORTS = """
import os, sys
from ray_ulysses.supervision.launcher import warm_up
warm_up()
assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
assert "deepspeed.runtime.zero.stage3" in sys.modules and "transformers" in sys.modules
assert "mlflow" not in sys.modules
# Whoever needs it later has it.
from mlflow import MlflowClient
"""


@pytest.mark.slow
def test_mlflow_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True, timeout=120)


def _open_files() -> set[str]:
    """Return the descriptors except sockets: threads of earlier tests may close theirs at any time."""
    return {link.name for link in Path("/proc/self/fd").iterdir() if link.exists() and not link.is_socket()}


@pytest.mark.parametrize("num_nodes", [1, 1024])
def test_an_order_arrives_with_its_descriptors(num_nodes: int) -> None:
    nodes = tuple(f"{number:056x}" for number in range(num_nodes))
    job = Job(
        config={"run": {"name": "x"}}, session="s", command_started=1.0, workers_asked=None, node="a", local_rank=0,
        device="cpu",
    )  # fmt: skip
    agents = dict.fromkeys(nodes, "10.0.0.1:1")
    memory = AgentAddresses(agents=agents, node=nodes[0], partner=nodes[-1], token="t")
    order = Order(job=job, generation=3, rank=0, rank_nodes=nodes, host="h", port=1, memory=memory)
    ours, theirs = pair()
    before = _open_files()
    with open(os.devnull) as one, open("/proc/self/status") as other:
        send(ours, order, (one.fileno(), other.fileno()))
        received, descriptors = receive(theirs)
        assert received == order and len(descriptors) == 2
        assert b"VmRSS" in os.pread(descriptors[1], 1 << 16, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    assert _open_files() <= before
    assert num_nodes == 1 or len(repr(order)) > MOST_BYTES
