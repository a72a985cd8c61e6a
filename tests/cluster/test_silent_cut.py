"""A node whose cable is pulled: its processes live on, and the run goes on without it in seconds.

Nodes are network namespaces of one machine. A pulled cable drops packets and closes no connection, as a failed switch
does, which stopping or killing processes cannot show.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from ray_ulysses.config import Config
from ray_ulysses.run_names import CHECKPOINT_FOLDER
from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted, Event, StepDone
from ray_ulysses.tracking.history import read_history
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.result_table import ResultTable
from tests.unit.tracking.journals import read_events

_ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400.0
# Ten seconds on two quiet cores; a test bounds what a machine that is busy with others may take.
RECOVERED_S = 40.0
_NETWORK = "10.213.77"
_PORT = 6379
TOKEN = secrets.token_hex(32)


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None:
        return False
    name = f"ru-try-{os.getpid()}"
    is_made = _run("ip", "netns", "add", name).returncode == 0
    link = ("link", "add", "name", "one", "type", "veth", "peer", "name", "two")
    try:
        return is_made and _run("ip", "-n", name, *link).returncode == 0
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
        _checked("ip", "-n", self._name(0), "link", "set", f"to{node}", "down")

    def plug(self, node: int) -> None:
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

        wait_until(has_started, f"node {node} starts", timeout_s=120.0, every_s=0.2, said=log.read_text)


def environment() -> Mapping[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    return {**plain, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _checked(*command: str) -> None:
    done = _run(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not can_make_namespaces(), reason="may not make network namespaces here"),
]


@pytest.fixture(scope="module")
def results() -> Iterator[ResultTable]:
    table = ResultTable()
    yield table
    if len(table.rows) == 2:
        table.write("silent_cut", "A node whose cable is pulled", by="pytest tests/cluster/test_silent_cut.py")


@pytest.fixture
def cluster(ray_folder: Path) -> Iterator[CableCluster]:
    cluster = CableCluster(ray_folder, cpus=(0, 2, 2))
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("whose", ["rank 0", "another rank"])
def test_a_cable_that_is_pulled_costs_seconds_and_the_cut_side_commits_nothing(
    cluster: CableCluster, corpus: Path, tmp_path: Path, whose: str, results: ResultTable
) -> None:
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=100_000, data__epochs=650,
        cluster__workers={"min": 2, "max": 4}, cluster__cpus_per_worker=1.0, cluster__data_cpus=0.1,
        cluster__address=cluster.address, checkpoint__every_steps=2,
    )  # fmt: skip
    path, log = tmp_path / "config.yaml", tmp_path / "log.txt"
    path.write_text(config.to_yaml())
    train = cluster.command(0, sys.executable, "-m", "ray_ulysses", "train", str(path))
    with log.open("w") as output:
        command = subprocess.Popen(
            train, stdout=output, stderr=output, start_new_session=True, env=environment(), cwd=_ROOT
        )

    def wait(holds: Callable[[], object], what: str) -> None:
        wait_until(holds, what, timeout_s=TIMEOUT_S, every_s=0.1, said=log.read_text)

    try:
        wait(lambda: _num_steps(config, 1) >= 8, "it trains")
        first = _started(config)[0]
        node = cluster.number_of(first.rank_nodes[0 if whose == "rank 0" else -1])
        cluster.pull(node)
        pulled_at = time.time()
        wait(lambda: _num_steps(config, 2) >= 1, "it goes on")
        # The side without a coordinator ends what trains there by itself, while nobody can reach it.
        wait(lambda: not _trainers(cluster.processes(node)), "the cut side ends")
        files = _files_of(config, 1)
        cluster.plug(node)
        wait(lambda: _num_steps(config, 2) + _num_steps(config, 3) >= 20, "it trains on")
        command.terminate()
        command.wait(TIMEOUT_S)
    finally:
        command.kill()
        command.wait()
    history, second = read_history(config.run_dir), _started(config)[1]
    next_step_s = next(one.time for one in read_events(config.run_dir) if _is_step_of(one, 2)) - pulled_at
    results.add(
        {
            "pulled": f"the node of {whose}", "workers": f"{first.world_size} to {second.world_size}",
            "then": str(second.resumed_from), "seconds to the next step": f"{next_step_s:.1f}",
            "steps lost": str(history.lost_steps),
        }
    )  # fmt: skip
    assert (first.world_size, second.world_size, history.status) == (4, 2, "stopped")
    assert history.lost_steps <= 1 and next_step_s < RECOVERED_S
    # Nothing of the cut side came after the others went on: no event, no checkpoint that counts, no file.
    late = [one for one in read_events(config.run_dir) if one.attempt == 1 and one.time > second.time]
    assert [one for one in late if isinstance(one, StepDone | CheckpointCommitted)] == []
    assert _files_of(config, 1) <= files
    assert [step.step for step in history.steps] == list(range(1, history.step + 1))
    assert history.rows_consumed == history.step * config.data.rows_per_step


def _started(config: Config) -> list[AttemptStarted]:
    return [one for one in read_events(config.run_dir) if isinstance(one, AttemptStarted)]


def _is_step_of(event: Event, attempt: int) -> bool:
    return isinstance(event, StepDone) and event.attempt == attempt


def _num_steps(config: Config, attempt: int) -> int:
    if not config.run_dir.is_dir():
        return 0
    return sum(_is_step_of(one, attempt) for one in read_events(config.run_dir))


def _trainers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    launchers = {one.pid for one in processes if _is_launcher(one)}
    return [one for one in processes if one.pid in launchers and one.ppid() in launchers]


def _is_launcher(process: psutil.Process) -> bool:
    try:
        return "ray_ulysses.supervision.launcher" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _files_of(config: Config, attempt: int) -> set[str]:
    return {str(path) for path in (config.run_dir / CHECKPOINT_FOLDER).glob(f"*/attempt-{attempt:04d}/*")}
