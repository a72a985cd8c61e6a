"""Runs the cases of a GPU benchmark one by one, each in a fresh process, and stores its page after each."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.runner import RESULTS, gpu_provenance, say, store
from ray_ulysses.config import Config
from ray_ulysses.config.devices import DeviceSection
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.gpu_environment import expand_segments
from ray_ulysses.planner.throughput import Work, configured_time

EMULATED = (
    "The other ranks are emulated on the same GPU: what they would send is copied on the device, so the seconds hold "
    "**no wire**. Modelled wire is what `plan` adds for NVLink of an H100, and its share of the step; links were not "
    "measured."
)
_WIRE = ("exchange of heads", "ring", "weights and gradients")
_TINY_MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}


class Measure(Protocol):
    """Measures one case."""

    def __call__(self, case: dict[str, Any], script: str, limit_s: float) -> dict[str, Any]:
        """Return the case with what was found; the script is beside this file, or in another tree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark of cases.

    Attributes:
        name: Of the page and its figures; the script is ``bench_<name without _gpu>.py``.
        about: What the command says of itself.
        cases: Every case, in the order of the page.
        markdown: Makes the page of a record.
        script: Measures one case in a process of its own.
        limit_s: Seconds that one case may take.
        at_once: Processes at once: one has the GPU while the others import.
    """

    name: str
    about: str
    cases: Sequence[dict[str, Any]]
    markdown: Callable[[dict[str, Any]], str]
    script: str
    limit_s: float
    at_once: int = 1


def case_name(case: dict[str, Any]) -> str:
    """Return what identifies a case."""
    return f"{case['title']}: {case['side']}"


def measured(case: dict[str, Any], script: str, limit_s: float) -> dict[str, Any]:
    """Return what a fresh process measured."""
    command = [sys.executable, str(Path(__file__).parent / script), json.dumps(case)]
    done, environment = None, dict(os.environ)
    # As `train` does.
    expand_segments(environment)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        said = "" if done is None else done.stderr[-1500:]
        found = {**case, "failure": f"{type(error).__name__}: no result", "said": said}
    return found


def run(benchmark: Benchmark, arguments: Sequence[str] | None, measure: Measure = measured) -> dict[str, Any]:
    """Run a benchmark's cases as a command asks, store its page after each case, show it, and return its record."""
    options = parse(benchmark, arguments)
    record: dict[str, Any] = {
        **gpu_provenance(("torch", "transformers", "deepspeed"), options.commit),
        "command": f"python benchmarks/gpu/bench_{benchmark.name.removesuffix('_gpu')}.py",
        "draws_alone": True,
    }
    stored = None if options.out is None else options.out / f"{benchmark.name}.json"
    kept = json.loads(stored.read_text())["found"] if stored and options.add and stored.exists() else []
    results = {case_name(one): one for one in kept}
    cases = [tiny(case) for case in benchmark.cases] if options.tiny else benchmark.cases
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(benchmark.at_once) as pool:
        chosen = [{**case, "turn": f"{folder}/turn"} for case in cases if re.search(options.only, case_name(case))]
        if options.profile is not None:
            chosen = [{**case, "profile": str(options.profile)} for case in chosen]
        for found in pool.map(lambda case: measure(case, benchmark.script, benchmark.limit_s), chosen):
            name, new = case_name(found), {**found, "commit": record["commit"]}
            say(f"{name}: {found.get('failure') or typical(found)}")
            results[name] = joined(results.get(name), new) if options.more else new
            record["found"] = [results[case_name(case)] for case in cases if case_name(case) in results]
            if options.out is not None:
                store(benchmark.name, benchmark.markdown(record), record, options.out)
    say(benchmark.markdown(record))
    return record


def parse(benchmark: Benchmark, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command."""
    parser = argparse.ArgumentParser(description=benchmark.about)
    parser.add_argument("--out", type=Path, help=f"folder for {benchmark.name}.md and .json; default: {RESULTS}")
    parser.add_argument("--commit", help="the commit, where the tree came without its history")
    parser.add_argument("--add", action="store_true", help="keep what is stored of other cases, for a short lease")
    parser.add_argument("--more", action="store_true", help="with --add: keep the steps of the same cases as well")
    parser.add_argument("--only", default="", help="run the cases in whose title and side this expression is found")
    parser.add_argument("--profile", type=Path, help="a file for the kernels of one more step of each case")
    parser.add_argument("--tiny", action="store_true", help="tiny cases on a CPU, to test the script; stores nothing")
    options = parser.parse_args(arguments)
    options.out = options.out or (None if options.tiny else RESULTS)
    return options


def joined(before: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return a case with the steps that were stored of the same commit, where two runs of it are needed (pure)."""
    if before is None or before["commit"] != new["commit"] or "failure" in before or "failure" in new:
        return new
    return {**new, "seconds": [*before["seconds"], *new["seconds"]]}


def tiny(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case of the same kind that a CPU takes in a moment."""
    context = case["context"] >> 10
    halves = (context // 2, context - context // 2)
    layers = max(1, case["model"]["num_hidden_layers"] // 12)
    small = {
        "device": "cpu",
        "sp": min(case["sp"], 2),
        "context": context,
        "documents": (context,) if len(case["documents"]) == 1 else halves,
        "model": {**case["model"], **_TINY_MODEL, "num_hidden_layers": layers},
    }
    if "warm_up" in case:
        small["warm_up"] = (context,) if len(case["warm_up"]) == 1 else halves
    return {**case, **small}


def typical(one: dict[str, Any]) -> float:
    """Return the median of the timed steps; without any, the first step."""
    return statistics.median(one["seconds"] or one["first_seconds"])


def in_words(one: dict[str, Any], digits: int) -> str:
    """Return the seconds of a case's steps."""
    if not one["seconds"]:
        return f"{typical(one):.{digits}f}, a single first step"
    number = len(one["seconds"])
    if number == 1:
        return f"{typical(one):.{digits}f}, a single step"
    least, most = min(one["seconds"]), max(one["seconds"])
    return f"{typical(one):.{digits}f} ({least:.{digits}f} to {most:.{digits}f}, {number} steps)"


def wire_s(config: Config, case: dict[str, Any]) -> float:
    """Return the seconds per step that ``plan`` adds for the links of a node of H100s (pure).

    Args:
        config: The configuration of the run that the measured rank belongs to.
        case: The case.
    """
    cluster = config.cluster.model_copy(update={"device": DeviceSection.model_validate("H100"), "gpus_per_worker": 1})
    squares = sum(length**2 for length in case["documents"])
    work = Work(tokens=case["context"], squares=squares, rows=1, imbalance=1.0)
    shape = ModelShape.from_config_dict(case["model"])
    time = configured_time(config.model_copy(update={"cluster": cluster}), shape, work)
    assert time is not None
    return sum(term.seconds for term in time.terms if term.name in _WIRE)


def wire_in_words(config: Config, case: dict[str, Any]) -> str:
    """Return the modelled wire and its share of a step that takes as long as measured, and the wire."""
    seconds = wire_s(config, case)
    return f"{seconds:.2f} s ({seconds / (seconds + typical(case)):.2%})"
