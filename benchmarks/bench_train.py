"""CPU time of training, end to end: the trainer beside a loop that is written by hand around plain Transformers.

Both train the same packed rows of real documents (Python's standard library as bytes) with the same model, alternating
in one run; each measurement is a process of its own with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fresh_process import run_fresh
from benchmarks.stored_result import RESULTS, command, met, origin, provenance, say, spread, store, table

GOALS = {512: 1.5, 8192: 1.08}
GOAL_PEER = 1.0
STEPS = {512: 120, 8192: 12}
WARMUP_STEPS = 3
ROWS_PER_STEP = 2
MODEL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 336, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.06,
    "tie_word_embeddings": False,
}  # fmt: skip
LR, MAX_GRAD_NORM = 1e-3, 1.0
TIMEOUT_S = 900.0
PEERS = {1: "transformers", 2: "deepspeed-ulysses"}
OURS = {1: ("ours", "ours-compiled", "ours-zero3"), 2: ("ours",)}
CASES = [(512, "packed", 1), (512, "whole", 1), (8192, "packed", 1), (8192, "whole", 1), (8192, "whole", 2)]

RULES = f"""\
How to read it: a side's figure is the CPU time of its processes per optimizer step, all threads included, from the end
of step {WARMUP_STEPS} to the last one: reading rows, batches, forward, backward, clipping, AdamW, and on our side the
journal, digests, the exchange of flags and ZeRO. Saving, tracking and evaluation are off on all sides. fp32, one thread
per rank, {ROWS_PER_STEP} rows per step, without gradient checkpointing. The peers get the same rows from memory.
**Packed** rows hold many documents, which plain Transformers tells apart by `position_ids`, so that SDPA gets a mask;
**whole** rows hold one document each, for which it needs none. At sp 2 the peer is DeepSpeed's `UlyssesSPAttentionHF`
with ZeRO-3 and the loss of its documentation. `ours` writes no ZeRO stage, so that one rank has 1 and two have 3;
`ours-compiled` adds `model.compile`. The ratio is that of neighbours in the run."""


def corpus(folder: Path, context: int, *, whole: bool) -> Path:
    """Prepare files of the standard library as bytes; whole documents are longer than a row, and are split."""
    from ray_ulysses.data.prepare.preparation import PrepareRequest
    from ray_ulysses.data.sources.units import SourceSpec
    from tests.local_preparation import prepare_local

    source = Path(os.__file__).parent
    paths = sorted((source / name for name in ("asyncio", "email", "json", "logging")), key=str)
    if whole:
        text = b"".join(file.read_bytes() for path in paths for file in sorted(path.glob("*.py")))
        (folder / "whole").mkdir()
        (folder / "whole" / "all.py").write_bytes(text)
        paths = [folder / "whole"]
    spec = SourceSpec(paths=tuple(map(str, paths)), pattern="*.py")
    prepare_local(PrepareRequest(sources=spec, out=folder / f"corpus-{context}"))
    return folder / f"corpus-{context}"


def make_config(folder: Path, context: int, rows: str, sp_size: int, side: str) -> Any:
    """Return the run's configuration."""
    from ray_ulysses.config.loading import parse_config

    steps = STEPS[context]
    return parse_config(
        {
            "run": {"name": "run", "storage": str(folder), "stop_step": steps, "self_test": False},
            "model": {
                "init": "random", "dtype": "fp32", "config": MODEL | {"max_position_embeddings": context},
                "compile": side == "ours-compiled",
            },
            "data": {
                "path": str(corpus(folder, context, whole=rows == "whole")), "context_tokens": context,
                "rows_per_step": ROWS_PER_STEP, "engine": "local", "epochs": 100,
            },
            "parallel": {"sp_size": sp_size},
            "optimizer": {"lr": LR, "max_grad_norm": MAX_GRAD_NORM},
            "schedule": {"warmup_steps": 1, "horizon_steps": steps},
            "memory": {"gradient_checkpointing": False, "zero_stage": 3 if side == "ours-zero3" else "auto"},
            "checkpoint": {"every_steps": None, "save_at_end": False},
            "elastic": {"peer_memory": False},
            "tracking": {"enabled": False},
            "cluster": {"workers": sp_size},
        }
    )  # fmt: skip


