"""How level steps are across data-parallel groups: rows dealt as they come, sorted in the step, and over 4 steps.

Nothing is timed: a row costs what its documents cost by the count of floating-point operations, and a micro-batch lasts
as long as its dearest row. The rows are the planner's own, in its shuffled order.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.document_lengths import log_normal, standard_library
from benchmarks.imbalance_report import markdown
from benchmarks.stored_result import REPOSITORY, RESULTS, command, provenance, say, store
from ray_ulysses.config import load_config
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.planning import build_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.plan.steps import balance_windows, step_times
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import token_cost

CONTEXTS = (131_072, 1_048_576)
ROWS_PER_STEP = (16, 64, 256)
DP_SIZES = (2, 4, 8, 16)
BALANCE_STEPS = 4
MODEL = REPOSITORY / "configs" / "llama3-8b_16xh100_sp8-dp2_128k.yaml"
LIBRARY_COPIES = {131_072: 64, 1_048_576: 512}
"""How often the library's files are taken, so that there are dozens of steps of 256 rows."""

Costs = NDArray[np.int64]


def corpora(context_tokens: int, scale: float) -> dict[str, tuple[Callable[[], NDArray[np.uint32]], bool]]:
    """Return the corpora by name, and whether the goal is for them: documents of a mean of 100k tokens and more."""

    def sized(number: int, mean: float, sigma: float) -> Callable[[], NDArray[np.uint32]]:
        return lambda: log_normal(round(number * scale), mean=mean, sigma=sigma)

    copies = max(1, round(LIBRARY_COPIES[context_tokens] * scale))
    return {
        "standard library as bytes": (lambda: np.tile(standard_library(), copies), False),
        "long tail to 1M: log-normal, sigma 1.5, mean 6.5k": (sized(2_000_000, 6_500, 1.5), False),
        "long documents: log-normal, sigma 0.5, mean 120k": (sized(100_000, 120_000, 0.5), True),
        "long documents: log-normal, sigma 1.0, mean 150k": (sized(100_000, 150_000, 1.0), True),
        "long documents, long tail: log-normal, sigma 1.5, mean 200k": (sized(100_000, 200_000, 1.5), True),
    }


def row_costs(lengths: NDArray[np.uint32], context_tokens: int, a_token: int, balance: tuple[int, int]) -> Costs:
    """Return the cost of each row in the order of training; ``balance`` is rows a step and steps a window."""
    source = PlannedSource(path="benchmark", fingerprint="benchmark", num_documents=int(lengths.size))
    settings = PlanSettings(
        seed=0, context_tokens=context_tokens, pad_multiple=256, rows_per_step=balance[0], balance_steps=balance[1],
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


def case(costs: Costs, rows_per_step: int, dp_size: int) -> dict[str, Any]:
    """Return how level the steps are in each of the three ways."""
    windows = costs[balance_windows(costs, rows_per_step, BALANCE_STEPS)]
    return {
        "rows_per_step": rows_per_step,
        "dp_size": dp_size,
        "num_steps": -(-costs.size // rows_per_step),
        "random": random_imbalance(costs, rows_per_step, dp_size),
        "sorted": asdict(step_times(costs, rows_per_step, dp_size)),
        "balanced": asdict(step_times(windows, rows_per_step, dp_size)),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of everything."""
    model = load_config(MODEL).model.config
    assert model is not None
    a_token = token_cost(ModelShape.from_config_dict(model))
    blocks = []
    for context_tokens in CONTEXTS:
        for name, (make, has_goal) in corpora(context_tokens, options.scale).items():
            lengths = make()
            costs = row_costs(lengths, context_tokens, a_token, (ROWS_PER_STEP[0], 1))
            block = {
                "corpus": name,
                "context_tokens": context_tokens,
                "has_goal": has_goal and float(lengths.mean(dtype=np.float64)) >= 100_000,
                "num_documents": int(lengths.size),
                "mean_tokens": float(lengths.mean(dtype=np.float64)),
                "num_rows": int(costs.size),
                "dearest_row": float(costs.max() / costs.mean()),
                "cases": [case(costs, rows, dp) for rows, dp in itertools.product(ROWS_PER_STEP, DP_SIZES)],
            }
            blocks.append(block)
            say(f"{name}, {context_tokens:,}: {costs.size:,} rows")
    return {
        **provenance(("numpy", "numba"), "nothing is timed"),
        "command": command("bench_imbalance.py"),
        "token_cost": a_token,
        "balance_steps": BALANCE_STEPS,
        "blocks": blocks,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="How level steps are: rows dealt at random, sorted, and exchanged among 4 steps."
    )
    parser.add_argument("--quick", action="store_true", help="a twentieth of the documents; writes nothing")
    parser.add_argument("--out", type=Path, help="folder for imbalance.md and .json (default: results; --quick: none)")
    options = parser.parse_args(arguments)
    options.scale = 0.05 if options.quick else 1.0
    if not options.quick and options.out is None:
        options.out = RESULTS
    return options


def main(arguments: list[str] | None = None) -> None:
    """Compute the tables, show their page and store it."""
    options = parse(arguments)
    record = measure(options)
    say(markdown(record))
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store("imbalance", markdown(record), record, options.out)))


if __name__ == "__main__":
    main()
