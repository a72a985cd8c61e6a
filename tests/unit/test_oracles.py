"""What a change of structure must not change: plan ids, digests, manifests, predictions, `inspect --json` and losses.

Each oracle is a function that computes JSON; `tests/results/oracles.json` holds what it gave. A change that means to
alter one of them writes the file again, and says why in its commit::

    .venv/bin/python -m tests.unit.test_oracles [NAME ...]
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ray_ulysses.cli import app
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.tokenize.spans import LabelSpans
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, prepare_attempt, run_worker
from tests.result_table import RESULTS
from tests.unit.checkpoint.manifests import MANIFEST
from tests.unit.data.corpora import text_corpus
from tests.unit.data.plans import segment_in_memory
from tests.unit.inspect.runs import SETTINGS, Record, Run, make_run
from tests.unit.inspect.saved import make_folder, save

_STORED = RESULTS / "oracles.json"
_ROOT = Path(__file__).parents[2]
_CONFIGS = tuple(sorted((_ROOT / "configs").glob("*.yaml")))
_FAST_CONFIGS = [path for path in _CONFIGS if "tiny" in path.stem or "stages_1m" in path.stem]
_TOLERANCE = 1e-6
"""Of losses and gradient norms on another processor or with another torch, whose sums have another order."""
_OF_THE_MOMENT = {
    "seconds", "seconds_to_first_step", "time_spent", "goodput", "node", "nodes", "written_at", "versions", "crc32"
}  # fmt: skip
"""Fields of a run that was really trained which tell when and where that was."""
_PROSE = {"source", "is_measured", "has_gpu", "host_gib", "dtype", "source_format", "mixture", "note", "reason", "path"}
"""Fields of a plan's report that are sentences, paths of this machine, or repeat the configuration."""


def texts(count: int, seed: int = 0) -> list[str]:
    found = []
    for number in range(count):
        key = hashlib.sha256(f"{seed}/{number}".encode())
        found.append(f"{number}:" + key.hexdigest() * (1 + key.digest()[0] % 8))
    return found


