"""What a rehearsal changes of a configuration, and what it refuses before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.cluster.capacity import Demand
from ray_ulysses.commands import rehearse
from ray_ulysses.commands.rehearse import local_targets, rehearsal_config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.elastic.placement import WorkerRange
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts

pytestmark = pytest.mark.usefixtures("probed_once")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal")
    text_corpus(folder, [text * 200 for text in varied_texts(20, longest=400)])
    tree = small_tree(
        data__path=str(folder / "corpus"), run__storage=str(folder / "runs"), parallel__sp_size=2,
        cluster__workers={"min": 2, "max": 4},
    )  # fmt: skip
    (folder / "config.yaml").write_text(parse_config(tree).to_yaml())
    return folder / "config.yaml"


def test_only_what_would_end_a_rehearsal_or_touch_the_run_is_changed() -> None:
    early = {"run__early_stopping": {"patience": 1}, "run__eval_every_steps": 5, "data__eval_fraction": 0.1}
    config = parse_config(small_tree(run__stop_step=40, run__storage="/runs", elastic__hang_timeout_s=9.0, **early))
    local = rehearsal_config(config, address=None, stamp="now")
    abroad = rehearsal_config(config, address="head:6379", stamp="now")
    assert local.run_dir == abroad.run_dir == Path("/runs/first-rehearsal-now/first-rehearsal-now")
    assert (abroad.run.stop_step, abroad.elastic.hang_timeout_s) == (None, 9.0)
    assert abroad.run.early_stopping is None
    assert abroad.elastic.max_failures >= 1000 and abroad.elastic.grow_interval_s <= 5.0
    assert abroad.cluster == config.cluster
    # The head of a cluster of our own has room for the data stream, and for no worker.
    cluster = local.cluster
    assert (cluster.cpus_per_worker, cluster.data_cpus, cluster.workers) == (2.0, 0.25, config.cluster.workers)
    kept = {"model", "data", "parallel", "optimizer", "schedule", "memory", "checkpoint", "tracking"}
    assert all(getattr(abroad, name) == getattr(local, name) == getattr(config, name) for name in kept)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--faults=40s explode", "there is no fault 'explode'"),
        ("--faults=1s kill-node, 9s kill-node", "9s kill-node: only 0 workers would still fit"),
        ("--faults=1s add-node", "1s add-node: no node is missing"),
        ("--every=60s", "--every=60s"),
        ("--every=1m --for=soon", "--for=soon"),
        ("--every=60s --for=10s", "--for=10s"),
        ("--every=60s --for=10m --kinds=kill-all", "--kinds=kill-all"),
        ("--nodes=1", "30s kill-node: only 0 workers would still fit"),
        ("--set=cluster.gpus_per_worker=1", "cluster.gpus_per_worker=1"),
        ("--set=cluster.workers=3", "cluster.workers"),
    ],
)  # fmt: skip
def test_what_can_not_be_rehearsed_is_refused_before_anything_starts(
    path: Path, options: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray_ulysses.cluster.local_cluster.LocalCluster", None)
    assert run(app, ["rehearse", str(path), *re.split(" (?=--)", options)]) == 2
    assert said in capsys.readouterr().err
    assert not (path.parent / "runs").exists()


@pytest.mark.parametrize(
    ("most", "sp_size", "nodes", "num_gpus", "per_node"),
    [
        (2, 1, 2, 1, 1),  # Two nodes share a GPU.
        (4, 2, 4, 1, 1),  # Groups span nodes: none could hold one.
        (4, 2, 2, 8, 2),
    ],
)
def test_nodes_of_a_rehearsal_share_the_gpus_of_the_machine(
    most: int, sp_size: int, nodes: int, num_gpus: int, per_node: int
) -> None:
    wanted = WorkerRange(least=sp_size, most=most, sp_size=sp_size)
    targets = local_targets(Demand(wanted=wanted, cpus=1.0, gpus=1, data_cpus=0.25), nodes, num_gpus)
    assert targets.rooms == (per_node,) * nodes and targets.least == sp_size


def test_a_report_that_can_not_be_stored_is_shown(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rehearse, "run_rehearsal", lambda *_, **__: SimpleNamespace(holds=True))
    monkeypatch.setattr(rehearse, "render_report", lambda report: "what hours of training gave")
    (tmp_path / "file").touch()
    assert run(app, ["rehearse", str(path), "--out", str(tmp_path / "file" / "report.md")]) != 0
    shown = capsys.readouterr()
    assert "what hours of training gave" in shown.out and "file: File exists" in shown.err
