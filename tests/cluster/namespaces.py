"""Nodes of a Ray cluster in network namespaces of one machine, whose cables can be pulled.

A pulled cable drops packets without a word: no connection is closed on either side, and all processes live on. That is
what a node sees whose switch has failed, and what stopping or killing its processes cannot show.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.cluster.heads import TOKEN
from tests.polling import wait_until

_NETWORK = "10.213.77"
_PORT = 6379
_START_S = 120.0


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None:
        return False
    name = f"ru-try-{os.getpid()}"
    is_made = _run("ip", "netns", "add", name).returncode == 0
    try:
        return (
            is_made
            and _run("ip", "-n", name, "link", "add", "name", "one", "type", "veth", "peer", "name", "two").returncode
            == 0
        )
    finally:
        if is_made:
            _run("ip", "netns", "delete", name)


class CableCluster:
    """A head without workers, and nodes that are each joined to it by one virtual cable."""

    def __init__(self, folder: Path, cpus: Sequence[int]) -> None:
        self._folder, self._prefix, self._num_nodes = folder, f"ru{os.getpid()}", len(cpus)
        self._raylets: list[subprocess.Popen[bytes]] = []
        self.address = f"{_NETWORK}.1:{_PORT}"
        try:
            self._make_network()
            for number, count in enumerate(cpus):
                self._start_ray(number, count)
        except BaseException:
            self.shutdown()
            raise

    def command(self, node: int, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self._name(node), *arguments]

    def pull(self, node: int) -> None:
        """Pull the cable of a node; nothing is closed, and packets are lost in silence."""
        _checked("ip", "-n", self._name(0), "link", "set", f"to{node}", "down")

    def plug(self, node: int) -> None:
        """Plug the cable in again."""
        _checked("ip", "-n", self._name(0), "link", "set", f"to{node}", "up")

    def number_of(self, name: str) -> int:
        return int(name.rsplit(".", 1)[1]) - 1

    def processes(self, node: int) -> list[psutil.Process]:
        found = []
        for pid in _run("ip", "netns", "pids", self._name(node)).stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def shutdown(self) -> None:
        """End all processes of all nodes, and remove the network."""
        left = [process for node in range(self._num_nodes) for process in self.processes(node)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=30)
        for raylet in self._raylets:
            raylet.wait(30)
        for node in range(self._num_nodes):
            _run("ip", "netns", "delete", self._name(node))

    def _name(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def _make_network(self) -> None:
        """Give each node a namespace; the head's holds the switch that all cables lead to."""
        head = self._name(0)
        for node in range(self._num_nodes):
            _checked("ip", "netns", "add", self._name(node))
            _checked("ip", "-n", self._name(node), "link", "set", "lo", "up")
        _checked("ip", "-n", head, "link", "add", "switch", "type", "bridge")
        _checked("ip", "-n", head, "addr", "add", f"{_NETWORK}.1/24", "dev", "switch")
        _checked("ip", "-n", head, "link", "set", "switch", "up")
        for node in range(1, self._num_nodes):
            name = self._name(node)
            peer = ("peer", "name", "eth0", "netns", name)
            _checked("ip", "-n", head, "link", "add", f"to{node}", "type", "veth", *peer)
            _checked("ip", "-n", head, "link", "set", f"to{node}", "master", "switch")
            _checked("ip", "-n", head, "link", "set", f"to{node}", "up")
            _checked("ip", "-n", name, "addr", "add", f"{_NETWORK}.{node + 1}/24", "dev", "eth0")
            _checked("ip", "-n", name, "link", "set", "eth0", "up")

    def _start_ray(self, node: int, cpus: int) -> None:
        address = f"{_NETWORK}.{node + 1}"
        where = ("--head", f"--port={_PORT}", "--include-dashboard=false")
        log = self._folder / f"node-{node}.log"
        with log.open("wb") as output:
            raylet = subprocess.Popen(
                self.command(
                    node, str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats",
                    *(where if node == 0 else (f"--address={self.address}",)), f"--node-ip-address={address}",
                    f"--num-cpus={cpus}", f"--temp-dir={self._folder}/{node}",
                ),
                stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True,
            )  # fmt: skip
        self._raylets.append(raylet)

        def has_started() -> bool:
            assert raylet.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()

        wait_until(has_started, f"node {node} starts", timeout_s=_START_S, every_s=0.2, said=log.read_text)


def environment() -> Mapping[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    return {**plain, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _checked(*command: str) -> None:
    done = _run(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
