"""Peer memory at 8 to 128 nodes of 8 ranks: what a save, a drop and a loss cost beside the shards themselves.

Agents, clients, store, save, commit, choice and load are the real code, over TCP and Unix sockets. The agents are
threads of two processes, and the ranks take turns in one more process. Only the tensors are small: there are as many as
in a model with 70B parameters, so that manifests and shard headers have their real length.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.runner import Benchmark, Record, columns, header, main, met, say
from benchmarks.scale.agents import TOKEN, Cluster, Tallies, Tally, swap
from benchmarks.scale.slope import slope
from ray_ulysses.checkpoint import (
    CheckpointMeta,
    Manifest,
    ShardedState,
    StateDescription,
    TensorPart,
    TensorSpec,
    save,
    shards,
)
from ray_ulysses.checkpoint.background import Saved
from ray_ulysses.checkpoint.checksums import block_sums, checksum, table_bytes
from ray_ulysses.checkpoint.choice import newest_committed
from ray_ulysses.checkpoint.intervals import Interval, partition
from ray_ulysses.checkpoint.load import load_parts
from ray_ulysses.checkpoint.messenger import SingleRankMessenger
from ray_ulysses.checkpoint.save import save_checkpoint
from ray_ulysses.checkpoint.shards import ShardEntry
from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.peer_memory_agents import Contact, NodeMemory
from ray_ulysses.peer_memory import AgentAddresses, PeerMemoryStore, partners
from ray_ulysses.peer_memory.files import LentBuffer
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import Store
from ray_ulysses.trainer.context import PeerStore
from ray_ulysses.trainer.peer_memory_keeper import PeerMemoryKeeper

RANKS_PER_NODE, SAMPLE, STEP = 8, 16, 2
ELEMENTS = 16
"""Elements of each tensor on each rank."""
GOAL_BYTES, GOAL_SLOPE, GOAL_TOTAL_SLOPE = 1_000_000, 0.1, 1.1
META = CheckpointMeta(sp_size=8, cursor={}, digest="00000000000000ff", tokens=1)


def stores_of(nodes: Sequence[str], addresses: dict[str, str]) -> Iterator[PeerMemoryStore]:
    """Open the store of each rank on the nodes."""
    pairs = partners(dict.fromkeys(nodes))
    for node in nodes:
        for _ in range(RANKS_PER_NODE):
            yield PeerMemoryStore(AgentAddresses(agents=addresses, node=node, partner=pairs[node], token=TOKEN))


def description_of(world_size: int, num_layers: int) -> StateDescription:
    """Return the state of Llama 3 70B after some steps in bf16, with small tensors, in the order of a rank's parts."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")  # fmt: skip
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.{one}.weight" for n in range(num_layers) for one in parts),
    ]
    names += ["model.norm.weight", "lm_head.weight"]
    spec = TensorSpec(shape=(ELEMENTS, world_size), dtype="F32")
    tensors = {f"{kind}/{name}": spec for name in names for kind in ("fp32", "exp_avg", "exp_avg_sq")}
    tensors |= {f"model/{name}": TensorSpec(shape=spec.shape, dtype="BF16") for name in names}
    return StateDescription(tensors=tensors, optimizer_step=2, groups=({"lr": 1e-5},), group_of=dict.fromkeys(names, 0))


def held_by(description: StateDescription, rank: int, world_size: int) -> tuple[tuple[str, int, int, torch.dtype], ...]:
    """Return key, start, number of elements and dtype of each interval of a rank."""
    found = []
    for key, spec in description.tensors.items():
        start, stop = partition(spec.num_elements, world_size, rank)
        if start < stop:
            found.append((key, start, stop - start, torch.float32 if spec.dtype == "F32" else torch.bfloat16))
    return tuple(found)


def parts_of(description: StateDescription, rank: int, world_size: int, memory: Any = None) -> tuple[TensorPart, ...]:
    """Return a rank's parts, in the given memory or in new memory."""
    held = held_by(description, rank, world_size)
    size = sum(count * dtype.itemsize for _, _, count, dtype in held)
    whole = (
        torch.frombuffer(bytearray(size) if memory is None else memory, dtype=torch.uint8) if size else torch.empty(0)
    )
    parts, offset = [], 0
    for key, start, count, dtype in held:
        tensor = whole[offset : offset + count * dtype.itemsize].view(dtype)
        parts.append(TensorPart(key=key, start=start, tensor=tensor))
        offset += count * dtype.itemsize
    return tuple(parts)


