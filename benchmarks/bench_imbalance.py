"""How level steps are across data-parallel groups: rows dealt at random, sorted in the step, and over several steps.

Nothing is timed: a row costs what its documents cost by the count of floating-point operations, and a micro-batch lasts
as long as its most expensive row. The rows are the planner's own, in its shuffled order.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.document_lengths import log_normal
from benchmarks.runner import REPOSITORY, Benchmark, Record, columns, header, main, met, say
from benchmarks.scale.slope import slope
from ray_ulysses.config import load_config
from ray_ulysses.config.learning import DataSection
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.planning import build_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.plan.steps import balance_windows, step_times
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import token_cost

CONTEXTS = (131_072, 262_144, 524_288, 1_048_576)
SIZES = ((16, 2), (16, 4), (64, 16), (256, 8), (256, 16), (256, 32), (256, 64), (256, 128))
"""Rows per step and data-parallel groups."""
BALANCE_STEPS = DataSection.model_fields["balance_steps"].default
MODEL = REPOSITORY / "configs" / "llama3-8b_16xh100_sp8-dp2_128k.yaml"
LIBRARY_TOKENS, CORPUS_TOKENS = 2**31, 2**34
"""Tokens of the corpora per 131,072 tokens of context, so that there are hundreds of steps of 256 rows."""
GOAL, GOAL_SIZE = 1.1, (256, 64)

Costs = NDArray[np.int64]


def corpora(context_tokens: int, scale: float) -> dict[str, NDArray[np.uint32]]:
    """Return the documents' lengths by the name of the corpus."""
    shapes = ((6_500, 1.5), (120_000, 0.5), (150_000, 1.0), (200_000, 1.5))
    times = scale * context_tokens / CONTEXTS[0]
    drawn = {
        f"log-normal, sigma {sigma}, mean {mean / 1000:g}k": log_normal(
            round(CORPUS_TOKENS * times / mean), mean=mean, sigma=sigma
        )
        for mean, sigma in shapes
    }
    paths = (path for path in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in path.parts)
    # A byte is a token, and one ends each file.
    library = np.asarray([path.stat().st_size + 1 for path in sorted(paths)], dtype=np.uint32)
    copies = max(1, round(LIBRARY_TOKENS * times / library.sum(dtype=np.int64)))
    return {"standard library as bytes": np.tile(library, copies), **drawn}


def row_costs(lengths: NDArray[np.uint32], context_tokens: int, a_token: int) -> Costs:
    """Return the cost of each row in the order of training."""
    source = PlannedSource(path="benchmark", fingerprint="benchmark", num_documents=int(lengths.size))
    settings = PlanSettings(
        seed=0, context_tokens=context_tokens, pad_multiple=256, rows_per_step=1, balance_steps=1,
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
            for rows, dp in SIZES:
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
    if (case["rows_per_step"], case["dp_size"]) != GOAL_SIZE:
        return ""
    return met(case["balanced"]["imbalance"] <= GOAL)


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "The time of all steps over that of perfectly level groups: 1.00 is level, 2.00 means that half of the "
        "machine waits. **random** deals a step's rows in the shuffled order, as a sampler does that knows no costs; "
        f"**sorted** sorts the rows of each step (`data.balance_steps: 1`); **default** also exchanges rows among "
        f"{BALANCE_STEPS} steps (`data.balance_steps: {BALANCE_STEPS}`). **slow** is a step of the slowest tenth over "
        "the mean step, with the default. "
        "**bound** is the mean over steps of max(mean over groups, largest row), which no dealing of the same "
        f"rows can beat. A document costs len² + {record['token_cost']:,}·len, by the operations of Llama-3-8B; a "
        "larger model has more operations per token, and more even rows. No clock is involved. Goal: at most "
        f"{GOAL} by default at {GOAL_SIZE[0]} rows per step and {GOAL_SIZE[1]} groups, at every context. A step with "
        "fewer than four rows per group, as in the last case of each corpus, can't be level: its micro-batches mix "
        "cheap and expensive rows."
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
        default=lambda case: f"**{case['balanced']['imbalance']:.2f}**",
        its_bound=lambda case: f"{case['balanced']['bound']:.2f}",
        slow=lambda case: f"{case['balanced']['slow']:.2f}",
        goal=goal_of,
    )
    top = header("Level steps: rows at random, sorted in a step, and exchanged among steps", record, text)
    about = "Slopes over 8 to 64 groups at 256 rows per step and 1,048,576 tokens; 0 is constant."
    return "\n\n".join([top, cases, "## Growth with the number of groups", about, growth(record)])


def growth(record: Record) -> str:
    """Return a table of how imbalance grows with the number of groups."""
    rows = {}
    for case in record["cases"]:
        if case["context_tokens"] == CONTEXTS[-1] and case["rows_per_step"] == GOAL_SIZE[0] and case["dp_size"] <= 64:
            rows.setdefault(case["corpus"], []).append(case)
    sizes = [case["dp_size"] for case in next(iter(rows.values()))]

    def of(kind: str) -> Callable[[Any], str]:
        return lambda item: f"{slope(sizes, [case[kind]['imbalance'] for case in item[1]]):.2f}"

    return columns(list(rows.items()), documents=lambda item: item[0], sorted=of("sorted"), default=of("balanced"))


BENCHMARK = Benchmark(
    name="imbalance",
    about="How level steps are: rows dealt at random, sorted, and exchanged among steps.",
    measure=measure,
    page=page,
    packages=("numpy", "numba"),
    hardware="nothing is timed",
    options={"scale": (1.0, "share of the documents")},
    quick={"scale": 0.05},
)

if __name__ == "__main__":
    main(BENCHMARK)
