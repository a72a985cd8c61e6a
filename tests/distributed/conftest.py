"""The marks of every test of this folder, a corpus that no test changes, and two nodes' peer memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ulysses.peer_memory import PeerMemoryAgent
from tests.distributed.run_case import make_corpus

TOKEN = "secret"
Agents = dict[str, PeerMemoryAgent]
Addresses = tuple[dict[str, str], str]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.distributed)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def agents() -> Iterator[Agents]:
    running = {node: PeerMemoryAgent(TOKEN) for node in ("node-1", "node-2")}
    yield running
    for agent in running.values():
        agent.close()


@pytest.fixture
def peer_memory(agents: Agents) -> Addresses:
    return {node: agent.start() for node, agent in agents.items()}, TOKEN
