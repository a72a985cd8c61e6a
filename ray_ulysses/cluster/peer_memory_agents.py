"""Runs the peer memory agents: one detached actor per node, which outlives the driver and the workers.

`NodeMemory` manages a run's agents across worker groups.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.cluster.session import answers_in_time, free_memory
from ray_ulysses.config import Config
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryAgent, PeerMemoryStore, partners
from ray_ulysses.peer_memory.wire import PROTOCOL, split_address
from ray_ulysses.run.ownership import peer_memory_key

_log = get_logger(__name__)
_NAMESPACE = "ray-ulysses-peer-memory"
_ANSWER_S = 5.0
_START_S = 30.0
_LOOKUPS_AT_ONCE = 32
_FREE_SHARE = 3
_NICENESS = 5
"""Niceness of an agent's process, so that training threads take precedence on a busy core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """Connection details of a node's agent."""

    address: str
    """``host:port`` of the agent."""
    limit_bytes: int
    """Memory limit of the agent, in bytes."""
    token: str = field(repr=False)
    """Authentication token, shared by all agents of a run."""


class _Agent:
    """Actor that runs a node's agent; the actor's process ends with the agent."""

    def __init__(self, token: str, host: str, port: int, limit_bytes: int | None) -> None:
        os.nice(_NICENESS)
        limit = limit_bytes if limit_bytes is not None else max(free_memory(), 0) // _FREE_SHARE
        agent = PeerMemoryAgent(token, host=host, port=port, limit_bytes=limit, on_end=lambda: os._exit(0))
        self._contact = Contact(address=agent.start(), limit_bytes=limit, token=token)

    def contact(self) -> Contact:
        return self._contact


def ensure_agents(
    run_key: str,
    nodes: Mapping[str, str],
    limit_bytes: int | None = None,
    *,
    before: Mapping[str, Contact] = MappingProxyType({}),
    start_s: float = _START_S,
) -> dict[str, Contact]:
    """Return the agents on the given nodes, starting missing ones; nodes that do not respond are left out.

    Agents of an earlier driver are reused, with their content and with the token that the first driver created.

    Args:
        run_key: Identifies the run; the same for all of its drivers.
        nodes: Address on which each node's agent listens, by Ray node ID.
        limit_bytes: Memory limit per node, or None for a third of the free memory.
        before: Agents known so far. A replacement reuses its predecessor's token, port (if free) and memory limit:
            clients know the port, and training occupies memory that was free before.
        start_s: Longest wait for new agents, in seconds.
    """
    with ThreadPoolExecutor(_LOOKUPS_AT_ONCE) as pool:
        handles = pool.map(lambda node: _find(_name(run_key, node)), nodes)
        running = {node: handle for node, handle in zip(nodes, handles, strict=True) if handle is not None}
    found = _contacts(running, _ANSWER_S)
    token = next((one.token for one in (*found.values(), *before.values())), None) or secrets.token_hex(16)
    started = {}
    for node in nodes.keys() - running.keys():
        known = before.get(node, Contact(address=":0", limit_bytes=0, token=token))
        limit = limit_bytes or known.limit_bytes or None
        port = split_address(known.address)[1]
        started[node] = _start(_name(run_key, node), node, (token, nodes[node], port, limit))
    found |= _contacts(started, start_s)
    found = {node: one for node, one in found.items() if one.token == token}
    if len(found) < len(nodes):
        _log.warning("peer memory: %d of %d nodes are left out: no response", len(nodes) - len(found), len(nodes))
    return found


def end_agents(run_key: str) -> None:
    """End all agents of a run, and discard their content."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        is_own = actor["namespace"] == _NAMESPACE and actor["name"].startswith(f"{run_key}/")
        if is_own and (handle := _find(actor["name"])) is not None:
            ray.kill(handle)


def kill_agent(run_key: str, node: str) -> bool:
    """Kill a run's agent on a node to simulate a fault; return whether the node had an agent."""
    handle = _find(_name(run_key, node))
    if handle is not None:
        ray.kill(handle)
    return handle is not None


def is_agent(actor: Mapping[str, Any], run_key: str) -> bool:
    """Return whether an entry of Ray's actor table describes an agent of the run."""
    return actor["ActorClassName"] == _Agent.__name__ and str(actor["Name"]).startswith(f"{run_key}/")


