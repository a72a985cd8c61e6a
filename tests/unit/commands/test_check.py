"""The configuration of `check`'s trial, and where it starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from ray_ulysses import Plugin
from ray_ulysses.commands import check
from ray_ulysses.commands.check import CheckOptions, starting_from, trial_config
from ray_ulysses.config import Config, parse_config
from ray_ulysses.config.stages import stage_config
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.run.origin import Origin
from ray_ulysses.run.ownership import claim_checkpoints
from ray_ulysses.run.preflight import planned_memory
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.storage.place import node_folder, open_store
from tests.distributed.run_case import make_config
from tests.s3_server import S3Server
from tests.unit.config.trees import small_tree

OPTIONS = CheckOptions(steps=20, stage=None, max_memory=75.0, keep=False)


def config_of(*stages: dict[str, Any], **changes: Any) -> Config:
    return parse_config({**small_tree(**changes), "stages": list(stages)})


def test_the_trial_is_the_run_but_for_what_it_decides_itself() -> None:
    early = {"run__early_stopping": {"patience": 1}, "run__eval_every_steps": 5, "data__eval_fraction": 0.1}
    config = config_of(elastic__bad_steps="skip", schedule__warmup_ratio=0.5, optimizer__lr=7e-4, **early)
    trial = trial_config(config, OPTIONS, "now")
    assert trial.run.name == f"{config.run.name}-check-now" and not trial.tracking.enabled
    assert (trial.data.row_order, trial.elastic.bad_steps, trial.elastic.max_failures) == ("costliest", "stop", 0)
    assert (trial.optimizer.lr, trial.schedule.warmup(20)) == (7e-4, 4)
    assert trial.run.early_stopping is None
    assert trial.model == config.model and trial.memory == config.memory


class Stopped(Exception):
    """Raised in the place of the trial's training."""


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Return the trials that `run_check` would have trained."""
    found: list[Config] = []

    def prepare(config: Config, base: Path) -> Any:
        found.append(config)
        raise Stopped

    monkeypatch.setattr("ray_ulysses.run.preflight.prepare_run", prepare)
    return found


def run_check(config: Config, options: CheckOptions = OPTIONS) -> None:
    check.run_check(config, options, None, print)  # type: ignore[arg-type]


def store(config: Config, storage: Path) -> None:
    """Store the configuration of a run that has begun."""
    (storage / "first").mkdir()
    (storage / "first/config.yaml").write_text(config.with_absolute_paths(storage).to_yaml())


def test_a_trial_has_the_memory_planned_for_the_whole_run(tmp_path: Path, trials: list[Config]) -> None:
    """Without peer memory, or for one stage alone, it would choose others."""
    config = config_of(memory__plan="auto", memory__device_gib=8.0, run__storage=str(tmp_path))
    chosen = {"memory": config.memory.model_copy(update={"zero_stage": 3, "offload_optimizer": "cpu"})}
    store(config.model_copy(update=chosen), tmp_path)
    with pytest.raises(Stopped):
        run_check(config)
    (trial,) = trials
    planned, _, _ = planned_memory(config, Path.cwd())
    assert trial.run.name != "first" and trial.memory == planned.memory
    assert {"attention_output", "offload_optimizer"} <= trial.memory.model_fields_set, "chosen no more"


def test_changed_settings_and_one_of_several_stages_are_checked(tmp_path: Path, trials: list[Config]) -> None:
    """A branch may take them, and the trial has a name and a plan of its own."""
    stages = ({"name": "short", "steps": 3, "context_tokens": 256}, {"name": "long", "path": str(tmp_path / "none")})
    store(config_of(*stages, run__storage=str(tmp_path)), tmp_path)
    other = config_of(*stages, run__storage=str(tmp_path), data__context_tokens=2048)
    with pytest.raises(Stopped):
        run_check(other, replace(OPTIONS, stage="short"))
    assert [one.data.context_tokens for one in trials] == [256]


def test_a_run_that_does_not_fit_is_refused_without_a_trial(tmp_path: Path, trials: list[Config]) -> None:
    """The trial is without peer memory, and of one stage."""
    stages = ({"name": "short", "steps": 3, "context_tokens": 256}, {"name": "long"})
    free, shape, _ = planned_memory(config_of(run__storage=str(tmp_path)), tmp_path)
    with_peers = configured_memory(free, shape).host_bytes / GIB
    off = free.model_copy(update={"elastic": free.elastic.model_copy(update={"peer_memory": False})})
    alone = configured_memory(off, shape).host_bytes / GIB
    config = config_of(run__storage=str(tmp_path), memory__host_gib=(with_peers + alone) / 2)
    with pytest.raises(ConfigError, match=r"(?s)run 'first': .*memory\.host_gib=.*elastic\.peer_memory=false"):
        run_check(config)
    lengths = [configured_memory(stage_config(config_of(*stages), number), shape).device_bytes for number in (0, 1)]
    config = config_of(*stages, run__storage=str(tmp_path), memory__device_gib=sum(lengths) / 2 / GIB)
    with pytest.raises(ConfigError, match=r"(?s)memory\.device_gib=.*\(in stage 'long'\)"):
        run_check(config, replace(OPTIONS, stage="short"))
    assert trials == []


class OwnConfig(LlamaConfig):
    model_type = "llama_of_a_plugin"


class OwnLlama(LlamaForCausalLM):
    config_class = OwnConfig


class Own(Plugin):
    model_class = OwnLlama


def test_a_plugin_may_define_the_model_that_is_checked(tmp_path: Path, trials: list[Config]) -> None:
    described = small_tree()["model"]["config"] | {"model_type": "llama_of_a_plugin"}
    # Without an adapter, the memory follows from the description alone.
    adapter = {"rank": 4, "alpha": 8, "targets": "all-linear"}
    changes: dict[str, Any] = {
        "run__storage": str(tmp_path), "model__config": described, "model__adapter": adapter,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*run\.plugins\.0.*does not support this model type"):
        run_check(config_of(run__plugins=["no_such_module:Own"], **changes))
    with pytest.raises(Stopped):
        run_check(config_of(run__plugins=[f"{__name__}:Own"], **changes))
    assert [trial.run.plugins for trial in trials] == [(f"{__name__}:Own",)]


def test_a_job_is_told_all_problems_of_its_configuration_at_once(
    trials: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.chdir(tmp_path)
    config = config_of(run__storage="runs", model__path="./models/base", model__init="pretrained", model__config=None)
    with pytest.raises(ConfigError, match=r"3 problems[\s\S]*run\.storage='runs'[\s\S]*model\.path='.*models/base'"):
        run_check(config)
    assert trials == []


def test_a_stage_is_checked_by_its_name_or_the_last_with_tiles_no_longer_than_its_rows() -> None:
    stages = ({"name": "short", "steps": 3, "context_tokens": 256, "sp_size": 1}, {"name": "long"})
    tiles = {"memory__loss_tile": 400, "memory__mlp_tile": 512, "parallel__sp_size": 2}
    config = config_of(*stages, **tiles)
    long, short = (trial_config(config, replace(OPTIONS, stage=name), "now") for name in (None, "short"))
    assert (long.data.context_tokens, short.data.context_tokens) == (config.data.context_tokens, 256)
    assert (long.memory.loss_tile, long.memory.mlp_tile) == (400, 512)
    assert (short.memory.loss_tile, short.memory.mlp_tile) == (256, 256)
    automatic = trial_config(config_of(*stages, memory__mlp_tile="off"), replace(OPTIONS, stage="short"), "now").memory
    assert (automatic.loss_tile, automatic.mlp_tile) == ("auto", "off")
    with pytest.raises(UserError, match=r"--stage=shrt.*short, long"):
        trial_config(config, replace(OPTIONS, stage="shrt"), "now")


def test_a_checkpoint_of_mlflow_is_named_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(config: Config) -> Origin:
        assert config.model.resume_from == "mlflow:base/best"
        return Origin(reference="mlflow:base/best", location=str(tmp_path), step=7)

    monkeypatch.setattr("ray_ulysses.run.origin.find_origin", find)
    config = config_of(model__resume_from="mlflow:base/best", model__resume_state="weights", tracking__enabled=True)
    assert trial_config(starting_from(config), OPTIONS, "now").model.resume_from == f"{tmp_path}@7"
    other = config_of(model__resume_from="runs/base@7", model__resume_state="weights")
    assert starting_from(other) is other


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
        open_store(run.config.run_dir).create("journal.jsonl", [b"{}"])
        claim_checkpoints(run)
        for key in ("checkpoints/step-00000012/manifest.json", "attempts/1"):
            run.store.create(key, [b"{}"])
    node_folder(trial.config.run_dir).mkdir(parents=True, exist_ok=True)
    roots = [open_store(where) for where in {runs, there or runs}]
    before = [key for root in roots for one in ("run", "trial") for key in root.list(one)]
    prepared: Any = SimpleNamespace(config=trial.config, run=trial)
    check._delete(prepared)
    left = [key for root in roots for one in ("run", "trial") for key in root.list(one)]
    assert left == [key for key in before if key.startswith("run/")] and len(left) == len(before) // 2 >= 3
    assert not node_folder(trial.config.run_dir).exists()
