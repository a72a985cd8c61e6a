"""Keeps the peer memory of a run: one vault agent per node, in a detached actor that outlives driver and workers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_ulysses.cluster.session import free_memory
from ray_ulysses.logging import get_logger
from ray_ulysses.vault import VaultAgent
from ray_ulysses.vault.wire import PROTOCOL, split_address

_log = get_logger(__name__)
_NAMESPACE = "ray-ulysses-peer-memory"
_ANSWER_S = 5.0
_START_S = 30.0
_FREE_SHARE = 3
_NICENESS = 5
"""Training's own threads come first where an agent would need their cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VaultAgents:
    """The agents of a run.

    Attributes:
        addresses: ``host:port`` of each node's agent, by the node's Ray id; nodes that gave none are left out.
        limits: Most memory of each in bytes, by the node's Ray id.
        token: The secret that both sides of a connection to them know.
    """

    addresses: Mapping[str, str]
    limits: Mapping[str, int]
    token: str = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contact:
    address: str
    limit_bytes: int
    token: str = field(repr=False)


class _Agent:
    """The actor around a node's agent; its process ends when the agent does."""

    def __init__(self, token: str, host: str, port: int, limit_bytes: int | None) -> None:
        os.nice(_NICENESS)
        limit = limit_bytes if limit_bytes is not None else max(free_memory(), 0) // _FREE_SHARE
        agent = VaultAgent(token, host=host, port=port, limit_bytes=limit, on_end=lambda: os._exit(0))
        self._contact = _Contact(address=agent.start(), limit_bytes=limit, token=token)

    def contact(self) -> _Contact:
        """Return where the agent is."""
        return self._contact


def ensure_agents(
    run_key: str,
    nodes: Mapping[str, str],
    limit_bytes: int | None = None,
    *,
    before: VaultAgents | None = None,
    start_s: float = _START_S,
) -> VaultAgents:
    """Return the agents of a run on some nodes; those that are not there yet are started.

    An agent that an earlier driver has started is found again, with what it holds, and so is the token, which the first
    driver has made.

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
    before = before if before is not None else VaultAgents(addresses={}, limits={}, token=secrets.token_hex(16))
    token = next((one.token for one in found.values()), before.token)
    started = {
        node: _start(
            _name(run_key, node),
            node,
            (token, host, _port(before.addresses.get(node)), limit_bytes or before.limits.get(node)),
        )
        for node, host in nodes.items()
        if node not in running
    }
    found |= _contacts(started, start_s)
    found = {node: one for node, one in found.items() if one.token == token}
    if len(found) < len(nodes):
        _log.warning("peer memory: %d of %d nodes gave no answer and are left out", len(nodes) - len(found), len(nodes))
    return VaultAgents(
        addresses={node: one.address for node, one in found.items()},
        limits={node: one.limit_bytes for node, one in found.items()},
        token=token,
    )


def end_agents(run_key: str) -> None:
    """End all agents of a run; what they hold is gone."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == _NAMESPACE and actor["name"].startswith(f"{run_key}/"):
            handle = _find(actor["name"])
            if handle is not None:
                ray.kill(handle)


def kill_agent(run_key: str, node: str) -> bool:
    """Kill the agent of a run on a node, as a fault would; return whether there was one."""
    handle = _find(_name(run_key, node))
    if handle is not None:
        ray.kill(handle)
    return handle is not None


def is_agent(actor: Mapping[str, Any], run_key: str) -> bool:
    """Return whether Ray's entry of an actor is that of an agent of a run."""
    return actor["ActorClassName"] == _Agent.__name__ and str(actor["Name"]).startswith(f"{run_key}/")


def _name(run_key: str, node: str) -> str:
    # An agent of another version of the package is not found, and ends when nobody is connected to it.
    return f"{run_key}/{PROTOCOL}/{node}"


def _port(address: str | None) -> int:
    return split_address(address)[1] if address is not None else 0


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


def _contacts(handles: Mapping[str, Any], timeout_s: float) -> dict[str, _Contact]:
    """Return where each agent is that answers in time."""
    asked = {handle.contact.remote(): node for node, handle in handles.items()}
    if not asked:
        return {}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    found: dict[str, _Contact] = {}
    for answer in answered:
        try:
            found[asked[answer]] = ray.get(answer)
        except RayError as error:
            _log.info("the vault agent of node %s is not there (%s)", asked[answer], error)
    return found
