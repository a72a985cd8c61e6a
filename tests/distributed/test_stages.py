"""A run of three stages: other contexts, layouts, positions, corpora and schedules, through kills."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ray_ulysses.config import Config, load_config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.engine.model import build_model
from ray_ulysses.run.trackers import tracked
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.history import read_history
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.trainer import loop
from tests.distributed.harness import run_ranks_to_outcomes
from tests.distributed.run_case import (
    MORE_FILES,
    SMALL_FILES,
    assert_same_run,
    make_config,
    make_corpus,
    prepare_attempt,
    run_worker,
    targets_of,
    train,
)
from tests.distributed.supervised import SupervisedRun
from tests.distributed.test_plain_loop import plain_optimizer, plain_step
from tests.unit.tracking.journals import read_events

pytestmark = pytest.mark.slow
TIMEOUT_S = 200.0
BORDERS = (4, 7)
LAST_STEP = 10
THETAS = (10_000.0, 40_000.0, 160_000.0)
Kill = tuple[int, str, int]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    return make_corpus(folder / "first", SMALL_FILES), make_corpus(folder / "more", MORE_FILES)


def config_of(
    storage: Path,
    corpora: tuple[Path, Path],
    contexts: tuple[int, int, int] = (128, 256, 512),
    rows: int = 8,
    **overrides: Any,
) -> Config:
    first = corpora[0]
    stages: list[dict[str, Any]] = [
        {"name": "short", "steps": 4, "context_tokens": contexts[0], "rows_per_step": rows, "sp_size": 1},
        {"name": "middle", "steps": 3, "context_tokens": contexts[1], "rope": {"rope_theta": THETAS[1]}, "lr": 2e-3},
        {"name": "long", "steps": 3, "rope": {"rope_theta": THETAS[2]}, "rows_per_step": 3, "optimizer": "reset"},
    ]
    stages[0]["path"] = str(first)
    stages[1]["schedule"] = {"kind": "wsd", "warmup_steps": 1, "decay_steps": 1, "min_lr_ratio": 0.0}
    stages[2]["schedule"] = {"kind": "linear", "warmup_steps": 0, "min_lr_ratio": 0.5}
    settings = {
        "run__stop_step": None, "data__path": None, "data__sources": [{"path": str(path)} for path in corpora],
        "data__context_tokens": contexts[2], "schedule__warmup_steps": 2, "schedule__horizon_steps": None,
        "checkpoint__every_steps": None, "checkpoint__save_at_end": False, "cluster__workers": 2, "optimizer__lr": 3e-3,
        "memory__gradient_checkpointing": False,
    }  # fmt: skip
    return make_config(storage, first, stages, **{**settings, **overrides})


def reference_rate(step: int) -> float:
    """The learning rate as the stages say it, spelled out."""
    if step <= 4:
        # The run's cosine, over all ten steps.
        progress = max(0.0, (step - 2) / 8)
        return 3e-3 * (step / 2 if step <= 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
    if step <= 7:
        return {5: 2e-3, 6: 2e-3, 7: 0.0}[step]
    return 3e-3 * {8: 5 / 6, 9: 4 / 6, 10: 3 / 6}[step]


@pytest.fixture(scope="module")
def unbroken(corpora: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, mlflow_tables: Path) -> Config:
    """A run in one command: its workers form again at each border."""
    folder = tmp_path_factory.mktemp("unbroken")
    shutil.copy(mlflow_tables, folder / "mlflow.db")
    tracking = {"tracking__enabled": True, "tracking__uri": f"sqlite:///{folder / 'mlflow.db'}"}
    config = config_of(folder / "runs", corpora, **tracking)
    with SupervisedRun(config, {0: "a", 1: "a"}, folder) as run:
        run.wait_until_ended(timeout_s=TIMEOUT_S)
    with tracked(config, drain_s=120.0):
        pass
    return config


def test_one_command_trains_all_stages_each_in_an_attempt_of_its_own(unbroken: Config) -> None:
    history = read_history(unbroken.run_dir)
    assert history.status == "finished" and history.step == LAST_STEP
    attempts = [(one.first_step, one.last_step, one.sp_size, one.dp_size, one.reason) for one in history.attempts]
    assert attempts == [(1, 4, 1, 2, "stage"), (5, 7, 2, 1, "stage"), (8, 10, 2, 1, "finished")]
    assert {one.world_size for one in history.attempts} == {2}
    assert [one.stage for one in history.attempts] == ["short", "middle", "long"]


def test_every_token_of_the_stages_is_trained_once(unbroken: Config, corpora: tuple[Path, Path]) -> None:
    plan = load_plan(unbroken.run_dir / "plan")
    history = read_history(unbroken.run_dir)
    assert [step.rows for step in history.steps] == [
        (rows.start, rows.stop) for rows in (plan.step_rows(step) for step in range(1, LAST_STEP + 1))
    ]
    trained = targets_of(plan, range(1, LAST_STEP + 1))
    assert set(trained.values()) == {1} and sum(trained.values()) == sum(step.tokens for step in history.steps)
    first = Corpus.open(corpora[0]).num_documents
    is_first = [{piece.document < first for piece in plan.pieces(row)} for row in range(plan.num_rows)]
    assert set().union(*is_first[:32]) == {True} and False in set().union(*is_first[32:])


def watched_worker(rank: int, world_size: int, config: Config, session: str, folder: Path) -> tuple[str, int]:
    """Be a worker that writes the frequencies of its model's positions down after each step."""
    models: list[torch.nn.Module] = []
    build = loop.build_model

    def kept(*arguments: Any) -> Any:
        models.append(build(*arguments))
        return models[-1]

    def watch(name: str, step: int) -> None:
        if name == "step":
            (rotary,) = [module for module in models[-1].modules() if hasattr(module, "inv_freq")]
            (folder / f"{rank}-{step}.json").write_text(json.dumps(rotary.inv_freq.tolist()))

    loop.build_model = kept
    return run_worker(rank, world_size, config, session, watch=watch)


