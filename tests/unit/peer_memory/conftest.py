"""Agents of three nodes in threads of the test's process, and the store over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryAgent, PeerMemoryStore
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import Buffer, StoredFile

TOKEN = "the token of this run"
FOLDER = "checkpoints/step-00000007/attempt-0002"
NODES = ("a", "b", "c")


class InFolder(Store):
    """A view of a store in which all keys are keys of shards."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def open(self, key: str) -> StoredFile:
        return self._inner.open(f"{FOLDER}/{key}")

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        return self._inner.create(f"{FOLDER}/{key}", chunks)

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        return self._inner.replace(f"{FOLDER}/{key}", chunks)

    def list(self, prefix: str) -> list[str]:
        return [key.removeprefix(f"{FOLDER}/") for key in self._inner.list(f"{FOLDER}/{prefix}")]

    def sizes(self, folder: str) -> dict[str, int | None]:
        found = self._inner.sizes(f"{FOLDER}/{folder}")
        return {key.removeprefix(f"{FOLDER}/"): size for key, size in found.items()}

    def delete(self, prefix: str) -> None:
        self._inner.delete(f"{FOLDER}/{prefix}")


@pytest.fixture
def agents() -> Iterator[dict[str, PeerMemoryAgent]]:
    running = {node: PeerMemoryAgent(TOKEN) for node in NODES}
    yield running
    for agent in running.values():
        agent.close()


@pytest.fixture
def store_of(agents: dict[str, PeerMemoryAgent]) -> Iterator[Callable[[str], PeerMemoryStore]]:
    """Returns the store of a node."""
    addresses = {node: agent.start() for node, agent in agents.items()}
    made: list[PeerMemoryStore] = []

    def make(node: str) -> PeerMemoryStore:
        partner = NODES[(NODES.index(node) + 1) % len(NODES)]
        made.append(PeerMemoryStore(AgentAddresses(agents=addresses, node=node, partner=partner, token=TOKEN)))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture(params=["manifests", "shards"])
def store(request: pytest.FixtureRequest, store_of: Callable[[str], PeerMemoryStore]) -> Store:
    """For the contract: keys of small files, which every node keeps, and keys of shards, which two nodes keep."""
    return InFolder(store_of("a")) if request.param == "shards" else store_of("a")