class Whole:
    """The parts of a rank that writes its shard in one piece, with the same bytes and requests as tensor by tensor."""

    sums = b""

    def __init__(self, held: tuple[tuple[str, int, int, torch.dtype], ...], memory: memoryview) -> None:
        self._held, self._memory = held, memory

    def write(self, store: Store, folder: str, file: str) -> ShardEntry:
        """Write the shard like `write_shard`."""
        sizes = [count * dtype.itemsize for _, _, count, dtype in self._held]
        tensors = [(key, dtype, [count], size) for (key, _, count, dtype), size in zip(self._held, sizes, strict=True)]
        sums_bytes = table_bytes(sizes)
        starts = {key: start for key, start, _, _ in self._held}
        head = shards.safetensors_header(
            [*tensors, (shards.SUMS_KEY, torch.uint8, [sums_bytes], sums_bytes)],
            {"format": "ray-ulysses", "starts": json.dumps(starts)},
        )
        held = [Interval(key=key, start=start, stop=start + count) for key, start, count, _ in self._held]
        intervals = shards.place_intervals(list(zip(held, sizes, strict=True)), len(head))
        # All tensors are zero and equally large.
        Whole.sums = Whole.sums or b"".join(block_sums(bytes(stored.num_bytes)) for stored in intervals)
        num_bytes = store.create(f"{folder}/{file}", [head, self._memory, self.sums])
        return ShardEntry(
            file=file, num_bytes=num_bytes, header_bytes=len(head), header_sum=checksum(head),
            sums_sum=checksum(self.sums), intervals=intervals,
        )  # fmt: skip


def write_shard(store: Store, folder: str, file: str, parts: Any) -> ShardEntry:
    """Write a rank's parts, one by one or in one piece."""
    return (
        parts.write(store, folder, file) if isinstance(parts, Whole) else shards.write_shard(store, folder, file, parts)
    )


