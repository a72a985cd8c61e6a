"""Peer memory beside training: what keeping the state after every step costs a step, in pairs within one run.

Four gloo ranks train with the real loop; two agents in processes of their own stand for two nodes. Blocks of
steps with and without peer memory follow one another in turn, so that a pair of blocks is of the same minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import MIB, Benchmark, Record, columns, header, main, met, spread
from ray_ulysses.peer_memory import PeerMemoryAgent

WORLD_SIZE = 4
BLOCK = 6
"""Steps of a block; the first two are not counted, in which the block before still has an effect."""
SKIPPED = 2
ROWS = 64
TIMEOUT_S = 3000.0
SIZES: dict[str, dict[str, int]] = {
    # Width, layers, tokens per row.
    "tiny": {"hidden": 64, "layers": 1, "context": 512},
    "light": {"hidden": 64, "layers": 1, "context": 5120},
    "small": {"hidden": 256, "layers": 4, "context": 1024},
    "long": {"hidden": 256, "layers": 4, "context": 4096},
}
GOAL_STALL, GOAL_STEP = 0.01, 1.03


def rank_main(rank: int, world_size: int, config: Any, peer_memory: Any, pids: list[int]) -> list[dict[str, float]]:
    """Be one rank of the run, and return what each step took."""
    from ray_ulysses.trainer.peer_memory_keeper import PeerMemoryKeeper
    from tests.distributed import run_case

    found: list[dict[str, float]] = []
    keepers: list[PeerMemoryKeeper] = []
    flags = PeerMemoryKeeper.flags

    def in_turns(keeper: PeerMemoryKeeper, own: Any) -> Any:
        keepers[:] = [keeper]
        keeper._is_ready = len(found) // BLOCK % 2 == 1
        return flags(keeper, own)

    def look(name: str, step: int) -> None:
        if name == "step":
            # Rank 0 counts what the agents take.
            cpu_s = time.process_time() + sum(_cpu_s(pid) for pid in pids if rank == 0)
            found.append({"at": time.perf_counter(), "cpu_s": cpu_s, "stall_s": 0.0})
        elif name == "memory":
            found[-1]["stall_s"] = keepers[0]._stalls_s[-1]

    PeerMemoryKeeper.flags = in_turns  # type: ignore[method-assign]
    run_case.run_worker(rank, world_size, config, "bench", peer_memory=peer_memory, watch=look)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train one model after the other."""
    return {"runs": [_measured(SIZES[name], options.pairs) for name in options.size]}


def _measured(size: dict[str, int], num_pairs: int) -> dict[str, Any]:
    from tests.distributed.harness import run_ranks
    from tests.distributed.run_case import make_config, prepare_attempt

    with tempfile.TemporaryDirectory(prefix="bench-peer-memory-") as folder, _agents() as agents:
        config = make_config(
            Path(folder), _level_corpus(Path(folder), size["context"]), run__stop_step=2 * BLOCK * num_pairs,
            data__epochs=400, data__context_tokens=size["context"], data__rows_per_step=2,
            checkpoint__every_steps=100_000, checkpoint__save_at_end=False,
            model__config={
                "model_type": "llama", "vocab_size": 264, "hidden_size": size["hidden"],
                "intermediate_size": 4 * size["hidden"], "num_hidden_layers": size["layers"],
                "num_attention_heads": 8, "num_key_value_heads": 4,
            },
        )  # fmt: skip
        prepare_attempt(config, "bench")
        peer_memory = ({node: address for node, (address, _) in agents.items()}, "token")
        pids = [pid for _, pid in agents.values()]
        ranks = run_ranks(rank_main, WORLD_SIZE, config, peer_memory, pids, timeout_s=TIMEOUT_S)
    parameters = size["layers"] * 14 * size["hidden"] ** 2 + 2 * 264 * size["hidden"]
    return {"size": size, "parameters": parameters, "pairs": pairs_of(ranks)}


def _level_corpus(folder: Path, context_tokens: int) -> Path:
    """Prepare documents that each fill a row, so that all steps have the same work: attention is within documents."""
    from tests.distributed.run_case import make_corpus

    stdlib = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(stdlib.glob("*.py"))).decode("ascii", "ignore")
    texts = folder / "texts"
    texts.mkdir()
    # Room for the token at a document's end.
    size = context_tokens - 1
    for number in range(ROWS):
        (texts / f"{number}.txt").write_text(text[number * size : (number + 1) * size], encoding="ascii")
    return make_corpus(folder, (str(texts),))


