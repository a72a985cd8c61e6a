"""What a run of ``bench_packing.py`` says, from its record: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.stored_result import MIB, NOT_MEASURED, met, origin, spread, table

DOCUMENTS_A_SECOND = 4e6
FILL_POINTS = 0.1
HALF_FILL = 0.995
LARGE_SECONDS, LARGE_BYTES = 60.0, 1e9

RULES = """\
How to read it: every process is held on one core. **Ours** is the whole of planning: drawing in a seeded order,
cutting, packing, and writing pieces and rows to disk; the first plan, which loads compiled code, is left out. Wall
time is what passed, CPU time what the process was given of the core, which other work disturbs less; a rate is
given as its median with minimum and maximum over plans with seeds of their own. **BFD** is best-fit-decreasing on
the same pieces, all known and sorted beforehand: an exact, compiled one in memory, which draws no order and writes
nothing, so its rate says what packing alone could cost. **TRL** is `pack_dataset(..., "bfd")` in batches of 1,000
documents, the default of `datasets.map`, on the first documents of the same corpus, as many whole batches as hold
1.3e9 tokens; it moves the tokens (one byte each here, where its ids take eight), where a plan only says where they
are. Fill is tokens in rows over rows × context; `at most` is what the tokens alone would allow. TRL cuts off what
exceeds the context: `lost`; where its documents are few, its fill differs from ours by chance."""


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    options, cases = record["options"], record["cases"]
    trl = f" TRL's side: {_trl_versions(cases)}." if cases else ""
    parts = [
        "# Planning and packing: ours beside offline best-fit-decreasing and TRL's bfd",
        f"{origin(record)} {options['repetitions']} plans a case.{trl}",
        RULES,
        *(_cases(cases) if cases else ()),
        f"## Documents of about half a row: the goal of `wide_fit` is {100 * HALF_FILL:.1f}%",
        "Documents of 0.34 to 0.66 × 131,072 tokens, a million unless `--documents` says otherwise.",
        table(("packing", "rows", "fill", "BFD", "goal", "CPU: M documents/s"), _half(record["half"])),
        "## Large plans, each in a fresh process, 131,072 tokens",
        _large(record["large"]),
    ]
    return "\n\n".join(parts)


def _cases(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "Corpora: log-normal with sigma 1.5 and mean 6,500, clipped to [2, 1,000,000]; even lengths of 0.55 "
        "to 0.9 × the context, of which no two share a row, so that every method fills as much as the documents "
        "do; and as many tokens of each, shuffled.",
        f"## Speed: the goal is {DOCUMENTS_A_SECOND / 1e6:.0f}M documents/s on one core",
        table(
            ("corpus", "context", "documents", "wall: M documents/s", "CPU: M documents/s", "goal",
             "BFD: packing alone", "TRL: documents/s", "ours/TRL, wall"),
            [_speed(case) for case in cases],
        ),
        f"## Fill: the goal is within {FILL_POINTS} points of best-fit-decreasing",
        table(
            ("corpus", "context", "rows", "ours", "BFD", "points behind", "goal", "at most", "TRL", "TRL lost"),
            [_fill(case) for case in cases],
        ),
    ]  # fmt: skip


def points_behind(ours: Sequence[float], offline: Sequence[float]) -> float:
    """Return by how many percentage points the worst of our plans fills less than best-fit-decreasing."""
    return 100 * max(theirs - mine for mine, theirs in zip(ours, offline, strict=True))


def documents_a_second(num_documents: int, seconds: Sequence[float]) -> list[float]:
    """Return the rate of each plan."""
    return [num_documents / one for one in seconds]


def _speed(case: Mapping[str, Any]) -> list[str]:
    ours, trl, count = case["ours"], case["trl"], case["num_documents"]
    wall, cpu = (documents_a_second(count, ours[name]) for name in ("wall_s", "cpu_s"))
    row = [case["corpus"], f"{case['context_tokens']:,}", f"{count:,}"]
    row += [spread([rate / 1e6 for rate in rates]) for rates in (wall, cpu)]
    row += [met(median(wall) >= DOCUMENTS_A_SECOND)]
    row.append(f"{median(documents_a_second(count, ours['offline_wall_s'])) / 1e6:.1f}M")
    if "failure" in trl:
        return [*row, f"{NOT_MEASURED}: {trl['failure']}", ""]
    rate = trl["num_documents"] / trl["wall_s"]
    return [*row, f"{rate:,.0f} (of {trl['num_documents']:,})", f"**{median(wall) / rate:,.0f}**"]


def _fill(case: Mapping[str, Any]) -> list[str]:
    ours, trl = case["ours"], case["trl"]
    behind = points_behind(ours["fill"], ours["offline_fill"])
    row = [case["corpus"], f"{case['context_tokens']:,}", f"{ours['num_rows']:,}"]
    row += [_percent(median(ours["fill"])), _percent(median(ours["offline_fill"])), f"{behind:.3f}"]
    row += [met(behind <= FILL_POINTS), _percent(ours["fill_bound"])]
    if "failure" in trl:
        return [*row, NOT_MEASURED, ""]
    lost = 1 - trl["kept_tokens"] / trl["tokens"]
    return [*row, _percent(trl["kept_tokens"] / (trl["num_rows"] * case["context_tokens"])), _percent(lost)]


def _half(plans: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            name, f"{ours['num_rows']:,}", _percent(median(ours["fill"])), _percent(median(ours["offline_fill"])),
            met(min(ours["fill"]) >= HALF_FILL) if name == "wide_fit" else "",
            spread([rate / 1e6 for rate in documents_a_second(ours["num_pieces"], ours["cpu_s"])]),
        ]
        for name, ours in plans.items()
    ]  # fmt: skip


def _large(plans: Sequence[Mapping[str, Any]]) -> str:
    if not plans:
        return NOT_MEASURED
    head = (
        "documents", "rows", "fill", "load + plan", "CPU", "M documents/s", f"under {LARGE_SECONDS:.0f} s",
        "peak RSS", "of it lengths", "before", "under 1 GB", "plan on disk",
    )  # fmt: skip
    return table(head, [_large_row(found) for found in plans])


def _large_row(found: Mapping[str, Any]) -> list[str]:
    seconds, peak = found["wall_s"] + found["load_s"], found["peak_rss_bytes"]
    return [
        f"{found['num_documents']:,}", f"{found['num_rows']:,}", _percent(found["fill"]),
        f"{found['load_s']:.1f} + {found['wall_s']:.1f} s", f"{found['cpu_s']:.1f} s",
        f"{found['num_documents'] / found['wall_s'] / 1e6:.2f}", met(seconds < LARGE_SECONDS),
        _mib(peak), _mib(found["lengths_bytes"]), _mib(found["rss_before_bytes"]), met(peak < LARGE_BYTES),
        _mib(found["plan_bytes"]),
    ]  # fmt: skip


def _trl_versions(cases: Sequence[Mapping[str, Any]]) -> str:
    for case in cases:
        if "versions" in case["trl"]:
            return ", ".join(f"{name} {version}" for name, version in case["trl"]["versions"].items())
    return NOT_MEASURED


def _percent(share: float) -> str:
    return f"{share:.3%}"


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"