class Relay:
    """A messenger for ranks that take turns: rank 0 comes last and finds what the others sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_last = False

    def gather(self, value: Any) -> list[Any] | None:
        """Keep the value, or return all values on rank 0."""
        if not self.is_last:
            self.sent.append(value)
            return None
        return [value, *self.sent]

    def broadcast(self, value: Any) -> Any:
        """Return what rank 0 says after it has committed."""
        return value if self.is_last else (None, False, False)


class Ranks:
    """All ranks of a world, which take turns in this process."""

    def __init__(self, cluster: Cluster, num_layers: int, tallies: Tallies) -> None:
        self.tallies = tallies
        self.world_size = RANKS_PER_NODE * len(cluster.nodes)
        self.description = description_of(self.world_size, num_layers)
        self.stores = list(stores_of(cluster.nodes, cluster.addresses))
        self._buffers: list[LentBuffer] = []
        self.tallies.member = 0
        worker = SimpleNamespace(
            rank=0,
            world_size=self.world_size,
            device=torch.device("cpu"),
            clock=SystemClock(),
            on_event=lambda *_: None,
        )
        peers = PeerStore(store=self.stores[0], messenger=SingleRankMessenger(), lent=None)
        context: Any = SimpleNamespace(worker=worker, attempt=1, peer_memory=peers)
        recorder: Any = SimpleNamespace(sync=lambda: None)
        self.keeper = PeerMemoryKeeper(context, recorder)
        self.keeper.resumed(0, None)

    def save(self) -> dict[str, float]:
        """Save and commit a state on all ranks; return CPU seconds of rank 0 and of a rank, and bytes of a message."""
        relay, cpus = Relay(), []
        for rank in range(1, self.world_size):
            is_sampled = rank % max(self.world_size // SAMPLE, 1) == 0
            begun = time.process_time()
            self._save_one(rank, relay, is_whole=not is_sampled)
            cpus += [time.process_time() - begun] if is_sampled else []
        relay.is_last = True
        begun, ref = time.process_time(), self._save_one(0, relay, is_whole=False)
        self.keeper._held |= {1, STEP}
        self._saved = Saved(ref=ref, meta=META, stall_s=0.0, save_s=0.0)
        sent = max(len(pickle.dumps(value)) for value in relay.sent)
        return {"rank_0_cpu_s": time.process_time() - begun, "rank_cpu_s": median(cpus), "message_bytes": sent}

    def drop(self) -> None:
        """Do on rank 0 what follows a commit: drop the previous state."""
        self.tallies.member = 0
        self.keeper._on_saved(self._saved)

    def _save_one(self, rank: int, relay: Relay, *, is_whole: bool) -> Any:
        self.tallies.member = rank
        held, store = held_by(self.description, rank, self.world_size), self.stores[rank]
        lent = store.lent_memory()
        assert lent is not None
        buffer = lent.make(sum(count * dtype.itemsize for _, _, count, dtype in held))
        self._buffers.append(buffer)
        parts: Any = Whole(held, buffer.memory)
        if not is_whole:
            parts = parts_of(self.description, rank, self.world_size, buffer.memory)
        return save_checkpoint(
            store, step=STEP, attempt=1, rank=rank, world_size=self.world_size,
            state=ShardedState(parts=parts, description=self.description), meta=META, messenger=relay, read_back=False,
        )  # fmt: skip


def per_node(
    cluster: Cluster, agents: dict[str, Tally], ranks: dict[Any, Tally], messages: dict[str, int]
) -> dict[str, float]:
    """Return the control traffic of the nodes, in bytes between nodes, bytes within a node, and requests."""
    of_address = {address: node for node, address in cluster.addresses.items()}
    network, inside = Counter(messages), Counter[str]()
    network.update({node: agents[node].control if node in agents else 0 for node in cluster.nodes})
    distinct: defaultdict[int, set[str]] = defaultdict(set)
    for (rank, address), tally in ranks.items():
        node = cluster.nodes[rank // RANKS_PER_NODE]
        if address is not None:
            distinct[rank].add(address)
        if of_address.get(address) == node:
            network[node] -= tally.control
            inside[node] += tally.control
        else:
            network[node] += tally.control
    requests = Counter({node: tally.requests.total() for node, tally in agents.items()})
    others = [len(found) for rank, found in distinct.items() if rank]
    return {
        "network_median": median(network[node] for node in cluster.nodes),
        "network_mean": sum(network.values()) / len(cluster.nodes),
        "network_max": max(network.values()),
        "network_total": sum(network.values()),
        "inside_mean": sum(inside.values()) / len(cluster.nodes),
        "requests_median": median(requests[node] for node in cluster.nodes),
        "requests_max": max(requests.values()),
        "requests_total": requests.total(),
        "agents_of_rank_0": len(distinct[0]),
        "agents_of_another_rank": max(others, default=0),
    }


def lose(cluster: Cluster, ranks: Ranks, lost: Sequence[str], silent: Sequence[str]) -> dict[str, Any]:
    """Re-form without some nodes: rank 0 chooses the state, and a sample of the ranks loads it."""
    nodes = [node for node in cluster.nodes if node not in (*lost, *silent)]
    addresses = {node: address for node, address in cluster.addresses.items() if node not in lost}
    world_size, tallies = RANKS_PER_NODE * len(nodes), ranks.tallies
    stores = list(stores_of(nodes, addresses))
    tallies.take(), cluster.take()
    tallies.member = 0
    begun, cpu_s = time.monotonic(), time.process_time()
    manifest = newest_committed(stores[0], "sizes").manifest
    assert manifest is not None
    choose_s, choose_cpu_s = time.monotonic() - begun, time.process_time() - cpu_s
    content, holders = manifest.to_bytes(), stores[0].holders(manifest.ref.folder)
    chosen = cluster.take()
    sample = range(0, world_size, max(world_size // SAMPLE, 1))
    cpus, walls = [], []
    for rank in sample:
        tallies.member = rank
        begun, cpu_s = time.monotonic(), time.process_time()
        found = Manifest.from_bytes(content)
        stores[rank].learn(holders)
        load_parts(stores[rank], found, parts_of(found.state, rank, world_size))
        cpus.append(time.process_time() - cpu_s)
        walls.append(time.monotonic() - begun)
    loaded, taken = cluster.take(), tallies.take()
    distinct: defaultdict[int, set[str]] = defaultdict(set)
    control: Counter[int] = Counter()
    for (rank, address), tally in taken.items():
        if address is not None and rank:
            distinct[rank].add(address)
            control[rank] += tally.control
    for store in stores:
        store.close()
    asked = Counter({node: tally.requests.total() for node, tally in loaded.items()})
    return {
        "choose_s": choose_s,
        "choose_cpu_s": choose_cpu_s,
        "choose_requests": sum(tally.requests.total() for tally in chosen.values()),
        "choose_bytes": sum(tally.control for tally in chosen.values()),
        "message_bytes": len(pickle.dumps((content, holders))),
        "sampled": len(sample),
        "rank_requests": asked.total() / len(sample),
        "rank_control_bytes": median(control[rank] for rank in sample if rank),
        "rank_agents": max(len(found) for found in distinct.values()),
        "busiest_share": max(asked.values()) / asked.total() * len(nodes),
        "rank_cpu_s": median(cpus),
        "rank_s_max": max(walls),
    }


def one_size(num_nodes: int, num_layers: int, tallies: Tallies) -> dict[str, Any]:
    """Measure one number of nodes."""
    cluster = Cluster(num_nodes)
    ranks = Ranks(cluster, num_layers, tallies)
    cluster.take(), ranks.tallies.take()
    before = cluster.used()["cpu_s"]
    saved = ranks.save()
    # A rank's message, and the sizes of all messages, which torch exchanges before them: 8 bytes of each rank.
    message = int(saved["message_bytes"])
    messages = dict.fromkeys(cluster.nodes, RANKS_PER_NODE * (message + 8 * ranks.world_size))
    messages[cluster.nodes[0]] += ranks.world_size * message
    agents = cluster.take()
    found: dict[str, Any] = {"nodes": num_nodes, "ranks": ranks.world_size, **saved}
    found["save"] = per_node(cluster, agents, ranks.tallies.take(), messages)
    used = cluster.used()
    found["agent"] = {**used, "cpu_s": used["cpu_s"] - before}
    found["agent"]["connections"] = max(tally.num_connections for tally in agents.values())
    ranks.drop()
    found["drop"] = per_node(cluster, cluster.take(), ranks.tallies.take(), {})
    found["manifest_bytes"] = len(ranks.stores[0].read_whole(manifest_key(STEP)))
    cluster.take(), ranks.tallies.take()
    found["newest_step"] = newest_step(cluster)
    found["newest_step"] |= per_node(cluster, cluster.take(), {}, {})
    pairs = partners(dict.fromkeys(cluster.nodes))
    ring = sorted(cluster.nodes)
    # Neither is the partner of the other; then the first, its partner's partner, and none of them answers.
    one, far = ring[num_nodes // 4], ring[num_nodes // 4 + num_nodes // 2]
    near = str(pairs[str(pairs[one])])
    for node in (one, far):
        cluster.ask("close", node)
    found["two_lost"] = lose(cluster, ranks, [one, far], [])
    for node in (one, near):
        cluster.ask("silence", node)
    found["two_silent"] = lose(cluster, ranks, [far], [one, near])
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for store in ranks.stores:
        store.close()
    cluster.end()
    return found


def newest_step(cluster: Cluster) -> dict[str, Any]:
    """Ask for the newest step as the controller does when a generation ends."""
    config: Any = SimpleNamespace(elastic=SimpleNamespace(peer_memory=False, peer_memory_gib=None))
    memory = NodeMemory(config)
    memory._known = {n: Contact(address=a, limit_bytes=0, token=TOKEN) for n, a in cluster.addresses.items()}
    begun, cpu_s = time.monotonic(), time.process_time()
    assert memory.newest_step(()) == STEP
    return {"seconds": time.monotonic() - begun, "cpu_s": time.process_time() - cpu_s}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record."""
    swap(save, write_shard=write_shard)
    tallies = Tallies()
    tallies.install()
    sizes = []
    for num_nodes in options.nodes:
        sizes.append(one_size(num_nodes, options.layers, tallies))
        say(f"{num_nodes} nodes: {json.dumps(sizes[-1])}")
    return {"sizes": sizes}


