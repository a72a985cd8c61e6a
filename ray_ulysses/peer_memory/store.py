"""A `Store` in the memory of a run's nodes: each shard is on two nodes, a manifest on up to three, other files on all.

A shard is written to the agent on the writer's node, which copies it to the agent on the partner node. Each agent
verifies the bytes that it receives against checksums of the writer's memory before `create` returns. If the shard is in
`lent_memory`, this memory becomes the file on the writer's node without a copy. Any other file is first created on one
agent, which is the same for all writers, and then copied to other agents. A listing is the union over all agents.

A manifest is created after all of its shards are on two nodes, and readers see it as soon as the first agent has it. It
is copied to the two nodes that have the writer's own shard, because the state needs one of them anyway; a copy on every
node would cost each node the size of the manifest at every step. If the writer dies before it has copied the manifest,
the state stays committed as long as the first agent's node is alive, and disappears with that node.

An agent that was unreachable while a later attempt repeated a step still has the earlier attempt's manifest of this
step. Therefore, `create` fails if any agent has the key, and `open` returns the manifest of the newest attempt.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ray_ulysses.checkpoint.manifest import HEAD_BYTES, attempt_of
from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory.client import PROGRESS_S, AgentClient, AgentGoneError
from ray_ulysses.peer_memory.files import LentMemory
from ray_ulysses.run_names import MANIFEST_FILE, SHARD_KEY
from ray_ulysses.storage import AlreadyExistsError, Buffer, Store
from ray_ulysses.storage.store import StoredFile, checked_key


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentAddresses:
    """Addresses of all agents, as seen from one worker's node; can be pickled."""

    agents: Mapping[str, str]
    """``host:port`` of each agent, by node name."""
    node: str
    """Name of the worker's node."""
    partner: str | None
    """Name of the node that stores the copy of this node's shards, or None if there is only one node."""
    token: str = field(repr=False)
    """The run's secret."""

    def order(self) -> tuple[str, ...]:
        """Return the names of the nodes with an agent: this node, its partner, then the others in sorted order."""
        near = [node for node in (self.node, self.partner) if node in self.agents]
        return tuple(dict.fromkeys((*near, *sorted(self.agents))))  # type: ignore[arg-type]  # None is in no mapping


