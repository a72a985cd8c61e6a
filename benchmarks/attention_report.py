"""What a run of ``bench_attention.py`` says, from its record: pure text, and where it is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.stored_result import MIB, NOT_MEASURED, store, table

SIDES = ("ours", "theirs")

RULES = """\
How to read it: a ratio is theirs/ours of one pair of runs (above 1: ours is better), given as its median, with
minimum and maximum, over pairs that alternate in one run on the same tensors; a time is the slowest rank's, a CPU
time (user and system) the mean rank's, which other work on the machine disturbs less. `bound` is the bytes that our
layer sends over the link, at the speed of bare `all_to_all_single` calls of 64 MiB a rank in the same run: what the
wire alone would need. Ranks are processes that share the cores, so other work on the machine moves every figure;
the load average says how much there was (the benchmark itself adds its ranks), and a ratio whose minimum and
maximum lie on both sides of 1 shows no difference."""


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return the slowest rank's wall seconds and the mean rank's CPU seconds of each pair.

    Args:
        ranks: Per rank and pair, ``[ours, theirs, ours, theirs]``: wall, then CPU seconds.
    """
    return [
        [*(max(pair[i] for pair in pairs) for i in (0, 1)), *(mean(pair[i] for pair in pairs) for i in (2, 3))]
        for pairs in zip(*ranks, strict=True)
    ]


def ratios(pairs: Sequence[Sequence[float]], first: int = 0) -> tuple[float, float, float]:
    """Return median, minimum and maximum of theirs/ours; ``first`` is ours' place in a pair."""
    each = [pair[first + 1] / pair[first] for pair in pairs]
    return median(each), min(each), max(each)


def relative(ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the norm-wise relative error of each tensor from every rank's ``(|difference|^2, |reference|^2)``."""
    return [
        math.sqrt(sum(part[0] for part in parts) / sum(part[1] for part in parts)) for parts in zip(*ranks, strict=True)
    ]


def markdown(record: dict[str, Any]) -> str:
    """Return the record as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    links = "; ".join(f"sp {sp}: {speed / 1e9:.2f} GB/s sent a rank" for sp, speed in record["link"].items())
    load = ", ".join(f"{average:.1f}" for average in record["load_average"])
    cases, options = record["cases"], record["options"]
    return "\n\n".join(
        [
            "# Attention layer on CPU: ours beside DeepSpeed's UlyssesSPAttentionHF",
            f"{record['date']}, commit {record['commit']}, {record['hardware']}; {versions}. fp32, one row, heads of "
            f"{options['head_size']}, forward and backward, {options['repetitions']} pairs a case. "
            f"Command: `{record['command']}`.",
            RULES,
            f"Link: {links}. Load average over the last 1, 5 and 15 minutes of the run: {load}.",
            "## Under gradient checkpointing, exchange alone: the kernel is a stub that only writes its results\n\n"
            "As users train: forward, recomputation and backward, ours with its attention output kept (the default).",
            _times(cases, "exchange, checkpointed"),
            "## Under gradient checkpointing, whole layer: the real kernel (torch's fused SDPA on both sides)",
            _times(cases, "layer, checkpointed"),
            "## Without checkpointing, exchange alone",
            _times(cases, "exchange"),
            "## Without checkpointing, whole layer",
            _times(cases, "layer"),
            "## Memory: peak resident memory of the fullest rank in one step, beyond inputs, in fresh processes\n\n"
            "In brackets: in units of the rank's own slice of the queries.",
            _memory(cases),
            "## Collectives and bytes that rank 0 sends, forward + backward",
            _traffic(cases),
            "## Error against one process in fp64, norm-wise a tensor, each document by itself",
            _errors(record["errors"]),
        ]
    )


def summary_line(title: str, case: dict[str, Any], pairs: Sequence[Sequence[float]]) -> str:
    """Return what is shown while the benchmark runs."""
    middle, low, high = ratios(pairs)
    return f"{title} {_size(case)}: theirs/ours {middle:.2f} ({low:.2f} to {high:.2f})"


def write(record: dict[str, Any], folder: Path) -> list[Path]:
    """Store the record and its page; return their paths."""
    return store("attention_cpu", markdown(record), record, folder)


def _size(case: dict[str, Any]) -> str:
    return f"sp {case['sp']}, {case['tokens']:,} tokens a rank, {case['heads']}/{case['kv_heads']} heads"


def _times(cases: Sequence[dict[str, Any]], kind: str) -> str:
    head = ("size", "ours", "theirs", "theirs/ours", "CPU time: ours", "theirs", "theirs/ours", "bound", "ours/bound")
    rows: list[Sequence[str]] = []
    for case in cases:
        pairs = case[kind]
        if not pairs:
            rows.append((_size(case), *[NOT_MEASURED if pairs is None else "failed"] * 3, *[""] * 5))
            continue
        row = [_size(case)]
        for first in (0, 2):
            row += [f"{median(pair[first + side] for pair in pairs) * 1e3:.1f} ms" for side in (0, 1)]
            row.append("**{:.2f}** ({:.2f} to {:.2f})".format(*ratios(pairs, first)))
        bound, ours = case["bound_s"], median(pair[0] for pair in pairs)
        rows.append([*row, f"{bound * 1e3:.1f} ms", f"{ours / bound:.1f}"])
    return table(head, rows) + _failures(cases, kind)


def _failures(cases: Sequence[dict[str, Any]], kind: str) -> str:
    texts = [f"{_size(case)}: {case['failures'][kind]}" for case in cases if kind in case["failures"]]
    return "".join(f"\n\nFailed: {text}" for text in texts)


def _memory(cases: Sequence[dict[str, Any]]) -> str:
    head = (
        "size",
        "stub: ours",
        "stub: theirs",
        "theirs/ours",
        "real kernel: ours",
        "real kernel: theirs",
        "theirs/ours",
    )
    rows = []
    for case in cases:
        unit = 4 * case["tokens"] * case["heads"] * case["head_size"]
        row = [_size(case)]
        for kind in ("stub", "real"):
            peaks = [case["memory"].get(f"{kind} {side}") for side in SIDES]
            row += [NOT_MEASURED if p is None else f"{max(p) / MIB:.1f} MiB ({max(p) / unit:.1f})" for p in peaks]
            row.append("" if None in peaks else f"**{max(peaks[1]) / max(peaks[0]):.2f}**")
        rows.append(row)
    return table(head, rows)


def _traffic(cases: Sequence[dict[str, Any]]) -> str:
    head = ("size", "collectives: ours", "collectives: theirs", "sent: ours", "sent: theirs", "theirs/ours")
    rows = []
    for case in cases:
        row, sent = [_size(case)], {}
        for side in SIDES:
            phases = [case["traffic"][side][phase] for phase in ("forward", "backward")]
            row.append(" + ".join(str(int(phase["collectives"])) for phase in phases))
            sent[side] = [phase["bytes"] / MIB for phase in phases]
        row += [" + ".join(f"{part:.2f}" for part in sent[side]) + " MiB" for side in SIDES]
        rows.append([*row, f"{sum(sent['theirs']) / sum(sent['ours']):.2f}"])
    return table(head, rows)


def _errors(errors: Sequence[dict[str, Any]]) -> str:
    head = ("size", "row", "side", "output", "gradient of q", "of k", "of v")
    rows = []
    for error in errors:
        figures = [f"{value:.1e}" for value in error["errors"]] if error["errors"] else [error["failure"], "", "", ""]
        rows.append((_size(error), error["row"], error["side"], *figures))
    return table(head, rows)