def measure_side(side: str, context: int, rows: str, sp_size: int) -> dict[str, float]:
    """Train in processes of this one's own, and return CPU seconds per step, of all ranks, and the last loss."""
    from tests.distributed.harness import run_ranks
    from tests.distributed.run_case import prepare_attempt

    with tempfile.TemporaryDirectory() as name:
        config = make_config(Path(name), context, rows, sp_size, side)
        prepare_attempt(config, "session")
        train = {"transformers": _transformers, "deepspeed-ulysses": _deepspeed}.get(side, _ours)
        ranks = run_ranks(train, sp_size, config, timeout_s=TIMEOUT_S)
    seconds = sum(marks[-1] - marks[WARMUP_STEPS - 1] for marks, _ in ranks)
    return {"cpu_s": seconds / (len(ranks[0][0]) - WARMUP_STEPS), "loss": ranks[0][1]}


def _ours(rank: int, world_size: int, config: Any) -> tuple[list[float], float]:
    from ray_ulysses.tracking.history import read_history
    from tests.distributed.run_case import run_worker

    marks: list[float] = []

    def watch(name: str, step: int) -> None:
        if name == "step":
            marks.append(time.process_time())

    run_worker(rank, world_size, config, "session", watch=watch)
    return marks, read_history(config.run_dir).steps[-1].loss


def _transformers(rank: int, world_size: int, config: Any) -> tuple[list[float], float]:
    import torch
    from torch.nn import functional

    rows, marks = _rows(config), []
    model = _model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    value = 0.0
    for step in rows:
        tokens = sum(int((labels != -100).sum()) for _, labels, _ in step)
        total = torch.zeros(())
        for ids, labels, positions in step:
            # A single document needs no mask, and no positions to tell it from others.
            is_whole = int((positions == 0).sum()) == 1
            logits = model(input_ids=ids, position_ids=None if is_whole else positions).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        value = float(total)
        marks.append(time.process_time())
    return marks, value


def _deepspeed(rank: int, world_size: int, config: Any) -> tuple[list[float], float]:
    """Train as DeepSpeed documents it: its groups, its attention, its engine, and its mean over the ranks' losses."""
    import deepspeed
    import deepspeed.comm
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    rows, marks = _rows(config), []
    model = _model(config)
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=world_size,
        micro_batch_size=1, seq_length_is_variable=True,
    )  # fmt: skip
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": ROWS_PER_STEP,
        "zero_optimization": {"stage": 3}, "gradient_clipping": MAX_GRAD_NORM, "zero_allow_untested_optimizer": True,
        "sequence_parallel_size": world_size, "steps_per_print": 10**9,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=groups)
    group, value = groups.get_sequence_parallel_group(), 0.0
    for step in rows:
        total = torch.zeros(())
        for row in step:
            ids, labels, positions = (one.chunk(world_size, dim=1)[rank].contiguous() for one in row)
            loss = engine(input_ids=ids, position_ids=positions, shift_labels=labels, labels=labels).loss
            counts = (labels != -100).sum().to(loss.dtype)
            losses = torch.distributed.nn.functional.all_gather(loss, group=group)
            tokens = torch.distributed.nn.functional.all_gather(counts, group=group)
            loss = sum(a * b for a, b in zip(losses, tokens, strict=True)) / sum(tokens)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(step)
        dist.barrier(group)
        value = float(total)
        marks.append(time.process_time())
    return marks, value


