"""The programme for a GPU that is lent for minutes: each item is one command of at most eight minutes.

``make gpu ITEM=P1a`` runs an item and stores its page, with commit, date and hardware, beside the pages of the
benchmarks that it calls. ``--tiny`` runs it on a CPU, to test it, and stores nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import bench_kernels, floor, pinned, recovery_gpu
from benchmarks.gpu.bench_recipe import RECIPE
from benchmarks.gpu.bench_step import STEP
from benchmarks.gpu.case_runs import Benchmark, Measure, case_name, measured, run, tiny, typical
from benchmarks.runner import REPOSITORY, RESULTS, gpu_provenance, origin, say, store, table
from ray_ulysses.attention.kernels.flash import FLASH_4

LIMIT_S = 480.0
_SMOKE = (
    "tests/gpu/test_seam_gpu.py",
    "tests/gpu/test_kernels_gpu.py::test_a_kernel_equals_the_definition_forward_and_backward",
    # It compiles for minutes.
    "-k=not flash_attn_4",
)
_FAST_PATHS = (
    "tests/gpu/test_zoo_gpu.py::test_a_step_in_fp32_is_that_of_one_process_on_the_cpu",
    "tests/gpu/test_memory_gpu.py::test_fused_norms_and_compiled_tiles_in_bf16_are_as_close_to_fp32_as_without",
    "tests/gpu/test_run_gpu.py",
    "-k=llama or qwen3 or compiled or zero",
)
_KEPT_OUTPUT = 20_000
"""Characters of what a command printed that are stored."""


@dataclass(kw_only=True, slots=True)
class Lease:
    """How an item runs.

    Attributes:
        out: Folder for pages; None to store nothing.
        commit: The commit, where the tree came without its history.
        is_tiny: Whether it runs on a CPU, to test it.
        before: Another tree of this project, for an item that compares.
        cudnn: Folders of further cuDNN libraries, by version.
        measure: Measures one case of a benchmark.
        call: Runs a command with further variables and a limit in seconds; returns its exit code and output.
        ends: When the item has to be over, by `time.monotonic`.
    """

    out: Path | None
    commit: str | None
    is_tiny: bool
    before: Path | None = None
    cudnn: Mapping[str, Path] = field(default_factory=dict)
    measure: Measure
    call: Callable[[Sequence[str], Mapping[str, str], float], tuple[int, str]]
    ends: float

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(1.0, self.ends - time.monotonic())

    def options(self) -> list[str]:
        """Return the options of a benchmark."""
        found = ["--add"]
        found += ["--tiny"] if self.is_tiny else []
        found += [] if self.out is None else ["--out", str(self.out)]
        return found + ([] if self.commit is None else ["--commit", self.commit])


Found = dict[str, Any]
"""What a part of an item found: ``what``, ``result`` in words, whether it ``holds``, and more figures as they are."""
Part = Callable[[Lease], list[Found]]


def cases_of(benchmark: Benchmark, only: str, *more: str) -> Part:
    """Return the part that measures the cases of a benchmark in whose names an expression is found."""

    def part(lease: Lease) -> list[Found]:
        def measure(case: dict[str, Any], script: str, limit_s: float) -> dict[str, Any]:
            return lease.measure(case, script, min(limit_s, lease.left_s))

        record = run(benchmark, [*lease.options(), "--only", only, *more], measure)
        chosen = [one for one in record["found"] if re.search(only, case_name(one))]
        return [
            {"what": case_name(one), "result": _words(one), "holds": "failure" not in one, "case": one}
            for one in chosen
        ]

    return part


def _words(one: Mapping[str, Any]) -> str:
    if "failure" in one:
        return str(one["failure"])
    classes = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in one.get("classes", {}).items())
    clock = one.get("clocks", {}).get("clocks.sm")
    return "; ".join(
        [
            f"{typical(dict(one)):.3f} s",
            *([f"MFU {one['mfu']:.1%}"] if one.get("mfu") else []),
            *([f"{words} of the floor"] if (words := floor.in_words(one, typical(dict(one)))) else []),
            *([f"SM clock {clock[1]:.0f} MHz"] if clock else []),
            *([f"by class: {classes}"] if classes else []),
        ]
    )


def run_tests(*paths: str, limit_s: float = LIMIT_S) -> Part:
    """Return the part that runs tests, and keeps their output."""

    def part(lease: Lease) -> list[Found]:
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-rs", "-p", "no:cacheprovider", "-m", "gpu", *paths]
        code, text = lease.call(command, {}, min(limit_s, lease.left_s))
        # The summary ends what is written to stdout, which comes last.
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        # Tests that were all skipped have shown nothing.
        holds = code == 0 and " passed" in last
        return [{"what": " ".join(paths), "result": last, "holds": holds, "output": text[-_KEPT_OUTPUT:]}]

    return part


def kernels(lease: Lease) -> list[Found]:
    """Measure our kernels over the table of shapes, with each cuDNN that is given, and the candidates."""
    options = [*lease.options(), "--only", "ours: "]
    if lease.is_tiny:
        record = bench_kernels.main(options)
        failed = [one for one in record["found"] if "failure" in one]
        return [{"what": "kernels", "result": f"{len(record['found'])} measured", "holds": not failed}]
    found = []
    script = str(Path(bench_kernels.__file__))
    for version in ("", *lease.cudnn):
        command = [sys.executable, script, *lease.options(), "--only", "ours: cudnn" if version else "ours: "]
        variables = {}
        if version:
            # torch finds its own cuDNN before one in LD_LIBRARY_PATH; cuDNN finds its parts there.
            folder = lease.cudnn[version]
            variables = {"LD_PRELOAD": str(folder / "libcudnn.so.9"), "LD_LIBRARY_PATH": str(folder)}
            command += ["--cudnn", version]
        code, text = lease.call(command, variables, lease.left_s)
        result = "stored in kernels_gpu" if code == 0 else text[-500:]
        found.append({"what": f"kernels, cuDNN {version or 'of torch'}", "result": result, "holds": code == 0})
    if FLASH_4.runs_on("cuda"):
        found += run_tests("tests/gpu/test_kernels_gpu.py", "-k=flash_attn_4")(lease)
    return found


def killed(lease: Lease) -> list[Found]:
    """Kill a process that holds memory as at a million tokens."""
    sizes = (0.01, 0.0, "cpu") if lease.is_tiny else (pinned.PINNED_GIB, pinned.DEVICE_GIB, "cuda")
    one = pinned.measure(*sizes, limit_s=lease.left_s)
    free = "" if one["free_s"] is None else f", the GPU's memory is free after {one['free_s']:.1f} s"
    result = f"taken in {one['taken_s']:.1f} s; ended {one['gone_s']:.2f} s after SIGKILL{free}"
    what = f"{one['host_gib']:g} GiB pinned, {one['device_gib']:g} GiB on the GPU"
    return [{"what": what, "result": result, "holds": lease.is_tiny or one["free_s"] is not None, **one}]


def recovered(lease: Lease) -> list[Found]:
    """Kill a training process, and time the next step."""
    one = recovery_gpu.recover(lease.is_tiny, lease.left_s)
    step, lost = one["resumed_step"], one["lost_steps"]
    result = f"next step after {one['next_step_s']:.1f} s, from the state of step {step}, {lost} steps lost"
    parent = "a launcher itself: the next one imports everything again"
    if one["is_forked"]:
        parent = "forked by a warm launcher, which " + ("goes on" if one["launcher_survived"] else "ended too")
    return [
        {"what": "a training process is killed", "result": result, "holds": step > 0 and lost <= 1, **one},
        {"what": "the training process was", "result": parent, "holds": one["is_forked"] and one["launcher_survived"]},
    ]


def elementwise(lease: Lease) -> list[Found]:
    """Measure packed rows of 32k and one row of 131k, without and with what saves element-wise work, in turn.

    With another tree of this project, that tree is measured first.
    """
    found = []
    ways: list[tuple[str, Path | None, dict[str, Any]]] = [
        ("another tree", lease.before, {}),
        ("Transformers' norms", REPOSITORY, {"fused_norms": False}),
        ("fused norms", REPOSITORY, {}),
        ("fused norms and compiled MLPs", REPOSITORY, {"compile": "mlp"}),
    ]
    for benchmark, name in (
        (STEP, "32k, documents around 4,000: ours:kernel"),
        (RECIPE, "131k, kept in host memory: ours"),
    ):
        case = next(one for one in benchmark.cases if case_name(one) == name)
        for way, tree, changes in ways:
            # The rows of 32k are not tiled there, so nothing is compiled.
            if tree is None or (changes.get("compile") and benchmark is STEP):
                continue
            script = str(tree / "benchmarks" / "gpu" / benchmark.script)
            one = lease.measure({**(tiny(case) if lease.is_tiny else case), "changes": changes}, script, lease.left_s)
            found.append({"what": f"{way}: {name}", "result": _words(one), "holds": "failure" not in one, "case": one})
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An item of the programme.

    Attributes:
        about: What it shows.
        parts: What it runs, one after the other.
    """

    about: str
    parts: tuple[Part, ...]


