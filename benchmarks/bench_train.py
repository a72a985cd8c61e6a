"""CPU time of training, end to end: the trainer beside a loop that is written by hand around plain Transformers.

Both train the same packed rows of real documents (Python's standard library as bytes) with the same model, alternating
in one run; each measurement is a process of its own with one thread.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import Benchmark, Record, columns, fresh, header, main, met, ratios, say, spread

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

RULES = (
    "CPU time of a side's processes per optimizer step, all threads included: reading rows, forward, backward, "
    "clipping, AdamW, and on our side the journal, digests, the exchange of flags and ZeRO. No saving, tracking or "
    f"evaluation. fp32, one thread per rank, {ROWS_PER_STEP} rows per step, no gradient checkpointing; the first "
    f"{WARMUP_STEPS} steps are not counted. The peers get the same rows from memory. **Packed** rows hold many "
    "documents, for which plain Transformers needs a mask; **whole** rows hold one. At sp 2 the peer is DeepSpeed's "
    "`UlyssesSPAttentionHF` with ZeRO-3. `ours` writes no ZeRO stage, so that one rank has 1 and two have 3; "
    "`ours-compiled` adds `model.compile`."
)


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


def measure_side(side: str, context: int, rows: str, sp_size: int) -> float:
    """Train in processes of this one's own, and return the CPU seconds per step of all ranks."""
    from tests.distributed.harness import run_ranks
    from tests.distributed.run_case import prepare_attempt

    with tempfile.TemporaryDirectory() as name:
        config = make_config(Path(name), context, rows, sp_size, side)
        prepare_attempt(config, "session")
        train = {"transformers": _transformers, "deepspeed-ulysses": _deepspeed}.get(side, _ours)
        ranks = run_ranks(train, sp_size, config, timeout_s=TIMEOUT_S)
    seconds = sum(marks[-1] - marks[WARMUP_STEPS - 1] for marks in ranks)
    return float(seconds / (len(ranks[0]) - WARMUP_STEPS))


def _ours(rank: int, world_size: int, config: Any) -> list[float]:
    from tests.distributed.run_case import run_worker

    marks: list[float] = []

    def watch(name: str, step: int) -> None:
        if name == "step":
            marks.append(time.process_time())

    run_worker(rank, world_size, config, "session", watch=watch)
    return marks


def _transformers(rank: int, world_size: int, config: Any) -> list[float]:
    import torch
    from torch.nn import functional

    rows, marks = _rows(config), []
    model = _model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in rows:
        tokens = sum(int((labels != -100).sum()) for _, labels, _ in step)
        for ids, labels, positions in step:
            # A single document needs no mask, and no positions to tell it from others.
            is_whole = int((positions == 0).sum()) == 1
            logits = model(input_ids=ids, position_ids=None if is_whole else positions).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        marks.append(time.process_time())
    return marks


def _deepspeed(rank: int, world_size: int, config: Any) -> list[float]:
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
    group = groups.get_sequence_parallel_group()
    for step in rows:
        for row in step:
            ids, labels, positions = (one.chunk(world_size, dim=1)[rank].contiguous() for one in row)
            loss = engine(input_ids=ids, position_ids=positions, shift_labels=labels, labels=labels).loss
            counts = (labels != -100).sum().to(loss.dtype)
            losses = torch.distributed.nn.functional.all_gather(loss, group=group)
            tokens = torch.distributed.nn.functional.all_gather(counts, group=group)
            loss = sum(a * b for a, b in zip(losses, tokens, strict=True)) / sum(tokens)
            engine.backward(loss)
            engine.step()
        dist.barrier(group)
        marks.append(time.process_time())
    return marks


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
    reader, _ = open_rows(config, plan)
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides of each case in turn."""
    cases: list[dict[str, Any]] = []
    for context, rows, sp_size in CASES[: options.cases]:
        sides = (PEERS[sp_size], *OURS[sp_size])
        found: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.pairs):
            for side in sides:
                found[side].append(fresh(measure_side, side, context, rows, sp_size, timeout_s=TIMEOUT_S))
        cases.append({"context": context, "rows": rows, "sp_size": sp_size, "sides": found})
        say(str(cases[-1]))
    return {"cases": cases}


def page(record: Record) -> str:
    """Return the page."""
    lines = [(case, side) for case in record["cases"] for side in OURS[case["sp_size"]]]

    def peer(case: Record) -> list[float]:
        return list(case["sides"][PEERS[case["sp_size"]]])

    def goal(line: tuple[Record, str]) -> str:
        case, side = line
        wanted = GOALS[case["context"]] if case["sp_size"] == 1 else GOAL_PEER
        return f"{wanted:g}: {met(median(ratios(case['sides'][side], peer(case))) <= wanted)}"

    rows = columns(
        lines,
        context=lambda line: f"{line[0]['context']:,}",
        rows=lambda line: line[0]["rows"],
        sp=lambda line: str(line[0]["sp_size"]),
        peer=lambda line: f"{PEERS[line[0]['sp_size']]}, {1e3 * median(peer(line[0])):.1f} ms",
        ours=lambda line: f"{line[1]}, {1e3 * median(line[0]['sides'][line[1]]):.1f} ms",
        ratio=lambda line: spread(ratios(line[0]["sides"][line[1]], peer(line[0]))),
        goal=goal,
    )
    return "\n\n".join([header("CPU time of training", record, RULES), rows])


BENCHMARK = Benchmark(
    name="train",
    about="CPU time of a training step, beside a hand-written Transformers loop and DeepSpeed's Ulysses.",
    measure=measure,
    page=page,
    packages=("torch", "transformers", "deepspeed"),
    hardware="one thread per rank",
    options={
        "pairs": (5, "processes per side and case"),
        "cases": (len(CASES), "how many of the cases, from the first on"),
    },
    quick={"pairs": 1, "cases": 1},
)

if __name__ == "__main__":
    main(BENCHMARK)