def lengths(count: int, longest: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    digests = (hashlib.sha256(f"{seed}/{number}".encode()).digest() for number in range(count))
    return np.asarray([1 + int.from_bytes(digest[:8], "big") % longest for digest in digests], dtype=np.int64)


def plans(folder: Path) -> Any:
    small = PlanSettings(seed=3, context_tokens=64, pad_multiple=8, rows_per_step=4, token_cost=10)
    sources = tuple(
        PlannedSource(path=f"corpus-{number}", fingerprint=f"f{number}", num_documents=300, weight=weight)
        for number, weight in enumerate((3.0, 1.0))
    )
    two = PlanInput(sources=sources, lengths=lengths(600, 200))
    one = replace(two, sources=(replace(sources[0], num_documents=600, weight=None),))
    starts = np.minimum(one.lengths // 3, one.lengths - 1)
    spans = LabelSpans(offsets=np.arange(601), starts=starts, stops=one.lengths)
    cases = {
        **{packing: (one, replace(small, packing=packing)) for packing in ("best_fit", "wide_fit", "concat", "none")},
        "epochs": (one, replace(small, epochs=3, balance_steps=4)),
        "truncated": (one, replace(small, overlong="truncate")),
        "held out": (one, replace(small, eval_fraction=0.1)),
        "costliest": (one, replace(small, row_order="costliest")),
        "weights": (two, replace(small, epochs=2)),
        "spans": (replace(one, spans=spans), small),
    }
    return {name: facts_of(segment_in_memory(*case)) for name, case in cases.items()}


def facts_of(segment: Segment) -> dict[str, Any]:
    def pieces(rows: Any) -> str:
        every = [[repr(piece) for piece in rows.pieces(row)] for row in range(rows.num_rows)]
        return hashlib.sha256(json.dumps(every).encode()).hexdigest()[:16]

    return {
        "plan_id": segment.plan_id,
        "rows": segment.train.num_rows,
        "pieces": pieces(segment.train),
        "held_out": pieces(segment.evaluation),
    }


def manifest(folder: Path) -> Any:
    return without(json.loads(MANIFEST.to_bytes()), {"crc32"})


def saved(folder: Path) -> Any:
    save(make_folder(folder / "saved"), 7, world_size=3, sp_size=3)
    step = folder / "saved/checkpoints/step-00000007"
    shards = {
        str(path.relative_to(step)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(step.rglob("*.safetensors"))
    }
    return {"manifest": without(json.loads((step / "manifest.json").read_bytes()), {"crc32"}), "shards": shards}


def history(folder: Path) -> Any:
    """A run with a lost node, a branch, and a second command that resumed it, at fixed times."""
    run = planned_run(folder)
    clock = iter(range(1_790_000_000, 1_800_000_000, 3))

    def at(record: Record, **changes: Any) -> Record:
        return {"time": float(next(clock)), **record, **changes}

    first = {"session": "one", "command_started": 1_789_999_990.0, "workers_asked": 1_789_999_995.0}
    run.attempt(
        [
            at({"event": "phase", "phase": "opening the data"}, **first),
            at(run.started(), session="one"),
            *(at(record) for record in run.steps(1, 3)),
            at({"event": "evaluation", "step": 3, "loss": 2.5, "tokens": 9, "seconds": 0.5}),
            at(run.committed(3)),
            *(at(record, saving_seconds=0.25) for record in run.steps(4, 5)),
            at({"event": "attempt_ended", "reason": "lost: a node", "rank": 1, "node": "b"}),
        ]
    )
    run.checkpoint(3)
    resumed = {"path": "checkpoints/step-00000003", "step": 3}
    run.attempt(
        [
            at({"event": "phase", "phase": "opening the data", "session": "one"}),
            at(run.started(3, resumed_from=resumed["path"]), session="one", world_size=4, dp_size=2),
            *(at(record) for record in run.steps(4, 6)),
            at(run.committed(6)),
            at({"event": "attempt_ended", "reason": "stopped"}),
            at({"event": "command_ended", "session": "one"}),
        ]
    )
    before = run.branch(6, replace(SETTINGS, rows_per_step=2), [run.folder.parent / "texts/corpus"])
    run.checkpoint(6, before)
    second = {"session": "two", "command_started": 1_790_000_500.0}
    run.attempt(
        [
            at({"event": "phase", "phase": "opening the data"}, time=1_790_000_510.0, **second),
            at(run.started(6), time=1_790_000_515.0, session="two"),
            *(at(record, time=1_790_000_520.0 + record["step"]) for record in run.steps(7, 9)),
            at({"event": "attempt_ended", "reason": "finished"}, time=1_790_000_530.0),
            at({"event": "run_finished", "step": 9}, time=1_790_000_530.0),
            at({"event": "command_ended", "session": "two"}, time=1_790_000_531.0),
        ]
    )
    return {
        "inspect": inspected(run.folder),
        "verify": without(inspected(run.folder, "--verify"), {"path"}),
        "row": without(inspected(run.folder, "--row", "5"), {"path"}),
    }


def planned_run(folder: Path) -> Run:
    return make_run(folder / "history", [text_corpus(folder / "texts", texts(60)).path])


def digests(folder: Path) -> Any:
    run = planned_run(folder)
    return {"plan_id": run.plan.newest.plan_id, "steps": [f"{run.digest(step):016x}" for step in range(1, 9)]}


def trained(folder: Path) -> Any:
    """Train eight steps on two ranks, in two commands."""
    corpus = text_corpus(folder / "trained-on", texts(40, seed=1)).path
    changes: dict[str, Any] = {
        "run__eval_every_steps": 4,
        "data__eval_fraction": 0.1,
        "data__rows_per_step": 2,
        "checkpoint__every_steps": 4,
        "cluster__workers": 2,
    }
    for stop_step in (5, 8):
        config = make_config(folder / "runs", corpus, run__stop_step=stop_step, **changes)
        prepare_attempt(config, f"to {stop_step}")
        run_ranks(run_worker, 2, config, f"to {stop_step}")
    found = json.loads((config.run_dir / "checkpoints/step-00000008/manifest.json").read_bytes())
    kept = ("cursor", "digest", "tokens", "tensors", "tied", "optimizer", "counters")
    return {
        "inspect": without(inspected(config.run_dir), {*_OF_THE_MOMENT, "path"}),
        "manifest": {key: found[key] for key in kept},
        "metrics": {name: found["metrics"][name] for name in ("loss", "eval_loss", "grad_norm")},
    }


def prediction(path: Path, folder: Path) -> Any:
    """Return the main numbers that `plan` predicts for a configuration, and a digest of each section."""
    outcome = CliRunner().invoke(
        app, ["plan", str(path), "--set", f"run.storage={folder}", "--json", "--quiet", "--synthetic"]
    )
    report = json.loads(outcome.stdout)
    sections = without(report, _PROSE)
    for texts_of in ("problems", "notes"):
        sections[texts_of] = len(report[texts_of])
    memory, step_time = report["memory"], report["step_time"]
    return {
        "exit_code": outcome.exit_code,
        "device_bytes": memory["device_bytes"],
        "host_bytes": memory["host_bytes"],
        "step_seconds": None if step_time is None else step_time["seconds"],
        "plan_id": report["data"]["plan_id"],
        "sections": {
            name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
            for name, value in sections.items()
        },
    }


def inspected(run: Path, *options: str) -> Any:
    outcome = CliRunner().invoke(app, ["inspect", str(run), "--json", "--quiet", *options])
    return json.loads(outcome.stdout.replace(str(run.parent), "FOLDER"))


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: without(child, names) for key, child in value.items() if key not in names}
    return [without(child, names) for child in value] if isinstance(value, list) else value


def machine() -> str:
    """Return the versions and hardware that the order of floating-point sums depends on."""
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    processor = next(names, platform.machine())
    return f"torch {torch.__version__}, {processor}, {torch.backends.cpu.get_cpu_capability()}"


def apart(found: Any, stored: Any, place: str = "") -> list[str]:
    """Return the differences between two trees; floats may differ by `_TOLERANCE`."""
    if isinstance(found, dict) and isinstance(stored, dict) and found.keys() == stored.keys():
        return [line for key in found for line in apart(found[key], stored[key], f"{place}.{key}")]
    if isinstance(found, list) and isinstance(stored, list) and len(found) == len(stored):
        return [
            line for at, pair in enumerate(zip(found, stored, strict=True)) for line in apart(*pair, f"{place}[{at}]")
        ]
    if isinstance(found, float) and isinstance(stored, float):
        same = math.isclose(found, stored, rel_tol=_TOLERANCE)
    else:
        same = found == stored
    return [] if same else [f"{place}: {found}, stored {stored}"]


ORACLES: dict[str, Callable[[Path], Any]] = {
    "plans": plans,
    "digests": digests,
    "manifest": manifest,
    "saved": saved,
    "history": history,
}


def stored_oracle(name: str) -> Any:
    return json.loads(_STORED.read_text())[name]


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", ORACLES)
def test_what_is_computed_is_what_was_stored(name: str, tmp_path: Path) -> None:
    assert as_json(ORACLES[name](tmp_path)) == stored_oracle(name)


@pytest.mark.parametrize("path", fast_only(_CONFIGS, *_FAST_CONFIGS), ids=[path.stem for path in _CONFIGS])
def test_the_prediction_for_a_shipped_configuration_is_what_was_stored(path: Path, tmp_path: Path) -> None:
    assert as_json(prediction(path, tmp_path)) == stored_oracle("predictions")[path.stem]


@pytest.mark.distributed
def test_losses_are_what_was_stored_to_the_last_digit(tmp_path: Path) -> None:
    # Bit for bit on the processor and with the torch that it was stored with. Elsewhere the kernels of matrix products
    # sum in another order.
    stored, found = stored_oracle("trained"), as_json(trained(tmp_path))
    if machine() in stored:
        assert found == stored[machine()]
    else:
        assert apart(found, next(iter(stored.values()))) == []


def write(names: list[str]) -> None:
    """Store the current results; keep the losses of other machines."""
    content = json.loads(_STORED.read_text()) if _STORED.exists() else {}
    folder = Path(tempfile.mkdtemp(prefix="oracles-"))
    for name, compute in ORACLES.items():
        if not names or name in names:
            content[name] = compute(folder / name)
    if not names or "predictions" in names:
        content["predictions"] = {path.stem: prediction(path, folder / "storage") for path in _CONFIGS}
    if not names or "trained" in names:
        content["trained"] = {**content.get("trained", {}), machine(): trained(folder / "trained")}
    shutil.rmtree(folder)
    _STORED.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    write(sys.argv[1:])
