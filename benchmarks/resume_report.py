"""What a run of ``bench_resume.py`` says, from its record: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.stored_result import MIB, NOT_MEASURED, met, origin, spread, table

GOAL_S = 1.0

RULES = """\
How to read it: every line is of fresh processes that do nothing else; a time is the median with minimum and maximum.
**first row** is what the goal is about: opening the plan, opening the corpus, and receiving the first row of a step
half-way through the plan, on one rank that holds the whole row. Imports stand apart, since a process pays them
whether it resumes or begins; **process** is the whole life of the process, the interpreter's own start and end
included. **cold**: the kernel was asked beforehand to drop the files from its page cache; **warm**: they were read
before. The peer streams a Parquet data set of its own, written by `datasets`, and hands out documents: it packs
nothing. `skip(n)` makes the data set anew and skips; `state` loads the state that an iterator had after n documents: it
passes over whole files and skips in the last, so it grows with the documents of a file and not with those before it.
The rate is what skipping costs a document beyond what the first document costs anyway; what it comes to at the
middle of our plan is that rate times the documents, a calculation and not a measurement."""


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    plan, peer = record["plan"], record["peer"]
    count = record["cold"][0]["num_documents"]
    about = (
        f"Ours: a corpus of {count:,} documents (log-normal, sigma 1.5, mean 6,500, clipped at 1M; the sidecar names "
        f"8,000 distinct ones of 4 shards), {plan['corpus_bytes'] / MIB:,.0f} MiB with its shards; its plan at 131,072 "
        f"tokens has {plan['num_rows']:,} rows and {plan['num_steps']:,} steps, {plan['plan_bytes'] / MIB:,.0f} MiB. "
        f"Theirs: {peer['num_documents']:,} documents, {peer['tokens']:,} tokens of 16 bits, in 4 files."
    )
    return "\n\n".join(
        [
            f"# Resume in a plan of {count:,} documents, beside skipping with `datasets`",
            f"{origin(record)} {record['repetitions']} processes of each kind, in turn.",
            RULES,
            about,
            f"## Ours: the goal is a first row in under {GOAL_S:.0f} s",
            _ours(record),
            "## Theirs",
            _theirs(record, count),
            "## Making that plan, as a run does: lengths from the sidecar, then planned to disk",
            table(
                ("lengths read", "planned", "peak RSS"),
                [(f"{plan['lengths_s']:.1f} s", f"{plan['plan_s']:.1f} s", f"{plan['peak_rss_bytes'] / MIB:,.0f} MiB")],
            ),
        ]
    )


def skip_rate(skips: Mapping[str, Sequence[Mapping[str, float]]]) -> float | None:
    """Return the documents/s at which the longest skip goes, from the medians of it and of no skip.

    None where it did not take longer than no skip: nothing can be said then.
    """
    most = max(skips, key=int)
    none, some = (median(run["seconds"] for run in skips[count]) for count in ("0", most))
    return int(most) / (some - none) if some > none else None


def _ours(record: Mapping[str, Any]) -> str:
    head = ("files", "first row", "goal", "of it plan", "corpus", "row", "imports", "process", "peak RSS")
    rows = []
    for kind in ("cold", "warm"):
        runs = record[kind]
        row = [kind, f"**{_seconds(runs, 'seconds')}**", met(max(run["seconds"] for run in runs) < GOAL_S)]
        row += [_seconds(runs, name) for name in ("plan_s", "corpus_s", "row_s", "import_s", "process_s")]
        rows.append([*row, f"{max(run['peak_rss_bytes'] for run in runs) / MIB:,.0f} MiB"])
    return table(head, rows)


def _theirs(record: Mapping[str, Any], num_documents: int) -> str:
    rows = [
        [f"`skip({int(count):,})`", _seconds(runs, "seconds"), _seconds(runs, "import_s"), _seconds(runs, "process_s")]
        for count, runs in record["skip"].items()
    ]
    most = max(record["skip"], key=int)
    state = record["state"]
    rows.append(
        [f"state after {int(most):,}", *(_seconds(state, name) for name in ("seconds", "import_s", "process_s"))]
    )
    rate, half = skip_rate(record["skip"]), num_documents // 2
    text = f"What skipping costs a document: {NOT_MEASURED}; {int(most):,} were too few to tell."
    if rate is not None:
        text = (
            f"Skipping goes at {rate:,.0f} documents/s, measured over {int(most):,} documents. Calculated, not "
            f"measured: {half:,} documents, the middle of our plan, skipped at that rate, take "
            f"{half / rate / 60:,.0f} minutes."
        )
    return table(("way", "first document", "imports", "process"), rows) + "\n\n" + text


def _seconds(runs: Sequence[Mapping[str, float]], name: str) -> str:
    return spread([run[name] for run in runs], "{:.3f}") + " s"
