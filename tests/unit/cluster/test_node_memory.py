"""The agents of peer memory are looked after while a run trains."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from ray_ulysses.cluster import peer_memory_agents
from ray_ulysses.cluster.peer_memory_agents import Contact, NodeMemory
from ray_ulysses.run.ownership import peer_memory_key
from ray_ulysses.run_names import IDENTITY_FILE
from tests.distributed.run_case import make_config

NODES = {"a": "10.0.0.1"}


class _Clock:
    at = 0.0

    def monotonic(self) -> float:
        return self.at


def contact(address: str) -> Contact:
    return Contact(address=address, limit_bytes=5, token="t")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ports that agents have been found at, one after the other."""
    found: list[str] = []

    def ensure_agents(
        run_key: str, nodes: dict[str, str], limit_bytes: int | None, *, before: dict[str, Contact]
    ) -> dict[str, Contact]:
        # The next one takes port, limit and token of the one before.
        assert before == ({"a": contact(found[-1])} if found else {})
        found.append(f"10.0.0.1:{7000 + len(found)}")
        return dict.fromkeys(nodes, contact(found[-1]))

    monkeypatch.setattr(peer_memory_agents, "ensure_agents", ensure_agents)
    monkeypatch.setattr(peer_memory_agents.ray, "nodes", list)
    monkeypatch.setattr(peer_memory_agents, "peer_memory_key", lambda config: "run")
    return found


def memory_of(tmp_path: Path, clock: Any, **overrides: Any) -> NodeMemory:
    return NodeMemory(make_config(tmp_path, tmp_path / "corpus", **overrides), clock)


def test_an_agent_that_died_is_there_again_for_the_next_generation(tmp_path: Path, asked: list[str]) -> None:
    clock = _Clock()
    memory = memory_of(tmp_path, clock)
    memory.prepare(NODES)
    first = memory.of(["a"], ())
    assert first is not None and first[0].agents == {"a": asked[0]}
    for clock.at in (1.0, 14.0, 15.0, 16.0, 29.0):
        memory.keep(NODES)
    memory._pool.shutdown(wait=True)
    assert len(asked) == 2, "looked for once in a while only"
    again = memory.of(["a"], ())
    assert again is not None and again[0].agents == {"a": asked[1]}, "without waiting for a failure to start it"


def test_agents_of_nodes_that_have_died_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    clock = _Clock()
    memory = memory_of(tmp_path, clock)
    alive = {"a": True, "b": True}
    monkeypatch.setattr(
        peer_memory_agents.ray,
        "nodes",
        lambda: [{"NodeID": node, "Alive": is_alive} for node, is_alive in alive.items()],
    )
    monkeypatch.setattr(
        peer_memory_agents,
        "ensure_agents",
        lambda _, nodes, *__, **___: dict.fromkeys(nodes, contact("x:1")),
    )
    memory.prepare({"a": "", "b": ""})
    found = memory.of(["a", "b"], ())
    assert found is not None and found[0].agents.keys() == {"a", "b"}
    alive["b"] = False
    memory.prepare({"a": ""})
    found = memory.of(["a"], ())
    assert found is not None and found[0].agents.keys() == {"a"}


def test_agents_that_are_being_started_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    begun, may_end, calls = Event(), Event(), [0]

    def slow(*_: Any, **__: Any) -> dict[str, Contact]:
        calls[0] += 1
        begun.set()
        may_end.wait(30.0)
        return {}

    monkeypatch.setattr(peer_memory_agents, "ensure_agents", slow)
    clock = _Clock()
    memory = memory_of(tmp_path, clock)
    memory.prepare(NODES)
    assert begun.wait(30.0)
    clock.at = 100.0
    memory.keep(NODES)
    may_end.set()
    memory._pool.shutdown(wait=True)
    assert calls == [1]


def test_without_peer_memory_nobody_is_asked(tmp_path: Path, asked: list[str]) -> None:
    clock = _Clock()
    memory = memory_of(tmp_path, clock, elastic__peer_memory=False)
    clock.at = 100.0
    memory.keep(NODES)
    memory._pool.shutdown(wait=True)
    assert asked == []


def test_a_copy_of_a_run_finds_no_agents_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    keys: list[str] = []

    def ensure_agents(run_key: str, *_: Any, **__: Any) -> dict[str, Contact]:
        keys.append(run_key)
        return {}

    monkeypatch.setattr(peer_memory_agents, "ensure_agents", ensure_agents)
    monkeypatch.setattr(peer_memory_agents, "peer_memory_key", peer_memory_key)
    for storage in ("original", "copy", "original"):
        config = make_config(tmp_path / storage, tmp_path / "corpus")
        config.run_dir.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
        (config.run_dir / IDENTITY_FILE).write_text("one and the same")  # type: ignore[union-attr]
        memory = NodeMemory(config)
        memory.prepare(NODES)
        memory._pool.shutdown(wait=True)
    assert keys[0] == keys[2] != keys[1]
