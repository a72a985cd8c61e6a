"""What a run of ``bench_data.py`` says, from its record: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.stored_result import MIB, origin, spread, table

RULES = """\
How to read it: a row is 131,072 tokens; its ids, labels and positions arrive as int64. With consumers, the first step
is taken by itself: **first row** is the longest wait of any rank for its first row, **start** the CPU seconds until
that step was there, both from the moment when the consumers are up; it is read directly, and Ray Data starts its
reading processes after it: **second step** is the longest wait for a row of that. Speed and **CPU a row** are of the
steps after those two. CPU is of all processes below the one that runs the benchmark, Ray's own
included: what loading takes from the machine, which other work disturbs less than it does a rate. Memory is resident
and not shared (the object store is shared and not counted), at its highest, summed over the processes of a kind. The
direct reader is the peer of Ray Data: same rows, byte for byte, in the same run and in turn. Ranks, readers and this
benchmark share the cores, so four consumers are no four times one."""


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as a page."""
    corpus = record["corpus"]
    about = (
        f"Corpus: the standard library's sources, {corpus['num_documents']:,} documents, {corpus['num_tokens']:,} "
        f"tokens of {corpus['dtype']} in {corpus['num_shards']} shards of {corpus['num_bytes'] / MIB:,.0f} MiB in all; "
        f"{corpus['num_rows']:,} rows, {record['rows_per_step']} a step."
    )
    return "\n\n".join(
        [
            "# Rows through both engines",
            origin(record),
            RULES,
            about,
            "## Speed, CPU and memory",
            _engines(record),
            f"## Behind steps of {record['step_s']:.0f} s, {record['world_size']} ranks",
            _hidden(record),
            "## Random reads",
            _reads(record["reads"]),
        ]
    )


def amplification(read: Mapping[str, Any]) -> tuple[float, float]:
    """Return the tokens decoded for each that was asked for, and the bytes unpacked for each byte asked for."""
    return read["decoded_tokens"] / read["asked_tokens"], read["unpacked_bytes"] / read["asked_bytes"]


def _engines(record: Mapping[str, Any]) -> str:
    alone = record["alone"]
    rows = [
        [
            "direct, 1 rank alone",
            f"{len(alone[0]['waits_s'])}",
            spread([run["tokens"] / run["seconds"] / 1e6 for run in alone], "{:.1f}"),
            spread([1e3 * run["cpu_s"] / len(run["waits_s"]) for run in alone], "{:.1f}") + " ms",
            "",
            "",
            spread([run["waits_s"][0] for run in alone], "{:.3f}") + " s",
            "",
            f"{max(run['peak_rss_bytes'] for run in alone) / MIB:,.0f} MiB in all, "
            f"{max(run['rss_before_bytes'] for run in alone) / MIB:,.0f} before",
        ]
    ]
    for engine, name in (("direct", "direct"), ("ray", "Ray Data")):
        runs = [run for run in record["runs"] if run["engine"] == engine]
        rows.append(
            [
                f"{name}, {record['world_size']} consumers",
                f"{runs[0]['num_rows']}",
                spread([run["tokens"] / run["seconds"] / 1e6 for run in runs], "{:.1f}"),
                spread([1e3 * run["cpu_s"] / run["num_rows"] for run in runs], "{:.1f}") + " ms",
                _shares(runs),
                spread([run["start_cpu_s"] for run in runs], "{:.1f}") + " s",
                spread([run["first_s"] for run in runs], "{:.3f}") + " s",
                spread([run["second_s"] for run in runs], "{:.3f}") + " s",
                _memory(runs),
            ]
        )
    return table(
        ("engine", "rows", "M tokens/s", "CPU a row", "of it", "start", "first row", "second step", "memory"), rows
    )


def _shares(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the CPU a row of each kind of process, as medians."""
    kinds = sorted({kind for run in runs for kind in run["cpu_of_s"]})
    used = {kind: median(1e3 * run["cpu_of_s"].get(kind, 0.0) / run["num_rows"] for run in runs) for kind in kinds}
    return "; ".join(f"{kind} {one:.1f}" for kind, one in used.items())


def _memory(runs: Sequence[Mapping[str, Any]]) -> str:
    kinds = sorted({kind for run in runs for kind in run["rss"]})
    peaks = {kind: max(run["rss"].get(kind, 0.0) for run in runs) for kind in kinds}
    return "; ".join(f"{kind} {size / MIB:,.0f} MiB" for kind, size in peaks.items())


def _hidden(record: Mapping[str, Any]) -> str:
    rows = []
    for run in record["hidden"]:
        waits = [wait for rank in run["waits_s"] for wait in rank]
        steps = len(run["waits_s"][0]) * record["world_size"] // record["rows_per_step"]
        worked = steps * record["step_s"]
        name = "direct" if run["engine"] == "direct" else f"Ray Data, windows of {run['max_blocks']} blocks"
        rows.append(
            [
                name,
                f"{steps}",
                f"{run['first_s']:.3f} s",
                f"{run['second_s']:.3f} s",
                f"{1e3 * median(waits):.2f} ms",
                f"{1e3 * max(waits):.1f} ms",
                f"{max(sum(one) for one in run['waits_s']) / worked:.3%}",
                f"{1e3 * run['cpu_s'] / run['num_rows']:.1f} ms",
            ]
        )
    head = ("engine", "steps", "first row", "second step", "wait for a later row: median", "longest",
            "waiting/working, worst rank", "CPU a row")  # fmt: skip
    text = (
        "A rank sleeps for its share of a step after each row, so that loading is hidden where `wait` is nothing: the "
        "bound is 0. The first two steps are left out of the waits. The last engine has the border of a window every "
        "4 steps. The CPU a row holds what Ray's own processes use while ranks sleep."
    )
    return text + "\n\n" + table(head, rows)


def _reads(reads: Mapping[str, Any]) -> str:
    names = {
        "documents": "our shards, whole documents at random",
        "pieces": "our shards, pieces of rows in the order of training",
        "default": "one Parquet file by pyarrow's defaults, whole documents at random",
    }
    rows = [
        [
            name,
            f"{len(read['ms']):,}",
            f"{read['asked_bytes'] / len(read['ms']) / 1024:,.1f} KiB",
            spread(read["ms"], "{:.2f}") + " ms",
            *(f"**{factor:,.1f}**" for factor in amplification(read)),
        ]
        for key, name in names.items()
        for read in (reads[key],)
    ]
    text = (
        "Amplification is what a first read takes, over what was asked for (1 is the bound): of our shards, blocks of "
        "4 KiB, which are compared with their checksums; later reads of a block take what they ask for. Of Parquet, "
        "row groups, at every read, in which a token of 16 bits is unpacked as 32."
    )
    head = ("from", "reads", "a read asks for", "a read", "amplification: tokens", "bytes")
    return text + "\n\n" + table(head, rows)
