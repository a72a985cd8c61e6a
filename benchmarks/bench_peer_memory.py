"""Peer memory beside training: what keeping the state after every step costs a step, in pairs within one run.

Four gloo ranks train with the real loop; two agents in processes of their own stand for two nodes. Blocks of
steps with and without peer memory follow one another in turn, so that a pair of blocks is of the same minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.stored_result import MIB, RESULTS, command, met, origin, provenance, say, spread, store, table
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
OWN = ("copying_s", "saving_s", "agents_s")

RULES = """\
How to read it: each row is one document, so that all steps have the same work. A pair is two neighbouring blocks of
steps, with and without peer memory; the first two steps of each are left out. **copy** is how long the slowest rank's
training stood still for a state that was kept, **stall** the mean of that over all steps. **step** is the ratio of the
times of a step by the clock; **CPU** that of the CPU time of all ranks and both agents. **Own CPU** per step is peer
memory's alone: of the training threads while they copy a state, of the threads that save it, and of the agents. On this
machine ranks and agents share two cores, so that every CPU second of peer memory is taken from training; beside
training on GPUs it is taken from idle cores. **kept** is how many of the steps were kept: fewer where a copy takes more
than 10 ms and 1% of a step."""


def rank_main(rank: int, world_size: int, config: Any, peer_memory: Any, pids: list[int]) -> list[dict[str, float]]:
    """Be one rank of the run, and return what each step took."""
    from ray_ulysses.trainer.peer_memory_keeper import PeerMemoryKeeper
    from tests.distributed import run_case

    found: list[dict[str, float]] = []
    keepers: list[PeerMemoryKeeper] = []
    flags, after_step = PeerMemoryKeeper.flags, PeerMemoryKeeper.after_step
    copying_s = 0.0

    def in_turns(keeper: PeerMemoryKeeper, own: Any) -> Any:
        keepers[:] = [keeper]
        keeper._is_ready = len(found) // BLOCK % 2 == 1
        return flags(keeper, own)

    def timed(keeper: PeerMemoryKeeper, *given: Any) -> None:
        nonlocal copying_s
        begun = time.thread_time()
        after_step(keeper, *given)
        copying_s += time.thread_time() - begun

    def look(name: str, step: int) -> None:
        if name == "step":
            agents = sum(_cpu_s(pid) for pid in pids) if rank == 0 else 0.0
            found.append(
                {
                    "at": time.perf_counter(), "cpu_s": time.process_time(), "agents_s": agents, "stall_s": 0.0,
                    "copying_s": copying_s, "saving_s": _saving_s(),
                }
            )  # fmt: skip
        elif name == "memory":
            found[-1]["stall_s"] = keepers[0]._stalls_s[-1]

    PeerMemoryKeeper.flags, PeerMemoryKeeper.after_step = in_turns, timed  # type: ignore[method-assign]
    run_case.run_worker(rank, world_size, config, "bench", peer_memory=peer_memory, watch=look)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, with one model after the other, and return the record."""
    return {
        **provenance(("torch", "deepspeed"), "shared by four ranks of one thread and two agents, gloo over loopback"),
        "command": command("bench_peer_memory.py"), "load_before": os.getloadavg(),
        "runs": [_measured(SIZES[name], options.pairs) for name in options.size], "load_average": os.getloadavg(),
    }  # fmt: skip


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
        cpu_s, copying_s, saving_s, agents_s = (
            sum(rank[end][name] - rank[begin][name] for rank in ranks) / counted
            for name in ("cpu_s", "copying_s", "saving_s", "agents_s")
        )
        blocks.append(
            {
                "step_s": (ranks[0][end]["at"] - ranks[0][begin]["at"]) / counted,
                "cpu_s": cpu_s + agents_s,
                "copying_s": copying_s,
                "saving_s": saving_s,
                "agents_s": agents_s,
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
            "cpu_s": on["cpu_s"] - off["cpu_s"],
            "own_share": sum(on[name] for name in OWN) / off["cpu_s"],
            **{name: on[name] for name in OWN},
            "stall_s": on["stall_s"],
            "stall_share": on["stall_s"] / off["step_s"],
            "copy_s": on["copy_s"],
            "kept": on["kept"],
        }
        # The first block of all has the start in it.
        for off, on in list(zip(blocks[::2], blocks[1::2], strict=False))[1:]
    ]


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    return "\n\n".join(
        [
            "# Peer memory beside training",
            origin(record),
            RULES,
            *(text for run in record["runs"] for text in _run(run)),
        ]
    )


