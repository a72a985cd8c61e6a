"""What a run of ``bench_imbalance.py`` says, from its record: pure text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.stored_result import met, origin, table

GOAL, GOAL_ROWS, GOAL_DP = 1.2, 64, 8

RULES = """\
How to read it: a figure is the time of all steps over the time that perfectly level groups would take, so 1.00 is
level and 2.00 means that half of the machine waits. A micro-batch takes one row a data-parallel group and lasts as
long as its dearest row; a step is all its micro-batches. **random** deals the rows of a step in the shuffled order;
**sorted** is what the trainer does: the rows of each step sorted by cost, so that those of like cost meet;
**4 steps** exchanges rows among the 4 steps of a window too (`data.balance_steps: 4`). Random is the peer: it is what
a sampler that knows no costs does. **bound** is the mean over the steps of max(mean over the groups, dearest row),
which no dealing of the same rows to the groups can go below; exchanging rows among steps changes which rows a step
has, so that column has a bound of its own. **slow** is a step of the slowest tenth over the mean step. A row's cost
is the sum over its documents of len² + c·len, from the model's floating-point operations. No clock is involved: this
is a prediction from costs, and real step times have not been measured here."""


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    blocks = record["blocks"]
    cost = (
        f"Cost: len² + {record['token_cost']:,}·len a document, that of Llama-3-8B: at {record['token_cost']:,} tokens "
        "attention costs as much as all else. A copy of the standard library is one document a file and a token a byte."
    )
    return "\n\n".join(
        [
            "# Level steps: rows at random, sorted in a step, and over 4 steps",
            origin(record),
            RULES,
            cost,
            f"## The goal: at most {GOAL} at {GOAL_ROWS} rows a step and {GOAL_DP} groups, for documents of a mean of "
            "100k tokens and more",
            _goals(blocks),
            *(_block(block) for block in blocks),
        ]
    )


def verdict(block: Mapping[str, Any]) -> list[str]:
    """Return the goal's row of a corpus: figures, whether the goal is met, and why not."""
    case = goal_case(block)
    ways = [case["random"], case["sorted"]["imbalance"], case["sorted"]["bound"], case["balanced"]["imbalance"]]
    best = min(case["sorted"]["imbalance"], case["balanced"]["imbalance"])
    row = [f"{way:.2f}" for way in ways]
    row += [met(case["sorted"]["imbalance"] <= GOAL), met(case["balanced"]["imbalance"] <= GOAL)]
    if best <= GOAL:
        why = "" if case["sorted"]["imbalance"] <= GOAL else "rows of one step alone differ too much to pair up"
    elif min(case["sorted"]["bound"], case["balanced"]["bound"]) > GOAL:
        why = (
            f"no dealing can: one row costs up to {block['dearest_row']:.1f} times the mean row, of which a group has "
            f"{GOAL_ROWS // GOAL_DP} a step"
        )
    else:
        why = "rows of a step differ too much to pair up; the bound would allow it"
    return [*row, why]


def goal_case(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the case that the goal is for."""
    found: Mapping[str, Any] = next(
        case for case in block["cases"] if (case["rows_per_step"], case["dp_size"]) == (GOAL_ROWS, GOAL_DP)
    )
    return found


def _goals(blocks: list[Mapping[str, Any]]) -> str:
    head = ("documents", "mean", "long enough for the goal", "context", "random", "sorted", "its bound", "4 steps",
            "sorted: goal", "4 steps: goal", "why not")  # fmt: skip
    rows = [
        [
            block["corpus"],
            f"{block['mean_tokens']:,.0f}",
            "yes" if block["has_goal"] else "no",
            f"{block['context_tokens']:,}",
            *verdict(block),
        ]
        for block in sorted(blocks, key=lambda block: not block["has_goal"])
    ]
    return table(head, rows)


def _block(block: Mapping[str, Any]) -> str:
    title = f"## {block['corpus'][0].upper()}{block['corpus'][1:]}; context {block['context_tokens']:,}"
    size = (
        f"{block['num_documents']:,} documents, mean {block['mean_tokens']:,.0f} tokens; {block['num_rows']:,} rows; "
        f"the dearest costs {block['dearest_row']:.2f} of the mean row."
    )
    head = ("rows a step", "groups", "steps", "random", "sorted", "bound", "random/sorted", "slow", "4 steps",
            "its bound", "slow")  # fmt: skip
    rows = [
        [
            str(case["rows_per_step"]),
            str(case["dp_size"]),
            f"{case['num_steps']:,}",
            f"{case['random']:.2f}",
            f"**{case['sorted']['imbalance']:.2f}**",
            f"{case['sorted']['bound']:.2f}",
            f"{case['random'] / case['sorted']['imbalance']:.2f}",
            f"{case['sorted']['slow']:.2f}",
            f"**{case['balanced']['imbalance']:.2f}**",
            f"{case['balanced']['bound']:.2f}",
            f"{case['balanced']['slow']:.2f}",
        ]
        for case in block["cases"]
    ]
    return "\n\n".join([title, size, table(head, rows)])