ITEMS: dict[str, Item] = {
    "P1a": Item(
        about="truth at 131k: smoke tests, ours and DeepSpeed, time by class of kernel, clocks",
        parts=(
            run_tests(*_SMOKE, limit_s=150.0),
            cases_of(RECIPE, "131k, kept in host memory: ours", "--profile", os.devnull),
            cases_of(RECIPE, "131k, kept in host memory: deepspeed"),
        ),
    ),
    "P1b": Item(about="524k, ours", parts=(cases_of(RECIPE, "524k.*ours"),)),
    "P1c": Item(about="524k, DeepSpeed", parts=(cases_of(RECIPE, "524k.*deepspeed"),)),
    "P2": Item(about="kernels over the table of shapes", parts=(kernels,)),
    "P3a": Item(about="several ranks on one GPU over NCCL", parts=(run_tests("tests/gpu/test_nccl_ranks.py"),)),
    "P3b": Item(about="local nodes that share a GPU", parts=(run_tests("tests/gpu/test_local_nodes_gpu.py"),)),
    "P4": Item(
        about="recovery on a GPU: the launcher, a killed process's memory, the next step",
        parts=(
            recovered,
            killed,
            run_tests("tests/gpu/test_groups_gpu.py", "tests/gpu/test_diagnostics_gpu.py", limit_s=120.0),
        ),
    ),
    "P5": Item(
        about="element-wise work: without and with fused norms and compiled MLPs, in one call",
        parts=(run_tests(*_FAST_PATHS, limit_s=120.0), elementwise),
    ),
    "P6a": Item(about="1M: steps of 12 of 36 layers", parts=(cases_of(RECIPE, "1M, 12 of 36 layers"),)),
    "P6b": Item(about="1M: a whole step", parts=(cases_of(RECIPE, "1M, kept in host memory: ours"),)),
    "P6c": Item(
        about="2M: a step of 12 of 36 layers; run it twice for two",
        parts=(cases_of(RECIPE, "2M, 12 of 36 layers", "--more"),),
    ),
}