def partners(zones: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the partner of each node, which stores a copy of that node's shards.

    Each node is the partner of exactly one other node, so that all nodes need the same amount of memory. As many nodes
    as possible have a partner in another zone.

    Args:
        zones: Failure domain of each node, such as its availability zone, or None if unknown.

    Returns:
        Partner of each node, or None if there is only one node.
    """
    sizes = Counter(zone or "" for zone in zones.values())
    # Order the nodes by zone, the largest zone first. Ties are broken by name, so that the result is deterministic.
    ring = sorted(zones, key=lambda node: (-sizes[zones[node] or ""], zones[node] or "", node))
    if len(ring) < 2:
        return dict.fromkeys(ring)
    # A shift by the size of the largest zone moves every node out of its zone, unless the largest zone has more than
    # half of the nodes. In that case, a shift by the number of other nodes moves as many nodes as possible out of it.
    largest = max(sizes.values())
    shift = min(largest, len(ring) - largest) or 1
    return {node: ring[(index + shift) % len(ring)] for index, node in enumerate(ring)}


_MOST_AT_ONCE = 16
_LOOKS_AT_ONCE = 8
_AGAIN_S = 5.0
_EARLY_LOOKS = 6
"""Number of reconnection attempts with short pauses, because a dead agent is restarted within half a minute."""
_MOST_DOUBLINGS = 6
_STEADY_S = 60.0
"""If an agent does not fail for this many seconds, the pauses between attempts to reconnect are short again."""
_T = TypeVar("_T")
_log = get_logger(__name__)


class PeerMemoryStore(Store):
    """A run's files in the memory of its nodes; thread-safe.

    An agent that fails to answer once is excluded. Writers of shards try to reconnect to the agent, or to a new agent
    at the same address, after a few seconds. The pause doubles each time the agent is excluded again.

    Args:
        addresses: Addresses of the agents, and the worker's node.
        progress_s: Timeout for progress within a request, in seconds.
        clock: Source of time.
    """

    def __init__(
        self,
        addresses: AgentAddresses,
        *,
        progress_s: float = PROGRESS_S,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._clients = {
            node: AgentClient(addresses.agents[node], addresses.token, progress_s=progress_s)
            for node in addresses.order()
        }
        # Kept between requests, because saving a state sends several requests to all agents.
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="peer-memory-ask")
        # A separate pool, so that attempts to reconnect do not delay requests to agents that answer.
        self._looks = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="peer-memory-look")
        # Known nodes of each file, so that readers do not have to try all agents for every file.
        self._holders: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        # By node: time of the next reconnection attempt, last readmission, exclusions, failed reconnections in a row.
        self._left_out: dict[str, float] = {}
        self._readmitted_at: dict[str, float] = {}
        self._times_left_out: Counter[str] = Counter()
        self._looks_in_vain: Counter[str] = Counter()
        self.num_readmitted = 0
        """Number of times that an excluded agent was readmitted; such an agent may have missed writes."""
        self._is_degraded = False
        self._lent = LentMemory(self._clock)
        address = addresses.agents.get(addresses.node)
        self._near: AgentClient | None = None
        if address is not None:
            self._near = AgentClient(address, addresses.token, progress_s=progress_s, is_local=True)

    def lent_memory(self) -> LentMemory | None:
        """Return memory that this node's agent can use without copying, or None if the agent's Unix socket fails."""
        if self._near is None:
            return None
        try:
            self._near.drop_ended()
            self._near.greet()
        except OSError:
            return None
        return self._lent

    def open(self, key: str) -> StoredFile:
        """Open a file for reading on the nearest agent that has it; see `Store.open`."""
        if _is_manifest(checked_key(key)):
            self._find_newest(key)
        return _PeerFile(self, key, self.first_that_has(key, lambda client: client.sizes(key)[key]))

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file to the nodes that keep such files, and return its size; see `Store.create`."""
        return self._write(key, chunks, replace=False)

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a file, replacing an existing one, and return its size; see `Store.replace`."""
        return self._write(key, chunks, replace=True)

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file under a folder, by key in sorted order."""
        checked_key(folder)
        merged: dict[str, int | None] = {}
        holders: dict[str, list[str]] = {}
        for node, found in self._of_all(self.nodes, lambda client: client.sizes(folder)).items():
            found.pop(folder, None)
            for key, size in found.items():
                merged.setdefault(key, size)
                holders.setdefault(key, []).append(node)
        self.learn({key: tuple(nodes) for key, nodes in holders.items()})
        return dict(sorted(merged.items()))

    def holders(self, folder: str) -> dict[str, tuple[str, ...]]:
        """Return the nodes on which each file under a folder was last found, by key."""
        with self._lock:
            return {key: nodes for key, nodes in self._holders.items() if key.startswith(f"{folder}/")}

    def learn(self, holders: Mapping[str, tuple[str, ...]]) -> None:
        """Take over another rank's `holders`, so that this rank asks no other node for the files."""
        with self._lock:
            self._holders |= holders

    def delete(self, prefix: str) -> None:
        """Delete a file, or all files under a folder, on all nodes."""
        checked_key(prefix)
        self._of_all(self.nodes, lambda client: client.delete(prefix))
        with self._lock:
            for key in [key for key in self._holders if key == prefix or key.startswith(f"{prefix}/")]:
                del self._holders[key]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes whose agents are not excluded, nearest first."""
        with self._lock:
            return tuple(node for node in self._clients if node not in self._left_out)

    def close(self) -> None:
        """Close all connections; agents without other connections exit after a while."""
        self._threads.shutdown(wait=False)
        self._looks.shutdown(wait=False)
        for client in self._clients.values():
            client.close()
        if self._near is not None:
            self._near.close()

    def _write(self, key: str, chunks: Iterable[Buffer], *, replace: bool) -> int:
        if SHARD_KEY.match(checked_key(key)):
            return self._write_shard(key, chunks, replace=replace)
        # Copy the chunks, because the caller may reuse their memory.
        return self._write_small(key, b"".join(bytes(chunk) for chunk in chunks), replace=replace)

    def _write_shard(self, key: str, chunks: Iterable[Buffer], *, replace: bool) -> int:
        """Write a shard to the nearest agent that answers, which then copies the shard to the next agent."""
        self._look_for_those_left_out()
        # First find an agent that answers, because the chunks can only be read once.
        writer, _ = self._first(self.nodes, AgentClient.greet)
        size = self._asked(writer, lambda client: self._put_shard(client, key, chunks, replace=replace))
        with _undone_on_failure(lambda: self.delete(key)):
            for partner in self.nodes:
                if partner != writer and self._is_copied(key, writer, partner):
                    self._is_degraded = False
                    return size
        if len(self._clients) > 1 and not self._is_degraded:
            self._is_degraded = True
            _log.warning("peer memory stores a single copy, because only one of %d agents answers", len(self._clients))
        return size

    def _put_shard(self, client: AgentClient, key: str, chunks: Iterable[Buffer], *, replace: bool) -> int:
        is_near = self._near is not None and self._near.address == client.address
        if self._near is not None and is_near and self._lent.is_used and self.lent_memory() is not None:
            return self._near.put(key, chunks, replace=replace, lent=self._lent)
        return client.put(key, chunks, replace=replace, is_large=True)

    def _is_copied(self, key: str, writer: str, partner: str) -> bool:
        """Copy a file from one agent to another; return False if the target does not respond.

        Raises:
            OSError: The source does not respond, or the target's memory is full.
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

    def _write_small(self, key: str, content: bytes, *, replace: bool) -> int:
        """Write a file to the first agent in sorted order that answers, and then to others.

        A manifest is then written to the nearest two, which have the writer's shard, or to all if one of these does not
        answer. Any other file is written to all.

        Raises:
            AlreadyExistsError: An agent has the key, and `replace` is false.
        """
        nearest = self.nodes[:2]
        # Ask all agents, because the first agent may have been unreachable when the file was created on the others.
        if not replace and any(self._of_all(self.nodes, lambda client: client.sizes(key)).values()):
            raise AlreadyExistsError(f"{key} already exists and was not overwritten")
        writers: list[AgentClient] = []

        def put(client: AgentClient) -> int:
            size = client.put(key, [content], replace=replace)
            writers.append(client)
            return size

        def undo() -> None:
            for client in writers:
                with contextlib.suppress(OSError):
                    client.delete(key)

        node, size = self._first(sorted(self.nodes), put)
        # Other agents may have got another attempt's file meanwhile, which must neither be replaced nor deleted.
        with _undone_on_failure(undo):
            others = [other for other in self.nodes if other != node]
            first = [other for other in others if other in nearest] if _is_manifest(key) else others
            self._of_all(first, put, may_be_none=True)
            if not {*nearest} <= {*self.nodes}:
                self._of_all([other for other in others if other not in first], put, may_be_none=True)
        return size

    def _first(self, nodes: Iterable[str], ask: Callable[[AgentClient], _T]) -> tuple[str, _T]:
        """Call `ask` for the agents of the nodes, in order, until an agent answers; return its node and the answer."""
        for node in nodes:
            with contextlib.suppress(AgentGoneError):
                return node, self._asked(node, ask)
        raise self._nobody()

    def first_that_has(self, key: str, ask: Callable[[AgentClient], _T]) -> _T:
        """Call `ask` for each agent, known holders first, until an agent has the file, and return its answer.

        Raises:
            FileNotFoundError: Some agents answer, but none of them has the file.
            OSError: No agent answers.
        """
        known = self._holders.get(key, ())
        for node in sorted(self.nodes, key=lambda node: node not in known):
            try:
                found = self._asked(node, ask)
            except (AgentGoneError, FileNotFoundError, KeyError):
                continue
            if node not in known:
                self.learn({key: (node,)})
            return found
        if not self.nodes:
            raise self._nobody()
        raise _not_found(key)

    def _find_newest(self, key: str) -> None:
        """Make readers of a manifest ask the agents that have the newest attempt's version of it.

        The versions of earlier attempts are not part of the run, because an attempt only saves steps after its start.

        Raises:
            FileNotFoundError: Some agents answer, but none of them has the file.
            OSError: No agent answers.
        """

        def head(client: AgentClient) -> bytes:
            target = bytearray(HEAD_BYTES)
            with contextlib.suppress(FileNotFoundError):
                return bytes(target[: client.read_into(key, 0, memoryview(target))])
            return b""

        heads = {node: found for node, found in self._of_all(self.nodes, head).items() if found}
        if not heads:
            raise _not_found(key)
        newest = max(heads.values(), key=attempt_of)
        self.learn({key: tuple(node for node, found in heads.items() if found == newest)})

    def _of_all(
        self, nodes: Sequence[str], ask: Callable[[AgentClient], _T], *, may_be_none: bool = False
    ) -> dict[str, _T]:
        """Call `ask` for the agents of the nodes in parallel, and return the answers by node, in the same order.

        Raises:
            OSError: An agent answers with an error, or no agent answers and `may_be_none` is false. All calls have
                ended.
        """

        def one(node: str) -> list[_T] | Exception:
            try:
                return [self._asked(node, ask)]
            except AgentGoneError:
                return []
            except Exception as error:
                return error

        answers = dict(zip(nodes, self._threads.map(one, nodes), strict=True))
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        found = {node: answer[0] for node, answer in answers.items() if isinstance(answer, list) and answer}
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
            _log.info("excluding the peer memory of node %s: %s", node, error)

    def _look_for_those_left_out(self) -> None:
        """Try to reconnect to excluded agents whose pause is over; blocks only if all agents are excluded."""
        now = self._clock.monotonic()
        with self._lock:
            due = [node for node, at in self._left_out.items() if at <= now]
            self._left_out.update(dict.fromkeys(due, math.inf))
        asked = [self._looks.submit(self._readmit, node) for node in due]
        if not self.nodes:
            wait(asked)

    def _readmit(self, node: str) -> None:
        client = self._clients[node]
        # Idle connections may lead to a dead process.
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
        return OSError(errno.EHOSTUNREACH, f"none of the {len(self._clients)} peer memory agents answers")


@contextmanager
def _undone_on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if a node fails to store a file, because a file whose creation failed must not appear later."""
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):
            undo()
        raise


def _is_manifest(key: str) -> bool:
    return key.rpartition("/")[2] == MANIFEST_FILE


def _not_found(key: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)


class _PeerFile(StoredFile):
    """A file that is read from the nearest agent that has it; switches to another agent after a failure."""

    def __init__(self, store: PeerMemoryStore, key: str, size: int) -> None:
        super().__init__(size)
        self._store, self._key = store, key

    def read_into(self, start: int, target: memoryview) -> int:
        return self._store.first_that_has(self._key, lambda client: client.read_into(self._key, start, target))