def pairs_of(ranks: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Return what each pair of blocks says, from what each rank saw after each step (pure)."""
    num_steps = min(map(len, ranks))
    # A step lasts from the event after one to the event after the next, and what a copy costs comes after the event.
    blocks: list[dict[str, float]] = []
    for first in range(0, num_steps - BLOCK + 1, BLOCK):
        begin, end = first + SKIPPED, first + BLOCK - 1
        stalls = [max(rank[step]["stall_s"] for rank in ranks) for step in range(begin, end)]
        counted = end - begin
        blocks.append(
            {
                "step_s": (ranks[0][end]["at"] - ranks[0][begin]["at"]) / counted,
                "cpu_s": sum(rank[end]["cpu_s"] - rank[begin]["cpu_s"] for rank in ranks) / counted,
                "stall_s": sum(stalls) / counted,
                "copy_s": max(stalls),
                "kept": sum(stall > 0 for stall in stalls) / counted,
            }
        )
    return [
        {
            "step_s": off["step_s"],
            "step_ratio": on["step_s"] / off["step_s"],
            "cpu_ratio": on["cpu_s"] / off["cpu_s"],
            "stall_share": on["stall_s"] / off["step_s"],
            "copy_s": on["copy_s"],
            "kept": on["kept"],
        }
        # The first block of all has the start in it.
        for off, on in list(zip(blocks[::2], blocks[1::2], strict=False))[1:]
    ]


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "A pair is two neighboring blocks of steps, with and without peer memory; the first two steps of each are "
        "left out, and each row is one document, so that all steps have the same work. **Stall** is how long the "
        "slowest rank stood still for the copy of a state, over all steps; CPU time is of "
        "ranks and agents. Ranks and agents share the "
        "cores here, so that each CPU second of peer memory is taken from training; beside GPUs it is taken from idle "
        f"cores. **Kept** is the share of steps that were kept. Goals: a stall of at most {GOAL_STALL:.0%} of a step, "
        f"steps and CPU at most {GOAL_STEP}."
    )

    def of(name: str, form: str, factor: float = 1.0) -> Callable[[Record], str]:
        return lambda run: spread([factor * pair[name] for pair in run["pairs"]], form)

    def goal(run: Record) -> str:
        share, ratio, cpu = (
            median(pair[name] for pair in run["pairs"]) for name in ("stall_share", "step_ratio", "cpu_ratio")
        )
        return ", ".join(map(met, (share <= GOAL_STALL, ratio <= GOAL_STEP, cpu <= GOAL_STEP)))

    runs = columns(
        record["runs"],
        parameters=lambda run: f"{run['parameters'] / 1e6:.1f}M",
        state=lambda run: f"{12 * run['parameters'] / MIB:.0f} MiB",
        tokens_per_row=lambda run: f"{run['size']['context']:,}",
        step_without=of("step_s", "{:.2f} s"),
        copy=of("copy_s", "{:.1f} ms", 1000),
        stall=of("stall_share", "{:.2f}%", 100),
        step_with_over_without=of("step_ratio", "{:.3f}"),
        CPU_with_over_without=of("cpu_ratio", "{:.3f}"),
        goals=goal,
        kept=of("kept", "{:.0f}%", 100),
    )
    return "\n\n".join([header("Peer memory beside training", record, text), runs])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _agents:
    """Two agents in processes of their own: their addresses and process ids by node."""

    def __enter__(self) -> dict[str, tuple[str, int]]:
        context = multiprocessing.get_context("spawn")
        self._processes, found = [], {}
        for node in ("node-1", "node-2"):
            here, there = context.Pipe()
            process = context.Process(target=_agent, args=(there,), daemon=True)
            process.start()
            self._processes.append(process)
            found[node] = (here.recv(), process.pid or 0)
        return found

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _agent(there: Connection) -> None:
    os.nice(5)
    agent = PeerMemoryAgent("token")
    there.send(agent.start())
    agent._closed.wait()


BENCHMARK = Benchmark(
    name="peer_memory",
    about="What keeping the state in peer memory costs a step, on four gloo ranks and two agents.",
    measure=measure,
    page=page,
    packages=("torch", "deepspeed"),
    hardware="shared by four ranks of one thread and two agents, gloo over loopback",
    options={"size": (["light", "small"], "models"), "pairs": (10, "pairs of blocks; the first is not counted")},
    quick={"size": ["tiny"], "pairs": 3},
)

if __name__ == "__main__":
    main(BENCHMARK)