def _name(run_key: str, node: str) -> str:
    # Agents of other protocol versions have other names, and end once their last client disconnects.
    return f"{run_key}/{PROTOCOL}/{node}"


def _find(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=_NAMESPACE)
    except (ValueError, RayError):
        return None


def _start(name: str, node: str, arguments: tuple[str, str, int, int | None]) -> Any:
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Agent)
    return actor.options(
        name=name,
        namespace=_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    ).remote(*arguments)


def _contacts(handles: Mapping[str, Any], timeout_s: float) -> dict[str, Contact]:
    return answers_in_time({handle.contact.remote(): node for node, handle in handles.items()}, timeout_s)


_ZONE_LABEL = "ray.io/availability-zone"
_AGAIN_S = 0.5
_KEEP_EVERY_S = 15.0
_GROUP_START_S = 45.0
"""Longest wait for agents that start while the workers start, in seconds."""


class NodeMemory:
    """Peer memory agents of a run; there are none if ``elastic.peer_memory`` is off."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._prepared_at = -math.inf
        self._is_on = config.elastic.peer_memory
        gib = config.elastic.peer_memory_gib
        self._limit_bytes = None if gib is None else int(gib * 2**30)
        self._run_key = peer_memory_key(config) if self._is_on else ""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peer-memory-agents")
        self._asked: Future[dict[str, Contact]] | None = None
        self._known: dict[str, Contact] = {}
        self._zones: dict[str, str | None] = {}

    def prepare(self, nodes: Mapping[str, str]) -> None:
        """Start or find agents on a new worker group's nodes, without waiting for them."""
        if self._is_on:
            self._prepared_at = self._clock.monotonic()
            known = dict(self._known)
            self._asked = self._pool.submit(ensure_agents, self._run_key, dict(nodes), self._limit_bytes, before=known)

    def keep(self, nodes: Mapping[str, str]) -> None:
        """Restart dead agents, without waiting for them; call this method often.

        Running children find an agent that reuses its predecessor's port; the next generation gets all addresses.
        """
        is_idle = self._asked is None or self._asked.done()
        if is_idle and self._clock.monotonic() - self._prepared_at >= _KEEP_EVERY_S:
            self.prepare(nodes)

    def of(self, members: Sequence[str], gone: Collection[str]) -> list[AgentAddresses] | None:
        """Return the agent addresses for each member of a generation, or None if no agent is known."""
        self._take_agents()
        agents, token = self._agents_but(gone)
        if not agents:
            return None
        # The workers of a node without an agent store their state on other nodes.
        pairs = partners({node: self._zones.get(node) for node in dict.fromkeys(members) if node in agents})
        return [AgentAddresses(agents=agents, node=node, partner=pairs.get(node), token=token) for node in members]

    def newest_step(self, gone: Collection[str]) -> int | None:
        """Return the newest step whose complete state is in peer memory, or None if there is none."""
        agents, token = self._agents_but(gone)
        if not agents:
            return None
        store = PeerMemoryStore(AgentAddresses(agents=agents, node=next(iter(agents)), partner=None, token=token))
        try:
            manifest = newest_committed(store, "sizes").manifest
        except OSError:
            return None
        finally:
            store.close()
        return None if manifest is None else manifest.step

    def _agents_but(self, gone: Collection[str]) -> tuple[dict[str, str], str]:
        """Return the addresses of agents by node, without the nodes in `gone`, and the common token."""
        token = next((one.token for one in self._known.values()), "")
        return {node: one.address for node, one in self._known.items() if node not in gone}, token

    def _take_agents(self) -> None:
        asked = self._asked
        if asked is None:
            return
        try:
            # The known agents are used until missing agents have been restarted.
            found = asked.result(_AGAIN_S if self._known else _GROUP_START_S)
            self._asked = None
            nodes = ray.nodes()
            dead = {one["NodeID"] for one in nodes if not one["Alive"]}
            known = {node: one for node, one in {**self._known, **found}.items() if node not in dead}
            tokens = {one.token for one in found.values()} or {one.token for one in known.values()}
            self._known = {node: one for node, one in known.items() if one.token in tokens}
            self._zones |= {one["NodeID"]: one.get("Labels", {}).get(_ZONE_LABEL) for one in nodes}
        except TimeoutError:
            _log.debug("peer memory agents are still starting")
        except (RayError, OSError, RuntimeError) as error:
            self._asked = None
            _log.warning("peer memory is not used: its agents could not be started (%s)", error)
