"""The configuration of `check`'s trial, and where it starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.cluster import check_command
from ray_ulysses.cluster.check_command import CheckOptions, starting_from, trial_config
from ray_ulysses.config import Config, parse_config
from ray_ulysses.errors import UserError
from ray_ulysses.run.origin import Origin
from ray_ulysses.run.ownership import claim_checkpoints
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.storage.place import node_folder, open_store, store_at
from tests.distributed.run_case import make_config
from tests.s3_server import S3Server
from tests.unit.config.trees import small_tree

OPTIONS = CheckOptions(steps=20, stage=None, max_memory=75.0, keep=False)


def config_of(*stages: dict[str, Any], **changes: Any) -> Config:
    return parse_config({**small_tree(**changes), "stages": list(stages)})


def test_the_trial_is_the_run_but_for_what_it_decides_itself() -> None:
    config = config_of(elastic__bad_steps="skip", schedule__warmup_steps=100, optimizer__lr=7e-4)
    trial = trial_config(config, OPTIONS, "now")
    assert trial.run.name == f"{config.run.name}-check-now" and not trial.tracking.enabled
    assert (trial.data.row_order, trial.elastic.bad_steps, trial.elastic.max_failures) == ("costliest", "stop", 0)
    assert (trial.optimizer.lr, trial.schedule.warmup_steps) == (7e-4, 4)
    assert trial.model == config.model and trial.memory == config.memory


def test_a_trial_has_the_memory_that_the_planner_chooses_for_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without peer memory, or for one stage alone, it would choose others."""
    trials: list[Config] = []

    class Stop(Exception):
        """Raised in the place of the training."""

    def prepare(config: Config, base: Path) -> Any:
        if config.run.name.startswith("first-check"):
            trials.append(config)
            raise Stop
        chosen = config.memory.model_copy(update={"attention_chunks": 2, "offload_optimizer": "cpu"})
        return SimpleNamespace(
            config=config.model_copy(update={"memory": chosen}), report=SimpleNamespace(raise_problems=lambda: None)
        )

    monkeypatch.setattr(check_command, "prepare_run", prepare)
    config = config_of(memory__plan="auto", memory__device_gib=8.0)
    with pytest.raises(Stop):
        check_command.run_check(config, OPTIONS, None, print)  # type: ignore[arg-type]
    (trial,) = trials
    assert (trial.memory.attention_chunks, trial.memory.offload_optimizer) == (2, "cpu")
    assert {"attention_chunks", "offload_optimizer"} <= trial.memory.model_fields_set, "chosen no more"


def test_a_stage_is_checked_by_its_name_or_the_last() -> None:
    stages = ({"name": "short", "steps": 3, "context_tokens": 256}, {"name": "long"})
    config = config_of(*stages)
    assert trial_config(config, OPTIONS, "now").data.context_tokens == config.data.context_tokens
    short = CheckOptions(steps=20, stage="short", max_memory=75.0, keep=False)
    assert trial_config(config, short, "now").data.context_tokens == 256
    wrong = CheckOptions(steps=20, stage="shrt", max_memory=75.0, keep=False)
    with pytest.raises(UserError, match=r"--stage=shrt: there is no such stage; the stages are short, long"):
        trial_config(config, wrong, "now")


def test_tiles_longer_than_the_rows_of_a_short_stage_are_one_tile_there_as_in_the_run() -> None:
    stages = ({"name": "short", "steps": 3, "context_tokens": 256, "sp_size": 1}, {"name": "long"})
    tiles = {"memory__loss_tile": 400, "memory__mlp_tile": 512, "parallel__sp_size": 2}
    config = config_of(*stages, **tiles)
    long, short = (trial_config(config, replace(OPTIONS, stage=name), "now").memory for name in ("long", "short"))
    assert (long.loss_tile, long.mlp_tile) == (400, 512) and (short.loss_tile, short.mlp_tile) == (256, 256)
    automatic = trial_config(config_of(*stages, memory__mlp_tile="off"), replace(OPTIONS, stage="short"), "now").memory
    assert (automatic.loss_tile, automatic.mlp_tile) == ("auto", "off")


def test_a_checkpoint_that_mlflow_knows_is_named_by_its_place_since_the_trial_is_not_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def find(config: Config) -> Origin:
        asked.append(config.model.resume_from)
        return Origin(reference=str(config.model.resume_from), location=str(tmp_path), step=7)

    monkeypatch.setattr(check_command, "find_origin", find)
    config = config_of(model__resume_from="mlflow:base/best", model__resume_state="weights", tracking__enabled=True)
    trial = trial_config(starting_from(config), OPTIONS, "now")
    assert trial.model.resume_from == f"{tmp_path}@7" and asked == ["mlflow:base/best"]
    other = config_of(model__resume_from="runs/base@7", model__resume_state="weights")
    assert starting_from(other) is other and len(asked) == 1


@pytest.mark.parametrize(
    ("runs_in", "checkpoints_in"), [("disk", "run"), ("disk", "disk"), ("disk", "bucket"), ("bucket", "disk")]
)
def test_a_trial_leaves_nothing_and_deletes_nothing_else(
    tmp_path: Path, s3: S3Server, prefix: str, runs_in: str, checkpoints_in: str
) -> None:
    def storage(kind: str, name: str) -> str:
        return str(tmp_path / name) if kind == "disk" else s3.uri(f"{prefix}/{name}")

    runs = storage(runs_in, "runs")
    there = None if checkpoints_in == "run" else storage(checkpoints_in, "checkpoints")
    trial, other = (
        resolve_run(make_config(runs, tmp_path, run__name=name, checkpoint__storage=there)) for name in ("trial", "run")
    )
    for run in (trial, other):
        store_at(run.config.run_dir).create("journal.jsonl", [b"{}"])
        claim_checkpoints(run)
        for key in ("checkpoints/step-00000012/manifest.json", "attempts/1"):
            run.store.create(key, [b"{}"])
    node_folder(trial.config.run_dir).mkdir(parents=True, exist_ok=True)
    roots = [open_store(where) for where in {runs, there or runs}]
    before = [key for root in roots for one in ("run", "trial") for key in root.list(one)]
    prepared: Any = SimpleNamespace(config=trial.config, run=trial)
    check_command._delete(prepared)
    left = [key for root in roots for one in ("run", "trial") for key in root.list(one)]
    assert left == [key for key in before if key.startswith("run/")] and len(left) == len(before) // 2 >= 3
    assert not node_folder(trial.config.run_dir).exists()
