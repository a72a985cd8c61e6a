"""The launcher looks after the supervisor that started it, and imports all that its children need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_ulysses.supervision.launcher import is_safe_to_fork
from tests.polling import wait_until

_LAUNCHER = """
import sys
from ray_ulysses.supervision import launcher
launcher._import_everything = lambda: None
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


@pytest.mark.parametrize(
    ("opened", "is_safe"),
    [
        (["/dev/null"], True),
        # NVML, from the import of DeepSpeed on.
        (["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"], True),
        (["/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"], False),
    ],
    ids=["no GPU", "NVML", "CUDA"],
)
def test_children_are_forked_until_cuda_was_used(tmp_path: Path, opened: list[str], is_safe: bool) -> None:
    for number, path in enumerate(opened):
        (tmp_path / str(number)).symlink_to(path)
    assert is_safe_to_fork(tmp_path) is is_safe


_IMPORTS = """
import os, sys
from ray_ulysses.supervision.launcher import _import_everything
_import_everything()
assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
assert "deepspeed.runtime.zero.stage3" in sys.modules and "transformers" in sys.modules
assert "mlflow" not in sys.modules
# Whoever needs it later has it.
from mlflow import MlflowClient
"""


@pytest.mark.slow
def test_mlflow_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True, timeout=120)
