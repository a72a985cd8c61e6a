"""Storage faults during a preparation: temporary faults are waited for, permanent faults end as an error."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from ray_ulysses.cluster import prepare_job
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec, Unit
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage.retry import StorageAwayError
from tests.breadth import fast_only
from tests.local_preparation import prepare_local, preparing
from tests.result_table import ResultTable
from tests.unit.data.corpora import begin, write_texts
from tests.unit.storage.test_retry import SleepingClock, policy_of

ROOT = Path(__file__).parents[4]
SOURCE_KINDS = ("texts", "json_lines", "parquet", "chats", "data_set")
TITLE = "Preparations whose storage fails at each system call in turn: once (EIO), and from then on (ENOSPC)"


def request_of(tmp_path: Path) -> PrepareRequest:
    sources = write_texts(tmp_path / "texts", [f"text {number}" for number in range(6)])
    return PrepareRequest(sources=SourceSpec(paths=(str(sources),)), out=tmp_path / "corpus", unit_bytes=20)


def failing_opens(number: int) -> Callable[..., IO[Any]]:
    """Return a `Path.open` that fails to read one file."""
    opened = Path.open

    def broken(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
        if path.name == "text-0003.txt" and "r" in mode:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, mode, **options)

    return broken


def test_a_storage_that_stays_away_ends_the_preparation_and_nothing_is_missing_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", failing_opens(errno.ESTALE))
        with pytest.raises(StorageAwayError, match=r"^unit 1 of .*corpus: the storage did not respond for 60 s"):
            prepare_local(request, retry=policy_of(SleepingClock()))
    assert not (request.out / "corpus.json").exists()
    assert [unit.index for unit in begin(request).pending] == [1]
    corpus = prepare_local(request)
    assert (corpus.num_documents, corpus.info.num_quarantined) == (6, 0)


def test_a_file_that_may_not_be_read_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", failing_opens(errno.EACCES))
    with pytest.raises(UserError, match=r"text-0003\.txt: can't be read \(Permission denied\)"):
        prepare_local(request_of(tmp_path))


def test_the_job_stops_at_the_first_unit_whose_storage_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, every other unit would wait just as long."""
    request, begun = request_of(tmp_path), []

    def away(*arguments: object) -> None:
        begun.append(arguments)
        raise StorageAwayError("the storage did not respond")

    def run_units(units: Iterable[Unit], request: PrepareRequest, *_: object) -> Iterator[object]:
        run = partial(prepare_job._run_unit, out=request.out, tokenizer="bytes", options=request.encoding)
        return map(run, units)

    monkeypatch.setattr(prepare_job, "write_unit", away)
    monkeypatch.setattr(prepare_job, "_run_units", run_units)
    with pytest.raises(RunError, match=r"^the storage did not respond$"), preparing(request) as preparation:
        prepare_job.run_preparation(preparation)
    assert len(begun) == 1


def faults_found(tmp_path: Path, kind: str, stride: int) -> tuple[list[Any], dict[str, Any]]:
    """Run `storage_fault_case.py` with a preloaded library that makes calls fail; return its findings and summary."""
    library = tmp_path / "storage_faults.so"
    source = Path(__file__).with_name("storage_faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    (tmp_path / "cases").mkdir()
    module = "tests.unit.data.prepare.storage_fault_case"
    done = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path / "cases"), kind, str(stride)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=1800,
    )
    *findings, summary = map(json.loads, done.stdout.splitlines())
    return findings, summary


# The other kinds import large libraries, which takes longer than their cases.
@pytest.mark.parametrize("kind", fast_only(SOURCE_KINDS, "texts", "parquet"))
def test_storage_that_fails_at_any_system_call_gives_the_whole_corpus_or_an_error(tmp_path: Path, kind: str) -> None:
    findings, summary = faults_found(tmp_path, kind, 300 if kind in ("texts", "parquet") else 60)
    assert findings == []
    # Each kind of call failed at least once.
    assert set(summary["met"]) >= {"open", "read", "write", "close", "fsync", "stat", "rename"}


@pytest.fixture(scope="module")
def table() -> Iterator[ResultTable]:
    """Collects the results, and stores the table once every kind has run."""
    made = ResultTable()
    yield made
    if len(made.rows) == len(SOURCE_KINDS):
        made.write("storage_faults", TITLE)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("kind", SOURCE_KINDS)
def test_storage_that_fails_at_each_system_call_in_turn_gives_the_whole_corpus_or_an_error(
    tmp_path: Path, table: ResultTable, kind: str
) -> None:
    findings, summary = faults_found(tmp_path, kind, 1)
    met = sorted(((count, call) for call, count in summary["met"].items() if call), reverse=True)
    table.add(
        {
            "sources": kind.replace("_", " "),
            "system calls": f"{summary['calls']:,}",
            "preparations": f"{summary['cases']:,}",
            "findings": str(len(findings)),
            "failed calls": ", ".join(f"{call} {count}" for count, call in met),
        }
    )
    assert findings == []
    assert summary["calls"] > 100 and sum(summary["met"].values()) == summary["cases"] == 2 * summary["calls"]
