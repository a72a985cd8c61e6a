"""A rehearsal strikes its own workers, and nodes that nobody else uses; local nodes share GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, NodeDiedError, RayTaskError

from ray_ulysses.cluster import rehearsal
from ray_ulysses.cluster.local_cluster import least_claimed
from ray_ulysses.cluster.rehearsal import FaultInjector, losable_nodes
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.gpu_environment import shared_gpu_environment
from ray_ulysses.rehearsal.schedule import Fault

OWN, OTHER = "01", "02"
LOST = "ab" * 28


def _node(name: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": f"host-{name}", "Alive": True, "Resources": resources}


def _actor(node: str, job: str, *, state: str = "ALIVE", kind: str = "Worker", name: str = "") -> dict[str, Any]:
    return {"ActorClassName": kind, "Name": name, "JobID": job, "State": state, "Address": {"NodeID": node}}


def _job(job: str, **fields: Any) -> dict[str, Any]:
    here = {"DriverPid": 7, "DriverIPAddress": "host-here", "StartTime": 100_000.0, "IsDead": False}
    return {"JobID": job, **here, **fields}


class Tables:
    """Ray's tables, and its answer to a task, as the test fills them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = [_node("head", **{"node:__internal_head__": 1.0}), _node("here"), _node("a"), _node("b")]
        self.actors: list[dict[str, Any]] = []
        self.jobs = [_job(OWN)]
        self.draining: dict[str, int] = {}
        self.answer: Any = None
        self.cancelled: list[Any] = []
        tables = SimpleNamespace(job_table=lambda: self.jobs, get_draining_nodes=lambda: self.draining)
        private = SimpleNamespace(state=tables, actors=lambda: dict(enumerate(self.actors)))
        monkeypatch.setattr(rehearsal, "state", private)
        task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: "asked"))
        monkeypatch.setattr(rehearsal, "ray", SimpleNamespace(
            nodes=lambda: self.nodes,
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
            util=SimpleNamespace(get_node_ip_address=lambda: "host-here"),
            remote=lambda function: task,
            get=self._get,
            cancel=lambda asked, force: self.cancelled.append((asked, force)),
        ))  # fmt: skip

    def _get(self, asked: Any, timeout: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    return Tables(monkeypatch)


def _injector(*, is_running: bool = True) -> FaultInjector:
    command: Any = SimpleNamespace(pid=7, started_at=100.0, is_running=is_running)
    draw: Any = SimpleNamespace(choice=lambda found: found[0])
    return FaultInjector(command, lambda: "key", local=None, drain_s=1.0, draw=draw)


def test_only_nodes_on_which_nobody_else_has_anything_may_be_lost(tables: Tables) -> None:
    assert losable_nodes([OWN], "key").keys() == {"a", "b"}
    tables.actors = [_actor("a", OWN), _actor("b", OTHER, state="DEAD")]
    assert losable_nodes([OWN], "key").keys() == {"a", "b"}
    for other in (_actor("b", OTHER), _actor("b", OTHER, state="RESTARTING"), _actor("b", OTHER, kind="My_Agent")):
        tables.actors = [other]
        assert losable_nodes([OWN], "key").keys() == {"a"}
    # Peer memory of the rehearsal belongs to a command that was killed; that of others is all that they have.
    tables.actors = [_actor(name[-1], OTHER, kind="_Agent", name=name) for name in ("key/a", "theirs/b")]
    assert losable_nodes([OWN], "key").keys() == {"a"} and losable_nodes([OWN]).keys() == set()
    tables.actors, tables.draining = [], {"a": 0}
    tables.jobs.append(_job(OTHER, DriverIPAddress="host-b", DriverPid=9))
    assert losable_nodes([OWN], "key").keys() == set()


def test_only_the_running_command_of_this_machine_gets_a_fault(tables: Tables) -> None:
    others = ({"DriverIPAddress": "host-a"}, {"StartTime": 10_000.0}, {"IsDead": True}, {"DriverPid": 8})
    tables.jobs += [_job(f"0{number}", **fields) for number, fields in enumerate(others, 2)]
    assert _injector()._jobs() == [OWN]
    tables.jobs.append(_job("06"))
    with pytest.raises(RunError, match="01, 06"):
        _injector()._jobs()
    with pytest.raises(RunError, match="before the command ended"):
        _injector(is_running=False).inflict(Fault(at_s=1.0, kind="kill-worker"))


def test_a_node_counts_as_lost_only_once_it_is(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill() -> Any:
        return rehearsal._on_node(LOST, rehearsal.kill_own_node, ends=True)

    tables.answer = GetTimeoutError("busy")
    with pytest.raises(GetTimeoutError):
        kill()
    assert tables.cancelled == [("asked", True)], "it would happen later"
    tables.answer = RayTaskError("kill_own_node", "it is no raylet", AssertionError())
    with pytest.raises(RayTaskError):
        kill()
    monkeypatch.setattr(rehearsal, "_TASK_S", 0.5)
    tables.answer, tables.nodes[2] = NodeDiedError("gone"), _node(LOST)
    with pytest.raises(NodeDiedError):
        kill()
    tables.nodes[2] = _node(LOST) | {"Alive": False}
    assert kill() > 0


def test_nodes_share_gpus_only_where_the_machine_has_too_few() -> None:
    assert least_claimed(("0", "1", "2"), [("0",)], 2) == ("1", "2")
    assert least_claimed(("0",), [("0",), ("0",)], 1) == ("0",)
    assert least_claimed((), [], 0) == ()


def test_ranks_that_share_a_gpu_are_on_hosts_of_their_own() -> None:
    one, two = (shared_gpu_environment(f"127.0.1.{number}") for number in (2, 3))
    assert one["NCCL_HOSTID"] != two["NCCL_HOSTID"]
    assert one["NCCL_SOCKET_IFNAME"] == two["NCCL_SOCKET_IFNAME"] == "lo"