def page(record: Record) -> str:
    """Return the page."""
    sizes = record["sizes"]
    nodes = [one["nodes"] for one in sizes]
    largest, save_slope = sizes[-1], _slope(sizes, "save", "network_median")
    total = _slope(sizes, "save", "network_total")
    is_small = all(one["save"]["network_max"] <= GOAL_BYTES for one in sizes)
    text = f"""Every rank saves its shard, rank 0 commits the state and drops the previous one, the controller asks for
the newest step, and two nodes are lost. **Control traffic** is everything through the sockets of a node's agent and
ranks except the contents of shards, in both directions, without what stays on the node. Messages between ranks are
counted from their pickles; they are not sent.

Real: agents, clients, store, save, commit, choice and load, over TCP and Unix sockets. Simulated: the agents are
threads of two processes, and the ranks take turns in one more process. Only the tensors are small: there are as many as
in Llama 3 70B with Adam in bf16, so that manifests and shard headers have their real length. {SAMPLE} ranks write their
shards tensor by tensor, the others in one piece, with the same bytes and requests. After a loss, {SAMPLE} ranks load;
every figure of a rank is one of theirs.

Slopes are those of a power law over the sizes: 0 is constant, 1 linear."""
    parts = [
        header("Peer memory at size", record, text),
        f"""## A save

* Goal: at most {GOAL_BYTES / 1e6:g} MB of control traffic per node and save. At {nodes[-1]} nodes it is
  {largest["save"]["network_mean"] / 1e3:.0f} KB on average, {largest["save"]["network_median"] / 1e3:.0f} KB for a
  typical node: {met(largest["save"]["network_mean"] <= GOAL_BYTES)}. The node of rank 0, which receives all messages
  and sends the manifest to two other nodes, has {largest["save"]["network_max"] / 1e3:.0f} KB: {met(is_small)}.
* Goal: the slope of a typical node's traffic is at most {GOAL_SLOPE}: {save_slope:.2f},
  {met(save_slope <= GOAL_SLOPE)}. It contains the sizes of all ranks' messages, which torch sends to every rank.
* Goal: the slope of all nodes' traffic is at most {GOAL_TOTAL_SLOPE}: {total:.2f}, {met(total <= GOAL_TOTAL_SLOPE)}.
* No all-to-all: a rank talks to its own agent, an agent copies to its partner's, and only rank 0 talks to all.""",
        columns(
            sizes, nodes=_of("nodes"), ranks=_of("ranks"), manifest_KB=_of("manifest_bytes", scale=1e3),
            message_of_a_rank_B=_of("message_bytes"), typical_node_KB=_of("save", "network_median", scale=1e3),
            busiest_node_KB=_of("save", "network_max", scale=1e3), all_nodes_MB=_of("save", "network_total", scale=1e6),
            requests_per_agent=_of("save", "requests_median"), agents_asked_by_rank_0=_of("save", "agents_of_rank_0"),
            agents_asked_by_another_rank=_of("save", "agents_of_another_rank"),
            CPU_s_of_rank_0=_of("rank_0_cpu_s", form=".2f"), CPU_s_of_a_rank=_of("rank_cpu_s", form=".3f"),
        ),
        _slopes(sizes, [("save", "network_median"), ("save", "network_max"), ("save", "network_total"),
                        ("save", "requests_total"), ("rank_0_cpu_s",), ("rank_cpu_s",)]),
        "## Dropping the previous state, and the newest step for the controller",
        columns(
            sizes, nodes=_of("nodes"), drop_B_per_node=_of("drop", "network_median"),
            drop_requests=_of("drop", "requests_total"), newest_step_B_per_node=_of("newest_step", "network_median"),
            newest_step_KB_in_all=_of("newest_step", "network_total", scale=1e3),
            newest_step_requests=_of("newest_step", "requests_total"),
            newest_step_CPU_s=_of("newest_step", "cpu_s", form=".2f"),
        ),
        _slopes(sizes, [("drop", "network_total"), ("drop", "requests_total"), ("newest_step", "network_total"),
                        ("newest_step", "requests_total"), ("newest_step", "cpu_s")]),
        """## Two nodes are lost

Neither is the partner of the other. Rank 0 of the next world lists what all agents have, chooses the state and sends
its manifest with the nodes of each shard to all ranks; each rank parses it, plans its reads and loads its part.""",
        _loss(sizes, "two_lost"),
        _slopes(sizes, [("two_lost", name) for name in LOSS_SLOPES]),
        """## Two lost nodes accept connections and never answer

A node and its partner's partner, whose addresses the next world still has; one more is lost. The time to choose is the
timeout of a handshake, which rank 0 waits for once, for both at the same time. The other ranks never ask them.""",
        _loss(sizes, "two_silent"),
        _slopes(sizes, [("two_silent", "choose_s"), *(("two_silent", name) for name in LOSS_SLOPES)]),
        "## An agent\n\nAfter a save of 8 ranks, with the previous state dropped; memory without the shards.",
        columns(
            sizes, nodes=_of("nodes"), descriptors=_of("agent", "descriptors"), threads=_of("agent", "threads"),
            connections_in_a_save=_of("agent", "connections"), MiB=_of("agent", "mib", form=".1f"),
            CPU_s_per_save=_of("agent", "cpu_s", form=".3f"),
        ),
        _slopes(sizes, [("agent", name) for name in ("descriptors", "threads", "connections", "mib", "cpu_s")]),
    ]  # fmt: skip
    return "\n\n".join([*parts, BEFORE])