def call(command: Sequence[str], variables: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """Run a command; return its exit code, 124 if it took too long, and what it wrote to stderr and then to stdout."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Its children hold the GPU too.
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return 124, f"{err}{out}\nnot within {limit_s:.0f} s"
    return process.returncode, err + out


def run_item(name: str, lease: Lease) -> dict[str, Any]:
    """Run an item, store its page after each part, and return its record."""
    record: dict[str, Any] = {
        **gpu_provenance(("torch", "transformers", "deepspeed", "ray"), lease.commit),
        "command": f"make gpu ITEM={name}",
        "item": name,
        "parts": [],
    }
    for part in ITEMS[name].parts:
        began = time.monotonic()
        try:
            found = part(lease)
        except (Exception, SystemExit) as error:
            # The next part may still be worth its minutes.
            found = [{"what": "a part", "result": f"{type(error).__name__}: {error}"[:500], "holds": False}]
        record["parts"] += [{**one, "seconds": time.monotonic() - began} for one in found]
        if lease.out is not None:
            store(f"programme_{name.lower()}", markdown(record), record, lease.out)
    say(markdown(record))
    return record


def markdown(record: Mapping[str, Any]) -> str:
    """Return an item's page."""
    rows = [(one["what"], one["result"], "yes" if one["holds"] else "**no**") for one in record["parts"]]
    outputs = [f"## {one['what']}\n\n```\n{one['output'].strip()}\n```" for one in record["parts"] if "output" in one]
    title = f"# {record['item']}: {ITEMS[record['item']].about}"
    return "\n\n".join([title, origin(record), table(("what", "result", "holds"), rows), *outputs])


def main(arguments: list[str] | None = None) -> int:
    """Run an item as asked; return 1 if a part of it failed."""
    parser = argparse.ArgumentParser(
        description="One item of the programme for a GPU, at most eight minutes.",
        epilog="; ".join(f"{name}: {item.about}" for name, item in ITEMS.items()),
    )
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("--out", type=Path, help="folder for the pages (default: results, on an H200 results/h200)")
    parser.add_argument("--commit", help="the commit, where the tree came without its history")
    parser.add_argument("--before", type=Path, help="P5: another tree of this project")
    parser.add_argument("--cudnn", action="append", default=[], metavar="VERSION=FOLDER", help="P2: another cuDNN")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to test the item; stores nothing")
    options = parser.parse_args(arguments)
    lease = Lease(
        out=options.out or (None if options.tiny else _results()),
        commit=options.commit,
        is_tiny=options.tiny,
        before=options.before and options.before.resolve(),
        cudnn={version: Path(folder) for version, _, folder in (one.partition("=") for one in options.cudnn)},
        measure=measured,
        call=call,
        ends=time.monotonic() + LIMIT_S,
    )
    if options.out is not None:
        # The benchmarks keep the other cases of the pages that they find.
        options.out.mkdir(parents=True, exist_ok=True)
        for stored in _results().glob("*_gpu.json"):
            if not (options.out / stored.name).exists():
                shutil.copy(stored, options.out)
    record = run_item(options.item, lease)
    return 0 if all(one["holds"] for one in record["parts"]) else 1


def _results() -> Path:
    import torch

    return RESULTS / "h200" if torch.cuda.is_available() and "H200" in torch.cuda.get_device_name() else RESULTS


if __name__ == "__main__":
    sys.exit(main())
