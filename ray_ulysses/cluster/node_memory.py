"""Knows the vault agents of a run's nodes, over worker groups, for whoever starts children or judges a failure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.vault_agents import VaultAgents, ensure_agents
from ray_ulysses.logging import get_logger
from ray_ulysses.run.ownership import vault_key
from ray_ulysses.vault import VaultAddresses, VaultStore, partners

if TYPE_CHECKING:
    from ray_ulysses.clock import Clock
    from ray_ulysses.config import Config

_log = get_logger(__name__)
_ZONE_LABEL = "ray.io/availability-zone"
_AGAIN_S = 0.5
_KEEP_EVERY_S = 15.0
_START_S = 45.0
"""Longest wait for agents that are being started, while the workers start as well."""


class NodeMemory:
    """The vault agents of a run; does nothing where ``elastic.peer_memory`` is off.

    Args:
        config: The run's configuration.
        clock: Time.
    """

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._prepared_at = -math.inf
        self._is_on = config.elastic.peer_memory
        gib = config.elastic.peer_memory_gib
        self._limit_bytes = None if gib is None else int(gib * 2**30)
        self._run_key = vault_key(config) if self._is_on else ""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vault-agents")
        self._asked: Future[VaultAgents] | None = None
        self._known = VaultAgents(addresses={}, limits={}, token="")
        self._zones: dict[str, str | None] = {}

    def prepare(self, nodes: Mapping[str, str]) -> None:
        """Start agents on the nodes of a new worker group, or find those of before; returns at once.

        Args:
            nodes: The address of each node, by its Ray id.
        """
        if self._is_on:
            self._prepared_at = self._clock.monotonic()
            before = self._known if self._known.token else None
            self._asked = self._pool.submit(ensure_agents, self._run_key, dict(nodes), self._limit_bytes, before=before)

    def keep(self, nodes: Mapping[str, str]) -> None:
        """Start agents that have died again; to be called often, returns at once.

        Those that train find one that has the port of its predecessor; the next generation finds each.

        Args:
            nodes: As for `prepare`.
        """
        is_idle = self._asked is None or self._asked.done()
        if is_idle and self._clock.monotonic() - self._prepared_at >= _KEEP_EVERY_S:
            self.prepare(nodes)

    def of(self, members: Sequence[str], gone: Collection[str]) -> list[VaultAddresses] | None:
        """Return where the children of a generation keep their state in memory, and find that of before.

        Args:
            members: The node of each rank.
            gone: Nodes that are dead.
        """
        self._take_agents()
        agents = self._agents_but(gone)
        if not agents:
            return None
        # A node without an agent keeps its state with others.
        pairs = partners({node: self._zones.get(node) for node in dict.fromkeys(members) if node in agents})
        token = self._known.token
        return [VaultAddresses(agents=agents, node=node, partner=pairs.get(node), token=token) for node in members]

    def newest_step(self, gone: Collection[str]) -> int | None:
        """Return the step of the newest state that is whole in memory; None if there is none."""
        agents = self._agents_but(gone)
        if not agents:
            return None
        node = next(iter(agents))
        store = VaultStore(VaultAddresses(agents=agents, node=node, partner=None, token=self._known.token))
        try:
            manifest = newest_committed(store, "sizes").manifest
        except OSError:
            return None
        finally:
            store.close()
        return None if manifest is None else manifest.step

    def _agents_but(self, gone: Collection[str]) -> dict[str, str]:
        return {node: address for node, address in self._known.addresses.items() if node not in gone}

    def _take_agents(self) -> None:
        """Note the agents that were started."""
        asked = self._asked
        if asked is None:
            return
        try:
            # The agents of before serve until those that are missing have been started again.
            found = asked.result(_AGAIN_S if self._known.addresses else _START_S)
            self._asked = None
            nodes, known = ray.nodes(), self._known
            dead = {one["NodeID"] for one in nodes if not one["Alive"]}
            before = known.addresses if known.token == found.token else {}
            addresses = {node: address for node, address in {**before, **found.addresses}.items() if node not in dead}
            self._known = VaultAgents(addresses=addresses, limits={**known.limits, **found.limits}, token=found.token)
            self._zones |= {one["NodeID"]: one.get("Labels", {}).get(_ZONE_LABEL) for one in nodes}
        except TimeoutError:
            _log.debug("agents of peer memory are still being started")
        except (RayError, OSError, RuntimeError) as error:
            self._asked = None
            _log.warning("peer memory is not used: its agents could not be started (%s)", error)
