"""A `Store` in the memory of a run's nodes: shards on two nodes each, manifests and marks on every one.

A shard is written to the writer's own node, whose agent copies it to the partner's: each copy is verified, in place,
against checksums of the writer's memory before `create` returns. Where the writer has it in `lent_memory`,
that memory itself becomes the file on its own node. A small file, such as the manifest that commits a state, is created
by one agent, the first in a fixed order that answers, and then put on all others. A listing is the union over all
agents. So a reader finds a manifest as soon as one agent has created it, when all shards that it names are on two
nodes; a writer that dies between that and the spreading leaves the state committed for as long as that agent's node
lives, and absent afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory.client import ANSWER_S, PROGRESS_S, AgentClient, AgentGoneError
from ray_ulysses.peer_memory.files import LentMemory
from ray_ulysses.run_names import SHARD_KEY
from ray_ulysses.storage import Buffer, Store
from ray_ulysses.storage.store import StoredFile, checked_key


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentAddresses:
    """The agents that a worker talks to; plain values, so that it can be pickled."""

    agents: Mapping[str, str]
    """``host:port`` of each node's agent, by the node's name."""
    node: str
    partner: str | None
    """The node that keeps the copy of this node's state; None for a single node."""
    token: str = field(repr=False)
    """The secret that both sides of a connection know."""

    def order(self) -> tuple[str, ...]:
        """Return the nodes that have an agent: this one, its partner, then the others by name."""
        near = [node for node in (self.node, self.partner) if node in self.agents]
        return tuple(dict.fromkeys((*near, *sorted(self.agents))))  # type: ignore[arg-type]  # None is in no mapping


