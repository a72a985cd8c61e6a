"""Vault agents in detached actors: they outlive their driver, are found again, and end with the run."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import ray

from ray_ulysses.cluster.peer_memory_agents import Contact, end_agents, ensure_agents, kill_agent
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryStore
from tests.polling import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

SHARD = "checkpoints/step-00000003/attempt-0001/rank-00000-of-00001.safetensors"
_DRIVER = """
import os, signal, sys
import ray
from ray_ulysses.cluster.peer_memory_agents import ensure_agents
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryStore
address, run_key, node, ip, key = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
agents = ensure_agents(run_key, {node: ip}, start_s=100.0)
own = agents[node]
store = PeerMemoryStore(AgentAddresses(agents={node: own.address}, node=node, partner=None, token=own.token))
store.create(key, [b"state"])
print(own.address, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _store(agent: Contact, node: str) -> PeerMemoryStore:
    return PeerMemoryStore(AgentAddresses(agents={node: agent.address}, node=node, partner=None, token=agent.token))


def test_an_agent_outlives_a_killed_driver_and_ends_with_the_run(cluster: None) -> None:
    context = ray.get_runtime_context()
    node, ip = context.get_node_id(), ray.util.get_node_ip_address()
    command = [sys.executable, "-c", _DRIVER, context.gcs_address, "run-1", node, ip, SHARD]
    died = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=200, check=False)
    assert died.returncode == -9
    first = died.stdout.strip()
    assert first.startswith(f"{ip}:")

    (agent,) = ensure_agents("run-1", {node: ip}, start_s=100.0).values()
    assert agent.address == first
    assert agent.token not in repr(agent)
    store = _store(agent, node)
    assert store.read_whole(SHARD) == b"state"

    # Another run has agents and a token of its own; a node that is not there holds nobody up.
    begun = time.monotonic()
    others = ensure_agents("run-10", {node: ip, "0" * 56: "127.0.0.9"}, 10 * 2**20, start_s=60.0)
    assert time.monotonic() - begun < 100.0
    assert set(others) == {node}
    other = others[node]
    assert other.token != agent.token and other.address != agent.address
    with pytest.raises(OSError, match="memory of this node is full"):
        _store(other, node).create(SHARD, [bytes(2**20)] * 11)

    end_agents("run-1")
    wait_until(lambda: not _answers(agent, node), "the agent of the run has ended")
    assert _store(other, node).list("checkpoints") == []
    # One that has died is started again where it was known, and to those who knew it.
    assert kill_agent("run-10", node)
    wait_until(lambda: not _answers(other, node), "the agent has died")
    assert ensure_agents("run-10", {node: ip}, before=others, start_s=60.0) == others
    assert _answers(other, node)

    end_agents("run-10")
    wait_until(lambda: not _answers(other, node), "the agent of the other run has ended")
    # What starts anew is empty.
    (again,) = ensure_agents("run-1", {node: ip}, start_s=100.0).values()
    assert _store(again, node).list("checkpoints") == []
    end_agents("run-1")


def _answers(agent: Contact, node: str) -> bool:
    try:
        _store(agent, node).list("checkpoints")
    except OSError:
        return False
    return True
