"""How level steps are across data-parallel groups: rows dealt at random, sorted in the step, and over 4 steps.

Nothing is timed: a row costs what its documents cost by the count of floating-point operations, and a micro-batch lasts
as long as its most expensive row. The rows are the planner's own, in its shuffled order.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.document_lengths import log_normal
from benchmarks.runner import REPOSITORY, Benchmark, Record, columns, header, main, met, say
from ray_ulysses.config import load_config
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.planning import build_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.plan.steps import balance_windows, step_times
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import token_cost

CONTEXTS = (131_072, 1_048_576)
ROWS_PER_STEP, DP_SIZES = (16, 64, 256), (2, 4, 8, 16)
BALANCE_STEPS = 4
MODEL = REPOSITORY / "configs" / "llama3-8b_16xh100_sp8-dp2_128k.yaml"
LIBRARY_COPIES = {131_072: 64, 1_048_576: 512}
"""Copies of the library's files, so that there are dozens of steps of 256 rows."""
GOAL, GOAL_ROWS, GOAL_DP, GOAL_MEAN = 1.2, 64, 8, 100_000

Costs = NDArray[np.int64]


def corpora(context_tokens: int, scale: float) -> dict[str, NDArray[np.uint32]]:
    """Return the documents' lengths by the name of the corpus."""
    shapes = ((2_000_000, 6_500, 1.5), (100_000, 120_000, 0.5), (100_000, 150_000, 1.0), (100_000, 200_000, 1.5))
    drawn = {
        f"log-normal, sigma {sigma}, mean {mean / 1000:g}k": log_normal(round(number * scale), mean=mean, sigma=sigma)
        for number, mean, sigma in shapes
    }
    paths = (path for path in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in path.parts)
    # A byte is a token, and one ends each file.
    library = np.asarray([path.stat().st_size + 1 for path in sorted(paths)], dtype=np.uint32)
    copies = max(1, round(LIBRARY_COPIES[context_tokens] * scale))
    return {"standard library as bytes": np.tile(library, copies), **drawn}


def row_costs(lengths: NDArray[np.uint32], context_tokens: int, a_token: int) -> Costs:
    """Return the cost of each row in the order of training."""
    source = PlannedSource(path="benchmark", fingerprint="benchmark", num_documents=int(lengths.size))
    settings = PlanSettings(
        seed=0, context_tokens=context_tokens, pad_multiple=256, rows_per_step=ROWS_PER_STEP[0], balance_steps=1,
        token_cost=a_token,
    )  # fmt: skip
    return build_segment(PlanInput(sources=(source,), lengths=lengths), settings).costs()


def random_imbalance(costs: Costs, rows_per_step: int, dp_size: int) -> float:
    """Return time over level time where a step's rows are dealt in the shuffled order, unsorted."""
    seconds = 0.0
    for first in range(0, costs.size, rows_per_step):
        step = costs[first : first + rows_per_step]
        seconds += float(np.maximum.reduceat(step, np.arange(0, step.size, dp_size)).sum(dtype=np.float64))
    return seconds * dp_size / float(costs.sum(dtype=np.float64))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compute how level the steps of each corpus are."""
    model = load_config(MODEL).model.config
    assert model is not None
    a_token = token_cost(ModelShape.from_config_dict(model))
    cases = []
    for context_tokens in CONTEXTS:
        for name, lengths in corpora(context_tokens, options.scale).items():
            costs = row_costs(lengths, context_tokens, a_token)
            for rows, dp in itertools.product(ROWS_PER_STEP, DP_SIZES):
                windows = costs[balance_windows(costs, rows, BALANCE_STEPS)]
                cases.append(
                    {
                        "corpus": name, "context_tokens": context_tokens, "rows_per_step": rows, "dp_size": dp,
                        "mean_tokens": float(lengths.mean(dtype=np.float64)),
                        "largest_row": float(costs.max() / costs.mean()),
                        "random": random_imbalance(costs, rows, dp),
                        "sorted": asdict(step_times(costs, rows, dp)),
                        "balanced": asdict(step_times(windows, rows, dp)),
                    }
                )  # fmt: skip
            say(f"{name}, {context_tokens:,}: {costs.size:,} rows")
    return {"token_cost": a_token, "cases": cases}


def goal_of(case: Record) -> str:
    """Return whether the goal is met; empty where it does not apply."""
    if (case["rows_per_step"], case["dp_size"]) != (GOAL_ROWS, GOAL_DP) or case["mean_tokens"] < GOAL_MEAN:
        return ""
    if min(case["sorted"]["bound"], case["balanced"]["bound"]) > GOAL:
        return f"**not met**: one row costs up to {case['largest_row']:.1f} mean rows, so no dealing can"
    return met(min(case["sorted"]["imbalance"], case["balanced"]["imbalance"]) <= GOAL)


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "The time of all steps over that of perfectly level groups: 1.00 is level, 2.00 means that half of the "
        "machine waits. **random** deals a step's rows in the shuffled order, as a sampler does that knows no costs; "
        "**sorted** is what the trainer does; **4 steps** also exchanges rows among 4 steps (`data.balance_steps: "
        "4`). **bound** is the mean over steps of max(mean over groups, largest row), which no dealing of the same "
        f"rows can beat. A document costs len² + {record['token_cost']:,}·len, by the operations of Llama-3-8B. No "
        f"clock is involved. Goal: at most {GOAL} at {GOAL_ROWS} rows per step and {GOAL_DP} groups, for documents of "
        "a mean of 100k and more."
    )
    cases = columns(
        record["cases"],
        documents=lambda case: case["corpus"],
        context=lambda case: f"{case['context_tokens']:,}",
        rows_per_step=lambda case: str(case["rows_per_step"]),
        groups=lambda case: str(case["dp_size"]),
        random=lambda case: f"{case['random']:.2f}",
        sorted=lambda case: f"**{case['sorted']['imbalance']:.2f}**",
        bound=lambda case: f"{case['sorted']['bound']:.2f}",
        four_steps=lambda case: f"**{case['balanced']['imbalance']:.2f}**",
        its_bound=lambda case: f"{case['balanced']['bound']:.2f}",
        goal=goal_of,
    )
    return "\n\n".join([header("Level steps: rows at random, sorted in a step, and over 4 steps", record, text), cases])


BENCHMARK = Benchmark(
    name="imbalance",
    about="How level steps are: rows dealt at random, sorted, and exchanged among 4 steps.",
    measure=measure,
    page=page,
    packages=("numpy", "numba"),
    hardware="nothing is timed",
    options={"scale": (1.0, "share of the documents")},
    quick={"scale": 0.05},
)

if __name__ == "__main__":
    main(BENCHMARK)
