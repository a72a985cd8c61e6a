"""Where the units of a preparation run, on nodes that the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cluster import prepare_job
from ray_ulysses.data.prepare.preparation import PrepareProgress, PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from tests.local_preparation import prepare_local, preparing
from tests.unit.data.corpora import varied_texts, write_texts


def node(name: str, cpus: float, *, alive: bool = True) -> dict[str, Any]:
    # Ray leaves out a resource of which a node has none.
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": cpus} if cpus else {"memory": 1.0}}


class Tasks:
    """Ray Data, as far as the units need it: notes how they are to run, and runs none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any]) -> None:
        self.options: list[dict[str, Any]] = []
        monkeypatch.setattr(prepare_job.ray, "nodes", lambda: list(nodes))
        monkeypatch.setattr(prepare_job.ray.data, "from_items", lambda *_, **__: self)
        monkeypatch.setattr(prepare_job, "quiet", lambda dataset: dataset)

    def map(self, run: Any, **options: Any) -> Tasks:
        self.options.append(options)
        return self

    def iter_rows(self) -> list[dict[str, Any]]:
        return []


def request_of(folder: Path) -> PrepareRequest:
    write_texts(folder / "texts", varied_texts(20))
    return PrepareRequest(sources=SourceSpec(paths=(str(folder / "texts"),)), out=folder / "out", unit_bytes=1500)


def test_a_head_without_cpus_prepares_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait without end for a task that only that node may run."""
    tasks = Tasks(monkeypatch, node("head", 0.0), node("worker", 8.0))
    request, phases, seen = request_of(tmp_path), list[str](), list[PrepareProgress]()
    with preparing(request) as preparation:
        assert len(preparation.units) > 1
        corpus = prepare_job.run_preparation(preparation, node="head", phase=phases.append, progress=seen.append)
    alone = prepare_local(PrepareRequest(sources=request.sources, out=tmp_path / "alone", unit_bytes=1500))
    assert not tasks.options and corpus.fingerprint == alone.fingerprint
    assert [one.units_done for one in seen] == [*range(1, len(preparation.units) + 1)]
    assert "in one process" in phases[0] and "--staging" in phases[0]


@pytest.mark.parametrize(
    ("nodes", "at", "phase"),
    [
        pytest.param([node("head", 1.0)], "head", "reading and tokenizing", id="a node with a CPU"),
        pytest.param([node("head", 0.0), node("a", 8.0)], None, "reading and tokenizing", id="another node"),
        pytest.param(
            [node("head", 0.0), node("a", 8.0, alive=False)], None,
            "reading and tokenizing, once a node offers Ray 1 CPU", id="no node yet, which may join",
        ),
    ],
)  # fmt: skip
def test_tasks_run_where_there_are_cpus_and_a_wait_for_them_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], at: str | None, phase: str
) -> None:
    tasks, phases = Tasks(monkeypatch, *nodes), list[str]()
    with preparing(request_of(tmp_path)) as preparation:
        given = preparation.units
        answers = prepare_job._run_units(given, preparation.request, at, phases.append)
        assert not list(answers)
    label = None if at is None else {"ray.io/node-id": at}
    assert tasks.options == [{"num_cpus": 1.0, "label_selector": label}] and phases == [phase]
