"""Runs the peer memory agents: one per node, in a detached actor that outlives driver and workers.

`NodeMemory` knows those of a run's nodes over its worker groups.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.session import answers_in_time, free_memory
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryAgent, PeerMemoryStore, partners
from ray_ulysses.peer_memory.wire import PROTOCOL, split_address
from ray_ulysses.run.ownership import peer_memory_key

if TYPE_CHECKING:
    from ray_ulysses.clock import Clock
    from ray_ulysses.config import Config

_log = get_logger(__name__)
_NAMESPACE = "ray-ulysses-peer-memory"
_ANSWER_S = 5.0
_START_S = 30.0
_FREE_SHARE = 3
_NICENESS = 5
"""Training threads take precedence over an agent on a busy core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """A node's agent."""

    address: str
    """Its ``host:port``."""
    limit_bytes: int
    """Its memory limit."""
    token: str = field(repr=False)
    """Shared by all agents of a run."""


class _Agent:
    """The actor around a node's agent; its process ends when the agent does."""

    def __init__(self, token: str, host: str, port: int, limit_bytes: int | None) -> None:
        os.nice(_NICENESS)
        limit = limit_bytes if limit_bytes is not None else max(free_memory(), 0) // _FREE_SHARE
        agent = PeerMemoryAgent(token, host=host, port=port, limit_bytes=limit, on_end=lambda: os._exit(0))
        self._contact = Contact(address=agent.start(), limit_bytes=limit, token=token)

    def contact(self) -> Contact:
        """Return where the agent is."""
        return self._contact


def ensure_agents(
    run_key: str,
    nodes: Mapping[str, str],
    limit_bytes: int | None = None,
    *,
    before: Mapping[str, Contact] = MappingProxyType({}),
    start_s: float = _START_S,
) -> dict[str, Contact]:
    """Return the agents of a run on some nodes that answer, and start missing ones.

    An agent of an earlier driver is found again with its content, and so is the token, which the first driver created.

    Args:
        run_key: Names the run; the same for every driver of it.
        nodes: The address to listen on of each node, by the node's Ray id.
        limit_bytes: Most memory per node; None for a third of what is free there.
        before: The agents as they were: one that is started anew has the token, the limit, since training has taken
            memory since the run began, and the port if that is free, of its predecessor, so that those who knew that
            one find it.
        start_s: Longest wait for those that are started, in seconds.
    """
    running = {node: handle for node in nodes if (handle := _find(_name(run_key, node))) is not None}
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
        _log.warning("peer memory: %d of %d nodes gave no answer and are left out", len(nodes) - len(found), len(nodes))
    return found


def end_agents(run_key: str) -> None:
    """End all agents of a run, and discard their content."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == _NAMESPACE and actor["name"].startswith(f"{run_key}/"):
            handle = _find(actor["name"])
            if handle is not None:
                ray.kill(handle)


def kill_agent(run_key: str, node: str) -> bool:
    """Kill the agent of a run on a node, as a fault does; return whether there was one."""
    handle = _find(_name(run_key, node))
    if handle is not None:
        ray.kill(handle)
    return handle is not None


def is_agent(actor: Mapping[str, Any], run_key: str) -> bool:
    """Return whether Ray's entry describes an agent of a run."""
    return actor["ActorClassName"] == _Agent.__name__ and str(actor["Name"]).startswith(f"{run_key}/")


def _name(run_key: str, node: str) -> str:
    # Agents of another version of the package are not found, and end once nothing is connected to them.
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
"""Longest wait for starting agents, while the workers start as well."""


class NodeMemory:
    """The peer memory agents of a run; does nothing where ``elastic.peer_memory`` is off."""

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
        """Start or find agents on the nodes of a new worker group; returns at once."""
        if self._is_on:
            self._prepared_at = self._clock.monotonic()
            known = dict(self._known)
            self._asked = self._pool.submit(ensure_agents, self._run_key, dict(nodes), self._limit_bytes, before=known)

    def keep(self, nodes: Mapping[str, str]) -> None:
        """Restart agents that have died; call often, returns at once.

        Running children find an agent that has its predecessor's port; the next generation finds all of them.
        """
        is_idle = self._asked is None or self._asked.done()
        if is_idle and self._clock.monotonic() - self._prepared_at >= _KEEP_EVERY_S:
            self.prepare(nodes)

    def of(self, members: Sequence[str], gone: Collection[str]) -> list[AgentAddresses] | None:
        """Return the agents that keep the state of a generation's children, and hold the previous state."""
        self._take_agents()
        agents, token = self._agents_but(gone)
        if not agents:
            return None
        # A node without an agent keeps its state on others.
        pairs = partners({node: self._zones.get(node) for node in dict.fromkeys(members) if node in agents})
        return [AgentAddresses(agents=agents, node=node, partner=pairs.get(node), token=token) for node in members]

    def newest_step(self, gone: Collection[str]) -> int | None:
        """Return the newest step whose whole state is in memory; None if there is none."""
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
        """Return the address of each agent, and the token of all."""
        token = next((one.token for one in self._known.values()), "")
        return {node: one.address for node, one in self._known.items() if node not in gone}, token

    def _take_agents(self) -> None:
        asked = self._asked
        if asked is None:
            return
        try:
            # Known agents serve until the missing ones have been restarted.
            found = asked.result(_AGAIN_S if self._known else _GROUP_START_S)
            self._asked = None
            nodes = ray.nodes()
            dead = {one["NodeID"] for one in nodes if not one["Alive"]}
            known = {node: one for node, one in {**self._known, **found}.items() if node not in dead}
            tokens = {one.token for one in found.values()} or {one.token for one in known.values()}
            self._known = {node: one for node, one in known.items() if one.token in tokens}
            self._zones |= {one["NodeID"]: one.get("Labels", {}).get(_ZONE_LABEL) for one in nodes}
        except TimeoutError:
            _log.debug("agents of peer memory are still being started")
        except (RayError, OSError, RuntimeError) as error:
            self._asked = None
            _log.warning("peer memory is not used: its agents could not be started (%s)", error)