def partners(zones: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the node that keeps a copy of each node's state, in another zone where there is one (pure).

    Each node keeps exactly one other node's copy, so that all need the same memory. As many nodes as possible have
    their partner in another zone.

    Args:
        zones: The failure domain of each node, such as its availability zone; None where it is unknown.

    Returns:
        The partner of each node; None for a single node.
    """
    sizes = Counter(zone or "" for zone in zones.values())
    # Largest zone first, zones together, stable names: the same nodes give the same pairs.
    ring = sorted(zones, key=lambda node: (-sizes[zones[node] or ""], zones[node] or "", node))
    if len(ring) < 2:
        return dict.fromkeys(ring)
    # Moving on by the largest zone's size leaves every zone, unless that zone holds more than half of the nodes: then
    # moving on by the number of the others takes as many as there are others out of it.
    largest = max(sizes.values())
    shift = min(largest, len(ring) - largest) or 1
    return {node: ring[(index + shift) % len(ring)] for index, node in enumerate(ring)}


_MOST_AT_ONCE = 16
_LOOKS_AT_ONCE = 8
_AGAIN_S = 5.0
_EARLY_LOOKS = 6
"""Number of looks with short pauses: an agent that has died is started again within half a minute."""
_MOST_DOUBLINGS = 6
_STEADY_S = 60.0
"""An agent that has answered for this long since it was left out does not count as unstable."""
_T = TypeVar("_T")
_log = get_logger(__name__)


class PeerMemoryStore(Store):
    """Files of one run in the memory of its nodes; any thread may call.

    An agent that does not answer once is left out. A writer of shards asks it, or its successor at the same address,
    again after a few seconds; each time it is left out in a row, the pause gets longer.

    Args:
        addresses: The agents, and which of them are near.
        answer_s: Longest wait for an agent's connection, in seconds.
        progress_s: Longest wait for news within a request, in seconds.
        clock: Time.

    Attributes:
        num_readmitted: How often an agent that was left out has answered again; it may have missed anything meanwhile.
    """

    def __init__(
        self,
        addresses: AgentAddresses,
        *,
        answer_s: float = ANSWER_S,
        progress_s: float = PROGRESS_S,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._clients = {
            node: AgentClient(addresses.agents[node], addresses.token, answer_s=answer_s, progress_s=progress_s)
            for node in addresses.order()
        }
        # Its threads start when they are first needed, and stay: a state asks all agents several times.
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="peer-memory-ask")
        # Of their own, so that agents that do not answer hold up no state that others keep.
        self._looks = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="peer-memory-look")
        # The nearest node of each file that was listed, or the one that had it: few ask all of many for each file.
        self._holders: dict[str, str] = {}
        self._lock = threading.Lock()
        # When to ask each agent that is left out again, when it was last readmitted, and how often it was left out.
        self._left_out: dict[str, float] = {}
        self._readmitted_at: dict[str, float] = {}
        self._times_left_out: Counter[str] = Counter()
        self._looks_in_vain: Counter[str] = Counter()
        self.num_readmitted = 0
        self._is_degraded = False
        self._lent = LentMemory(self._clock)
        address = addresses.agents.get(addresses.node)
        self._near: AgentClient | None = None
        if address is not None:
            self._near = AgentClient(address, addresses.token, answer_s=answer_s, progress_s=progress_s, is_local=True)

    def lent_memory(self) -> LentMemory | None:
        """Return memory from which this node's agent takes shards without a copy; None if it has no local socket."""
        if self._near is None:
            return None
        try:
            self._near.drop_ended()
            self._near.greet()
        except OSError:
            return None
        return self._lent

    def open(self, key: str) -> StoredFile:
        """Open a file for reading, in the nearest agent that has it; see `Store.open`."""
        checked_key(key)
        return _PeerFile(self, key, self.first_that_has(key, lambda client: client.sizes(key)[key]))

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file and return its size; it is on two nodes, or on every one, then; see `Store.create`."""
        return self._write(key, chunks, replace=False)

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a file in place of the one there, if any; see `Store.replace`."""
        return self._write(key, chunks, replace=True)

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file under a folder, by its key, sorted."""
        checked_key(folder)
        merged: dict[str, int | None] = {}
        for node, found in reversed(self._of_all(lambda client: client.sizes(folder)).items()):
            found.pop(folder, None)
            merged |= found
            self._holders.update(dict.fromkeys(found, node))
        return dict(sorted(merged.items()))

    def delete(self, prefix: str) -> None:
        """Drop a file, or a folder with all that is in it, on every node."""
        checked_key(prefix)
        self._of_all(lambda client: client.delete(prefix))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes whose agents have not been left out, the nearest first."""
        with self._lock:
            return tuple(node for node in self._clients if node not in self._left_out)

    def close(self) -> None:
        """Close the connections; agents that nobody else is connected to end after a while."""
        self._threads.shutdown(wait=False)
        self._looks.shutdown(wait=False)
        for client in self._clients.values():
            client.close()
        if self._near is not None:
            self._near.close()

    def _write(self, key: str, chunks: Iterable[Buffer], *, replace: bool) -> int:
        if SHARD_KEY.match(checked_key(key)):
            return self._write_shard(key, chunks, replace=replace)
        # Copies, since the caller may reuse the memory of its chunks.
        return self._write_everywhere(key, b"".join(bytes(chunk) for chunk in chunks), replace=replace)

    def _write_shard(self, key: str, chunks: Iterable[Buffer], *, replace: bool) -> int:
        """Write a file to the nearest agent, and have that copy it to the next."""
        self._look_for_those_left_out()
        # The chunks can be read once only, so look for an agent that answers before they are.
        writer, _ = self._first(self.nodes, AgentClient.greet)
        size = self._asked(writer, lambda client: self._put_shard(client, key, chunks, replace=replace))
        with self._dropped_on_failure(key):
            for partner in self.nodes:
                if partner != writer and self._is_copied(key, writer, partner):
                    self._is_degraded = False
                    return size
        if len(self._clients) > 1 and not self._is_degraded:
            self._is_degraded = True
            _log.warning("peer memory keeps one copy only: of %d agents only one answers", len(self._clients))
        return size

    def _put_shard(self, client: AgentClient, key: str, chunks: Iterable[Buffer], *, replace: bool) -> int:
        is_near = self._near is not None and self._near.address == client.address
        if self._near is not None and is_near and self._lent.is_used and self.lent_memory() is not None:
            return self._near.put(key, chunks, replace=replace, lent=self._lent)
        return client.put(key, chunks, replace=replace, is_large=True)

    def _is_copied(self, key: str, writer: str, partner: str) -> bool:
        """Copy a file between two agents; return False if the second does not answer.

        Raises:
            OSError: The first does not answer, or the second's memory is full.
        """
        try:
            self._asked(writer, lambda client: client.copy(key, self._clients[partner].address))
        except AgentGoneError:
            raise
        except OSError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._leave_out(partner, error)
            return False
        return True

    def _write_everywhere(self, key: str, content: bytes, *, replace: bool) -> int:
        """Write a file to one agent, the same for every writer while it lives, and then to all others."""
        node, size = self._first(sorted(self.nodes), lambda client: client.put(key, [content], replace=replace))
        with self._dropped_on_failure(key):
            self._of_all(lambda client: client.put(key, [content], replace=True), without=node, may_be_none=True)
        return size

    @contextmanager
    def _dropped_on_failure(self, key: str) -> Iterator[None]:
        """Drop a file that not every node could take: a caller that gets an error must not find it there later."""
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError):
                self.delete(key)
            raise

    def _first(self, nodes: Iterable[str], ask: Callable[[AgentClient], _T]) -> tuple[str, _T]:
        """Return the first of some nodes whose agent answers, and the answer."""
        for node in nodes:
            with contextlib.suppress(AgentGoneError):
                return node, self._asked(node, ask)
        raise self._nobody()

    def first_that_has(self, key: str, ask: Callable[[AgentClient], _T]) -> _T:
        """Return the answer of the nearest agent that has a file.

        Raises:
            FileNotFoundError: No agent that answers has it.
            OSError: None answers.
        """
        known = self._holders.get(key)
        for node in sorted(self.nodes, key=lambda node: node != known):
            try:
                found = self._asked(node, ask)
            except (AgentGoneError, FileNotFoundError, KeyError):
                continue
            self._holders[key] = node
            return found
        if not self.nodes:
            raise self._nobody()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)

    def _of_all(
        self, ask: Callable[[AgentClient], _T], *, without: str | None = None, may_be_none: bool = False
    ) -> dict[str, _T]:
        """Return the answers of all agents that answer, the nearest first.

        Raises:
            OSError: None answers, unless there may be none; or one of them could not do it.
        """

        def one(node: str) -> list[_T]:
            try:
                return [self._asked(node, ask)]
            except AgentGoneError:
                return []

        nodes = [node for node in self.nodes if node != without]
        answers = zip(nodes, self._threads.map(one, nodes), strict=True)
        found = {node: answer[0] for node, answer in answers if answer}
        if not found and not may_be_none:
            raise self._nobody()
        return found

    def _asked(self, node: str, ask: Callable[[AgentClient], _T]) -> _T:
        try:
            return ask(self._clients[node])
        except AgentGoneError as error:
            self._leave_out(node, error)
            raise

    def _leave_out(self, node: str, error: OSError) -> None:
        with self._lock:
            is_new = node not in self._left_out
            if is_new:
                now = self._clock.monotonic()
                if now - self._readmitted_at.get(node, now) > _STEADY_S:
                    self._times_left_out[node] = 0
                self._left_out[node] = now + _AGAIN_S * 2 ** self._times_left_out[node]
                self._times_left_out[node] = min(self._times_left_out[node] + 1, _MOST_DOUBLINGS)
        if is_new:
            _log.info("the peer memory of node %s is left out: %s", node, error)

    def _look_for_those_left_out(self) -> None:
        """Ask agents that are left out whether they answer again, if it is time; waits for it only if all are."""
        now = self._clock.monotonic()
        with self._lock:
            due = [node for node, at in self._left_out.items() if at <= now]
            self._left_out.update(dict.fromkeys(due, math.inf))
        asked = [self._looks.submit(self._readmit, node) for node in due]
        if not self.nodes:
            wait(asked)

    def _readmit(self, node: str) -> None:
        client = self._clients[node]
        # Connections of before lead to a process that may be gone.
        client.close()
        try:
            client.greet()
        except OSError:
            with self._lock:
                self._looks_in_vain[node] += 1
                doublings = min(max(self._looks_in_vain[node] - _EARLY_LOOKS, 0), _MOST_DOUBLINGS)
                self._left_out[node] = self._clock.monotonic() + _AGAIN_S * 2**doublings
            return
        with self._lock:
            del self._left_out[node], self._looks_in_vain[node]
            self._readmitted_at[node] = self._clock.monotonic()
            self.num_readmitted += 1
        _log.info("the peer memory of node %s answers again", node)

    def _nobody(self) -> OSError:
        return OSError(errno.EHOSTUNREACH, f"none of the {len(self._clients)} agents of the peer memory answers")


class _PeerFile(StoredFile):
    """A file that is read from another agent once one stops answering."""

    def __init__(self, store: PeerMemoryStore, key: str, size: int) -> None:
        super().__init__(size)
        self._store, self._key = store, key

    def read_into(self, start: int, target: memoryview) -> int:
        """Fill a buffer from a place on; return how many bytes there were."""
        return self._store.first_that_has(self._key, lambda client: client.read_into(self._key, start, target))