def test_each_step_has_the_context_the_frequencies_the_rate_and_the_loss_of_its_stage(
    corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    contexts, rows = (1024, 2048, 4096), 4
    config = config_of(tmp_path / "runs", corpora, contexts, rows)
    ends = [train(config, "first", worker=watched_worker, folder=tmp_path) for _ in (*BORDERS, LAST_STEP)]
    assert ends == [("stage", 4), ("stage", 7), ("finished", LAST_STEP)]
    plan = load_plan(config.run_dir / "plan")
    model = config.model.config or {}
    head_dim = model["hidden_size"] // model["num_attention_heads"]
    for step in range(1, LAST_STEP + 1):
        stage = sum(step > border for border in BORDERS)
        # By their definition, in fp64; the model has them in fp32.
        expected = [THETAS[stage] ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        for rank in range(2):
            found = json.loads((tmp_path / f"{rank}-{step}.json").read_text())
            assert found == pytest.approx(expected, rel=1e-6), (rank, step)
        longest = max(plan.row_tokens(row) for row in plan.step_rows(step))
        assert contexts[stage] // 2 < longest <= contexts[stage], step
    opened = [Corpus.open(path) for path in corpora]

    def read(document: int, start: int, count: int) -> Any:
        first = opened[0].num_documents
        return opened[document >= first].read(document - first * (document >= first), start, count)

    ours = {step.step: step.loss for step in read_history(config.run_dir).steps}
    for step, loss in reference_losses(config, plan, read):
        assert abs(ours[step] - loss) / loss <= 1e-5, step
    rates = {event.step: event.learning_rate for event in read_events(config.run_dir) if isinstance(event, StepDone)}
    assert rates == pytest.approx({step: reference_rate(step) for step in range(1, LAST_STEP + 1)}, rel=1e-12)


def reference_losses(config: Config, plan: Plan, read: Any) -> Iterator[tuple[int, float]]:
    """Train in one process, with a model of Transformers' own and AdamW of torch's."""
    torch.manual_seed(0)
    weights = {name: value.detach().clone() for name, value in build_model(config, None).state_dict().items()}
    state: dict[str, Any] | None = None
    for stage, steps in enumerate((range(1, 5), range(5, 8), range(8, 11))):
        positions = {"rope_parameters": {"rope_type": "default", "rope_theta": THETAS[stage]}}
        fields = LlamaConfig(**{**(config.model.config or {}), **positions})
        model: Any = AutoModelForCausalLM.from_config(fields, attn_implementation="eager")
        model.load_state_dict(weights)
        optimizer = plain_optimizer(model)
        if state is not None and stage < 2:
            optimizer.load_state_dict(state)
        for step in steps:
            yield step, plain_step(model, optimizer, plan, step, read, rate=reference_rate(step))[0]
        weights, state = model.state_dict(), optimizer.state_dict()


def test_mlflow_has_one_run_with_its_newest_stage(unbroken: Config) -> None:
    client = open_client(str(unbroken.tracking_uri))
    (experiment,) = [one for one in client.search_experiments() if one.name == unbroken.tracking.experiment]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["stage"] == "long" and run.info.status == "FINISHED"
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert steps == list(range(1, LAST_STEP + 1))


KILLS: dict[str, tuple[Kill, int]] = {
    # Rank, event and step; and the step from which the run goes on.
    "in the save at a border": ((0, "save", 4), 0),
    "after it": ((0, "saved", 4), 4),
    "in the second": ((1, "step", 6), 5),
    "in the last": ((1, "step", 9), 7),
}


@pytest.mark.parametrize(("kill", "resumed"), KILLS.values(), ids=KILLS)
def test_a_run_that_is_killed_in_or_between_stages_is_the_one_that_was_not(
    unbroken: Config, corpora: tuple[Path, Path], tmp_path: Path, kill: Kill, resumed: int
) -> None:
    config = config_of(tmp_path, corpora, checkpoint__every_steps=5)
    prepare_attempt(config, "first")
    killed = False
    while not killed:
        outcomes = run_ranks_to_outcomes(run_worker, 2, config, "first", kill=kill, timeout_s=TIMEOUT_S)
        killed = not all(outcome.ok for outcome in outcomes)
    # On four workers now.
    config = config_of(tmp_path, corpora, checkpoint__every_steps=5, cluster__workers=4)
    ends: list[tuple[str, int]] = []
    while not ends or ends[-1][0] == "stage":
        ends.append(train(config, "second"))
    assert ends[-1] == ("finished", LAST_STEP)
    ours = read_history(config.run_dir)
    first = next(one for one in ours.attempts if one.world_size == 4)
    assert (first.first_step or 0) - 1 == resumed
    assert_same_run(ours, read_history(unbroken.run_dir))


def test_a_damaged_border_costs_no_failure(unbroken: Config, corpora: tuple[Path, Path], tmp_path: Path) -> None:
    config = config_of(tmp_path, corpora, checkpoint__every_steps=2, checkpoint__keep_last=3)
    assert train(config, "first") == ("stage", 4)
    (shard,) = (config.run_dir / "checkpoints" / "step-00000004").rglob("rank-00001-of-00002.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 0x10
    shard.write_bytes(content)
    ends = [train(config, "first") for _ in range(4)]
    assert ends == [("stage", 2), ("stage", 4), ("stage", 7), ("finished", LAST_STEP)]
    history = read_history(config.run_dir)
    assert_same_run(history, read_history(unbroken.run_dir))
    assert [one.reason for one in history.attempts] == ["stage"] * 3 + ["finished"]


def test_the_recipe_runs_at_a_thousandth_of_its_size(corpora: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = load_config(Path(__file__).parents[2] / "configs" / "llama3-8b_8xh100_sp8-stages_1m.yaml")
    given = []
    for stage in recipe.stages:
        fields = stage.model_dump(mode="json", exclude_unset=True)
        for name in ("context_tokens", "rows_per_step", "sp_size"):
            if name in fields:
                fields[name] = max(1, fields[name] // {"context_tokens": 1024, "rows_per_step": 4, "sp_size": 4}[name])
        fields["tokens"] //= 500_000
        fields["schedule"] |= {name: 1 for name in ("warmup_steps", "decay_steps") if name in fields["schedule"]}
        given.append(fields)
    memory = {f"memory__{name}": getattr(recipe.memory, name) for name in ("attention_output", "zero_stage")}
    config = make_config(
        tmp_path / "runs", corpora[0], given, run__stop_step=None, parallel__sp_size=2, cluster__workers=2,
        data__context_tokens=1024, data__rows_per_step=1,
        memory__offload_activations=list(recipe.memory.offload_activations),
        schedule__warmup_steps=1, schedule__horizon_steps=None, optimizer__lr=recipe.optimizer.lr, **memory,
    )  # fmt: skip
    with SupervisedRun(config, {0: "a", 1: "a"}, tmp_path) as run:
        run.wait_until_ended(timeout_s=TIMEOUT_S)
    history = read_history(config.run_dir)
    assert history.status == "finished"
    assert [(one.sp_size, one.reason) for one in history.attempts] == [(1, "stage"), (1, "stage"), (2, "finished")]
    plan = load_plan(config.run_dir / "plan")
    lengths = [max(plan.row_tokens(row) for row in plan.step_rows(one.last_step or 1)) for one in history.attempts]
    assert lengths == [64, 256, 1024]
