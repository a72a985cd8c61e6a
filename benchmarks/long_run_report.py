"""What a run of ``bench_long_run.py`` says, from its record: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.stored_result import MIB, NOT_MEASURED, met, origin, table

GOAL_CPU_S, GOAL_MIB, GOAL_CHECKPOINTS_S = 10.0, 500, 10.0

RULES = """\
How to read it: every line is one process that does nothing else, from its start; CPU time is that of all its threads,
imports included, and the peak of resident memory is the process's own. Where a machine is shared, CPU time is what
counts: the S3 server runs on the same cores, so that the seconds of the lines about checkpoints are mostly its own.
**before** is the other tree, on the same files."""

_WORDS = {
    "inspect": "`inspect`",
    "json": "`inspect --json`, every step of it",
    "progress": "the progress view's first look",
    "resume": "a resume reads the journal's ends, and all of it in the background for its account of the time",
    "checkpoints": "`inspect --checkpoints`",
    "inventory": "the inventory for MLflow",
}


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    run = record["run"]
    about = (
        f"The run: {run['num_steps']:,} steps in one attempt, a journal of {run['journal_bytes'] / MIB:,.0f} MiB; "
        f"{run['num_checkpoints']:,} checkpoints on an object store, each with {run['num_shards']} shards and a "
        f"manifest of {run['manifest_bytes'] / 2**10:,.0f} KiB."
    )
    return "\n\n".join(
        [
            "# A long run: looking at it, and going on with it",
            f"{origin(record)} Before: commit {record.get('before_commit', NOT_MEASURED)}.",
            RULES,
            about,
            f"## The goal is {GOAL_CPU_S:.0f} CPU seconds and {GOAL_MIB} MiB",
            _lines(record, ("inspect", "progress", "resume"), lambda took: _is_light(took[0])),
            "## No goal: the text of a million steps",
            _lines(record, ("json",), None),
            f"## The goal is {GOAL_CHECKPOINTS_S:.0f} s",
            _lines(record, ("checkpoints", "inventory"), lambda took: took[0]["seconds"] <= GOAL_CHECKPOINTS_S),
            "## Retention, after a save",
            table(("", "before", "after"), [_retention(record, 0), _retention(record, 1)]),
        ]
    )


def _lines(record: Mapping[str, Any], names: Sequence[str], is_met: Any) -> str:
    head = ("", "before", "after", *(() if is_met is None else ("goal",)))
    rows = []
    for name in names:
        after = record["after"][name]
        verdict = () if is_met is None else (met(is_met(after)),)
        rows.append((_WORDS[name], _took(record, "before", name, 0), _took(record, "after", name, 0), *verdict))
    return table(head, rows)


def _is_light(took: Mapping[str, float]) -> bool:
    return took["cpu_s"] <= GOAL_CPU_S and took["peak_bytes"] <= GOAL_MIB * MIB


def _retention(record: Mapping[str, Any], number: int) -> tuple[str, str, str]:
    words = ("an attempt's first", "each later one")[number]
    return (words, *(_took(record, tree, "retention", number) for tree in ("before", "after")))


def _took(record: Mapping[str, Any], tree: str, name: str, number: int) -> str:
    if record[tree] is None:
        return NOT_MEASURED
    took = record[tree][name][number]
    return f"{took['cpu_s']:.1f} CPU s, {took['seconds']:.1f} s, {took['peak_bytes'] / MIB:,.0f} MiB"
