"""Runs whose rows come through Ray Data are the runs whose workers read them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config
from tests.cluster.commands import TIMEOUT_S, Command
from tests.distributed.run_case import MORE_FILES, make_config, make_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3000)]
ENGINES = ("local", "ray")
ENDS = (75, 175, 250)
"""Last steps of the first stage, of the second before its branch, and of the run."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    parts = (("first", ("ast.py", "argparse.py", "calendar.py")), ("more", MORE_FILES), ("last", ("csv.py", "dis.py")))
    first, more, last = (make_corpus(folder / name, files) for name, files in parts)
    return first, more, last


def config_of(folder: Path, corpora: tuple[Path, ...], workers: int, engine: str, *, branches: bool) -> Config:
    """A mixture in two stages, of which the second has longer rows; its branch, other weights and a third corpus."""
    before, after = (
        [{"path": str(path), "weight": weight} for path, weight in zip(corpora, weights, strict=False)]
        for weights in ((0.7, 0.3), (0.3, 0.5, 0.2))
    )
    short = {"name": "short", "steps": ENDS[0], "context_tokens": 128, "rows_per_step": 8, "sp_size": 1}
    return make_config(
        folder / engine, corpora[0], [{**short, "sources": before}, {"name": "long"}],
        run__stop_step=ENDS[1 + branches],
        data__path=None, data__engine=engine, data__context_tokens=256, data__rows_per_step=6, data__epochs=6,
        data__sources=after if branches else before, parallel__sp_size=min(2, workers),
        cluster__workers=workers, cluster__cpus_per_worker=0.25, cluster__data_cpus=0.25,
        checkpoint__every_steps=50, schedule__horizon_steps=ENDS[-1],
    )  # fmt: skip


def trained(config: Config, folder: Path, *, branch: bool) -> None:
    folder.mkdir(parents=True)
    path = folder / "config.yaml"
    path.write_text(config.to_yaml())
    command = Command("train", path, *["--branch"] * branch, log=folder / "log.txt")
    try:
        assert command.process.wait(3 * TIMEOUT_S) == 0, command.text
    finally:
        command.kill()
    assert "Traceback" not in command.text, command.text


def inspected(config: Config, folder: Path) -> dict[str, Any]:
    command = Command("inspect", config.run_dir, "--json", "--quiet", log=folder / "inspect.json")
    assert command.wait() == 0, command.text
    found: dict[str, Any] = json.loads(command.text)
    return found


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_stages_of_a_mixture_and_a_branch_are_the_same_run(
    corpora: tuple[Path, Path, Path], tmp_path: Path, ray_folder: Path, workers: int
) -> None:
    found = {}
    for engine in ENGINES:
        for branch in (False, True):
            config = config_of(tmp_path, corpora, workers, engine, branches=branch)
            trained(config, tmp_path / f"{engine}-{branch}", branch=branch)
        found[engine] = inspected(config, tmp_path)
    local, streamed = (found[engine] for engine in ENGINES)
    attempts = [(one["stage"], one["first_step"], one["last_step"]) for one in streamed["attempts"]]
    assert attempts == [
        ("short", 1, ENDS[0]), ("long", ENDS[0] + 1, ENDS[1]), ("long", ENDS[1] + 1, ENDS[2])
    ]  # fmt: skip
    print(f"{workers} workers:", [(one["stream_step"], one["direct_rows"]) for one in streamed["attempts"]])
    assert all(one["stream_step"] is not None for one in streamed["attempts"]), "each attempt has streamed rows"
    assert sum(one["direct_rows"] for one in streamed["attempts"]) < streamed["rows_consumed"] / 2, "most of them"
    same = ("loss", "rows", "tokens", "step", "grad_norm", "learning_rate")
    for ours, theirs in zip(streamed["steps"], local["steps"], strict=True):
        assert [ours[name] for name in same] == [theirs[name] for name in same]
    for name in ("rows_consumed", "data_digest", "tokens", "plan", "lost_steps"):
        assert streamed[name] == local[name], name
    assert len(local["plan"]) == 3 and local["step"] == ENDS[-1]
