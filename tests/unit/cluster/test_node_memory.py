"""The agents of peer memory are looked after while a run trains."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from ray_ulysses.cluster import peer_memory_agents
from ray_ulysses.cluster.peer_memory_agents import Contact, NodeMemory
from ray_ulysses.run_names import IDENTITY_FILE
from tests.distributed.run_case import make_config
from tests.polling import wait_until
from tests.unit.peer_memory.test_agent import SetClock

NODES = {"a": "10.0.0.1"}


class Agents:
    """The agents that nodes are asked for, found at one port after the other."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.alive: dict[str, bool] = {}
        self.may_answer = Event()
        self.may_answer.set()

    def ensure(
        self, run_key: str, nodes: dict[str, str], limit_bytes: int | None, *, before: dict[str, Contact]
    ) -> dict[str, Contact]:
        # The next one takes port, limit and token of the one before.
        assert not before or before["a"] == self.contact
        self.keys.append(run_key)
        assert self.may_answer.wait(30.0)
        return dict.fromkeys(nodes, self.contact)

    @property
    def contact(self) -> Contact:
        return Contact(address=f"10.0.0.1:{7000 + len(self.keys)}", limit_bytes=5, token="t")


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Agents:
    found = Agents()
    monkeypatch.setattr(peer_memory_agents, "ensure_agents", found.ensure)
    monkeypatch.setattr(peer_memory_agents.ray, "nodes", lambda: [
        {"NodeID": node, "Alive": is_alive} for node, is_alive in found.alive.items()
    ])  # fmt: skip
    return found


def memory_of(folder: Path, clock: Any = None, **overrides: Any) -> NodeMemory:
    config = make_config(folder, folder / "corpus", **overrides)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / IDENTITY_FILE).write_text("one and the same")
    return NodeMemory(config, clock)


def addresses(memory: NodeMemory, *nodes: str) -> Any:
    found = memory.of(nodes, ())
    assert found is not None
    return found[0].agents


def test_an_agent_that_died_is_there_again_for_the_next_generation(tmp_path: Path, agents: Agents) -> None:
    clock = SetClock()
    memory = memory_of(tmp_path, clock)
    memory.prepare(NODES)
    assert addresses(memory, "a") == {"a": "10.0.0.1:7001"}
    for clock.time in (1.0, 14.0, 15.0, 16.0, 29.0):
        memory.keep(NODES)
    memory._pool.shutdown(wait=True)
    assert len(agents.keys) == 2, "looked for once in a while only"
    assert addresses(memory, "a") == {"a": "10.0.0.1:7002"}, "without waiting for a failure to start it"


@pytest.mark.parametrize("is_on", [True, False])
def test_agents_are_not_asked_for_while_they_start_or_without_peer_memory(
    tmp_path: Path, agents: Agents, is_on: bool
) -> None:
    clock = SetClock()
    memory = memory_of(tmp_path, clock, elastic__peer_memory=is_on)
    agents.may_answer.clear()
    memory.prepare(NODES)
    if is_on:
        wait_until(lambda: agents.keys, "they are being started")
    clock.time = 100.0
    memory.keep(NODES)
    agents.may_answer.set()
    memory._pool.shutdown(wait=True)
    assert len(agents.keys) == is_on


def test_agents_of_nodes_that_have_died_are_forgotten(tmp_path: Path, agents: Agents) -> None:
    memory, agents.alive = memory_of(tmp_path, SetClock()), {"a": True, "b": True}
    memory.prepare({"a": "", "b": ""})
    assert addresses(memory, "a", "b").keys() == {"a", "b"}
    agents.alive["b"] = False
    memory.prepare({"a": ""})
    assert addresses(memory, "a").keys() == {"a"}


def test_a_copy_of_a_run_finds_no_agents_of_the_original(tmp_path: Path, agents: Agents) -> None:
    for storage in ("original", "copy", "original"):
        memory = memory_of(tmp_path / storage)
        memory.prepare(NODES)
        memory._pool.shutdown(wait=True)
    assert agents.keys[0] == agents.keys[2] != agents.keys[1]