def _model(config: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    values = {name: value for name, value in config.model.config.items() if name != "model_type"}
    return LlamaForCausalLM._from_config(LlamaConfig(**values, use_cache=False), attn_implementation="sdpa").train()


def _rows(config: Any) -> list[list[tuple[Any, Any, Any]]]:
    """Return the run's rows by step: ids, labels and positions, each [1, tokens]."""
    import torch

    from ray_ulysses.data.plan.plan_files import load_plan
    from ray_ulysses.data.read.row_source import DirectSource
    from ray_ulysses.run_names import PLAN_FOLDER
    from ray_ulysses.trainer.loop import open_rows

    plan = load_plan(config.run_dir / PLAN_FOLDER)
    reader = open_rows(config, plan)
    source = DirectSource(reader, plan, 0, 1, 0, 1)
    rows = [
        [
            tuple(torch.from_numpy(one)[None] for one in (row.input_ids, row.labels, row.position_ids))
            for row in source.step(step)
        ]
        for step in range(1, config.run.stop_step + 1)
    ]
    source.close()
    return rows  # type: ignore[return-value]


def run(pairs: int, chosen: Sequence[tuple[int, str, int]]) -> dict[str, Any]:
    """Measure all sides of each case in turn, so many times."""
    cases: list[dict[str, Any]] = []
    load = os.getloadavg()
    for context, rows, sp_size in chosen:
        sides = (PEERS[sp_size], *OURS[sp_size])
        measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(pairs):
            for side in sides:
                arguments = ["--side", side, "--context", str(context), "--rows", rows, "--sp", str(sp_size)]
                found = run_fresh([__file__, *arguments], TIMEOUT_S)
                measured[side].append({"cpu_s": found["cpu_s"], "loss": found["loss"]})
        cases.append({"context": context, "rows": rows, "sp_size": sp_size, "sides": measured})
        say(json.dumps({side: [round(one["cpu_s"], 4) for one in measured[side]] for side in sides}))
    packages = ("torch", "transformers", "deepspeed")
    record = {**provenance(packages, "one thread per rank"), "command": command("bench_train.py"), "cases": cases}
    return {**record, "load_before": load, "load_average": os.getloadavg()}


def case_of(found: Mapping[str, Any]) -> tuple[int, str, int]:
    """Return which case was measured."""
    return found["context"], found["rows"], found["sp_size"]


def page(record: Mapping[str, Any]) -> str:
    """Return the result as text."""
    rows = []
    for case in record["cases"]:
        context, sp_size = case["context"], case["sp_size"]
        peer = case["sides"][PEERS[sp_size]]
        goal = GOALS[context] if sp_size == 1 else GOAL_PEER
        for side in (one for one in OURS[sp_size] if one in case["sides"]):
            ours = case["sides"][side]
            ratios = [mine["cpu_s"] / its["cpu_s"] for mine, its in zip(ours, peer, strict=True)]
            seconds = [median(one["cpu_s"] for one in found) for found in (peer, ours)]
            rows.append(
                [
                    f"{context:,}", case["rows"], str(sp_size), PEERS[sp_size], side,
                    *(f"{1e3 * one:.1f} ms" for one in seconds), f"{ROWS_PER_STEP * context / seconds[1]:,.0f}",
                    spread(ratios), f"{goal:g}", met(median(ratios) <= goal), case.get("commit", record["commit"]),
                ]
            )  # fmt: skip
    head = ["context", "rows", "sp", "peer", "side", "peer's step", "our step", "our tokens per CPU-second", "ratio"]
    head += ["goal", "", "commit"]
    return "\n\n".join(["# CPU time of training", origin(record), RULES, table(head, rows)])


def main() -> None:
    """Measure one side, or all and store the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="processes per side and case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument(
        "--only",
        default="",
        help="measure the cases that have this in 'CONTEXT ROWS spN', and keep what is stored of others",
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--sp", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        say(json.dumps(measure_side(options.side, options.context, options.rows, options.sp)))
        return
    chosen = [case for case in CASES if options.only in "{} {} sp{}".format(*case)]
    if not chosen:
        parser.error(f"--only {options.only}: no case has this")
    record = run(options.pairs, chosen)
    if options.only:
        stored = json.loads((options.out / "train.json").read_text(encoding="utf-8"))
        found = {case_of(one): {"commit": stored["commit"], **one} for one in stored["cases"]}
        found |= {case_of(one): one for one in record["cases"]}
        record["cases"] = [found[case] for case in CASES if case in found]
    say(page(record))
    store("train", page(record), record, options.out)


if __name__ == "__main__":
    main()