def _run(run: Mapping[str, Any]) -> tuple[str, str]:
    """Return what was trained, and the table of what was measured."""
    pairs, size, count = run["pairs"], run["size"], run["parameters"]

    def all_of(name: str) -> list[float]:
        return [pair[name] for pair in pairs]

    state = 12 * count
    about = (
        f"A Llama of {count / 1e6:.1f}M parameters (width {size['hidden']}, {size['layers']} layers), fp32, rows of "
        f"{size['context']:,} tokens, sp 2 x dp 2 under ZeRO-3: a state of {state / MIB:.0f} MiB, "
        f"{state / MIB / WORLD_SIZE:.0f} MiB per rank. {len(pairs)} pairs."
    )
    share, ratio, cpu = median(all_of("stall_share")), median(all_of("step_ratio")), median(all_of("cpu_ratio"))
    rows = [
        ("step without", spread(all_of("step_s"), "{:.2f} s"), "", ""),
        ("copy", spread([1000 * one for one in all_of("copy_s")], "{:.1f} ms"), "", ""),
        ("stall", spread([1000 * one for one in all_of("stall_s")], "{:.1f} ms"), "", ""),
        (
            "stall of a step",
            spread([100 * one for one in all_of("stall_share")], "{:.2f}%"),
            "1%",
            met(share <= GOAL_STALL),
        ),
        ("step, with to without", spread(all_of("step_ratio"), "{:.3f}"), f"{GOAL_STEP}", met(ratio <= GOAL_STEP)),
        ("CPU, with to without", spread(all_of("cpu_ratio"), "{:.3f}"), f"{GOAL_STEP}", met(cpu <= GOAL_STEP)),
        ("own CPU, of that of a step", spread([100 * one for one in all_of("own_share")], "{:.1f}%"), "", ""),
        *(
            (f"own CPU, {words}", spread([1000 * one for one in all_of(name)], "{:.0f} ms"), "", "")
            for name, words in zip(OWN, ("training threads", "threads that save", "agents"), strict=True)
        ),
        ("CPU per GiB of state", spread([one / (state / 2**30) for one in all_of("cpu_s")], "{:.2f} s"), "", ""),
        ("kept", spread([100 * one for one in all_of("kept")], "{:.0f}%"), "", ""),
    ]
    return about, table(("", "median (least to most)", "goal", ""), rows)


def _saving_s() -> float:
    """Return the CPU time of this process's threads of peer memory."""
    saving = [one for one in threading.enumerate() if one.name.startswith(("checkpoint-save", "peer-memory-"))]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in saving if one.ident is not None)


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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="What keeping the state in peer memory costs a step, on four gloo ranks and two agents.",
        epilog="Example: python benchmarks/bench_peer_memory.py --size small --pairs 8 --out /tmp/peer-memory",
    )
    parser.add_argument(
        "--size", nargs="+", choices=sorted(SIZES), default=["light", "small"], help="models (default: light small)"
    )
    parser.add_argument("--pairs", type=int, default=10, help="of blocks with and without (default: 10)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, three pairs; writes nothing")
    parser.add_argument(
        "--out", type=Path, help="folder for peer_memory.md and .json (default: results; --quick: none)"
    )
    options = parser.parse_args(arguments)
    if options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: the first pair is not counted; give 2 or more")
    if options.quick:
        options.size, options.pairs = ["tiny"], 3
    elif options.out is None:
        options.out = RESULTS
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    options = parse(arguments)
    record = measure(options)
    say(markdown(record))
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store("peer_memory", markdown(record), record, options.out)))


if __name__ == "__main__":
    main()