BEFORE = """## Before

At commit 3a5a1bd2, a manifest listed every interval of every rank: 12.6 MB at 64 ranks and 49.8 MB at 256, linear in
the ranks. Rank 0 sent it to every node after every step, and each
rank's message had 244 to 251 KB, 2 MB per node. Each rank of the next world then parsed it (at least 1 s at 256 ranks),
compared all intervals of all ranks, and asked the agents one after another for each shard that it reads."""

LOSS_SLOPES = (
    "choose_requests", "choose_bytes", "choose_cpu_s", "message_bytes", "rank_requests", "rank_agents",
    "rank_control_bytes", "rank_cpu_s",
)  # fmt: skip


def _loss(sizes: Sequence[Record], name: str) -> str:
    return columns(
        sizes, nodes=_of("nodes"), choose_s=_of(name, "choose_s", form=".2f"),
        choose_CPU_s=_of(name, "choose_cpu_s", form=".2f"), choose_requests=_of(name, "choose_requests"),
        choose_KB=_of(name, "choose_bytes", scale=1e3), message_KB=_of(name, "message_bytes", scale=1e3),
        requests_per_rank=_of(name, "rank_requests", form=".1f"), agents_per_rank_at_most=_of(name, "rank_agents"),
        control_B_per_rank=_of(name, "rank_control_bytes"), CPU_s_per_rank=_of(name, "rank_cpu_s", form=".2f"),
        s_of_the_slowest_rank=_of(name, "rank_s_max", form=".1f"),
    )  # fmt: skip


def _of(*path: str, form: str = ",.0f", scale: float = 1.0) -> Callable[[Any], str]:
    """Return a function that formats a figure of a size."""
    return lambda one: format(_figure(one, path) / scale, form)


def _figure(one: Any, path: Sequence[str]) -> float:
    for name in path:
        one = one[name]
    return float(one)


def _slope(sizes: Sequence[Record], *path: str) -> float:
    if len(sizes) == 1:
        return 0.0
    return slope([one["nodes"] for one in sizes], [max(_figure(one, path), 1e-6) for one in sizes])


def _slopes(sizes: Sequence[Record], paths: Sequence[Sequence[str]]) -> str:
    found = ", ".join(f"{path[-1].replace('_', ' ')} {_slope(sizes, *path):.2f}" for path in paths)
    return f"Slopes: {found}."


BENCHMARK = Benchmark(
    name="scale_peer_memory",
    about=__doc__.splitlines()[0],
    measure=measure,
    page=page,
    packages=("torch", "ray"),
    hardware="agents in two processes, ranks in turns in one",
    options={
        "nodes": ([8, 32, 64, 128], "numbers of nodes"),
        "layers": (80, "layers of the model"),
    },
    quick={"nodes": [4], "layers": 8},
)

if __name__ == "__main__":
    main(BENCHMARK)
