"""Runs with plugins: what they are told, that a model and a loss of one's own are exact, and errors in callbacks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from examples.plugin import Focal, SquaredLlama, SquaredLlamaConfig
from ray_ulysses import Plugin, SequenceMesh, apply_ulysses, loss_scale, shard_batch
from ray_ulysses.config import Config
from ray_ulysses.engine.loss import training_loss
from ray_ulysses.errors import ConfigError
from ray_ulysses.export.export_run import export_run
from ray_ulysses.export.report import ExportRequest
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from tests.apart import losses_apart
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.distributed.run_case import make_config, prepare_attempt, run_worker, train
from tests.unit.tracking.journals import read_events

_MODEL = {
    "model_type": "squared_llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


_LENGTHS, _ROWS = (9, 1, 14), 4


class Fails(Plugin):
    """Writes each step to PLUGIN_FILE; every rank fails after the step FAIL_AT."""

    ranks = "all"

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if os.environ.get("FAIL_AT") == str(step):
            raise KeyError("planted")
        with open(os.environ["PLUGIN_FILE"], "a") as file:
            file.write(f"{step}\n")


def step_through_the_seam(rank: int, world_size: int) -> tuple[float, float, dict[str, float]]:
    """Return the loss of some rows trained by groups of two ranks, that of one process, and each gradient's error."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, oracle = (SquaredLlama(SquaredLlamaConfig(vocab_size=13, **sizes)) for _ in range(2))
    oracle.load_state_dict(model.state_dict())
    rows = torch.randint(0, 13, (_ROWS, sum(_LENGTHS)))
    count = _ROWS * sum(length - 1 for length in _LENGTHS)
    mesh = SequenceMesh.from_group(dist.new_subgroups(2)[0])
    apply_ulysses(model, mesh)
    loss = torch.zeros(())
    for row in rows[rank // 2 :: world_size // 2]:
        batch = shard_batch(row[None], None, _LENGTHS, mesh)
        found = training_loss(model, batch, tile=3, token_loss=Focal().token_loss)
        (found.objective_sum * loss_scale(count, mesh, zero_stage=0)).backward()
        loss += found.loss_sum
    dist.all_reduce(loss)
    truth = torch.zeros(())
    for document in (document for row in rows for document in row.split(_LENGTHS)):
        log_probs = oracle(input_ids=document[None]).logits[0, :-1].log_softmax(-1)
        log_probs = log_probs.gather(1, document[1:, None])
        part = -((1 - log_probs.exp()) ** 2 * log_probs).sum() / count
        part.backward()
        truth += part.detach()
    errors = {}
    for (name, ours), wanted in zip(model.named_parameters(), oracle.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        errors[name] = float((ours.grad / world_size - wanted.grad).norm() / wanted.grad.norm())
    return float(loss / count), float(truth), errors


def test_a_loss_of_ones_own_is_that_of_one_process() -> None:
    for loss, truth, errors in run_ranks(step_through_the_seam, 4):
        assert loss == pytest.approx(truth, rel=1e-5)
        assert errors and max(errors.values()) <= 1e-5, errors


def config_for(storage: Path, corpus: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "run__plugins": ["examples.plugin:Focal", "examples.plugin:Squared"], "run__stop_step": 3,
        "run__eval_every_steps": 2, "data__eval_fraction": 0.3, "checkpoint__every_steps": 2,
        "checkpoint__host_buffers": 0, "data__rows_per_step": 2, "model__config": _MODEL,
    }  # fmt: skip
    return make_config(storage, corpus, **{**settings, **changes})


def test_a_run_has_the_model_the_loss_and_the_callbacks_of_its_plugin(corpus: Path, tmp_path: Path) -> None:
    histories = []
    for workers in (1, 2):
        storage = tmp_path / str(workers)
        environment = {"PLUGIN_FILE": str(storage / "events")}
        config = config_for(storage, corpus, cluster__workers=workers, parallel__sp_size=workers)
        assert train(config, environment=environment) == ("finished", 3)
        history = read_history(config.run_dir)
        before, second, last = (
            ["evaluation", one.step, one.loss] for one in read_events(config.run_dir) if isinstance(one, Evaluated)
        )
        assert [json.loads(line) for line in (storage / "events").read_text().splitlines()] == [
            before,
            ["step", 1, history.steps[0].loss],
            second,
            ["step", 2, history.steps[1].loss],
            ["checkpoint", 2, history.checkpoints[0].path],
            last,
            ["step", 3, history.steps[2].loss],
            ["checkpoint", 3, history.checkpoints[1].path],
            ["end", 3, "finished"],
        ]
        histories.append(history)
    assert losses_apart(*histories) <= 1e-5
    export_run(ExportRequest(run_dir=config.run_dir, out=tmp_path / "exported", trust_run=True), lambda _: None)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "exported"), SquaredLlama)
    with pytest.raises(ConfigError, match=r"run\.plugins=.*--branch"):
        prepare_attempt(
            config_for(tmp_path / "1", corpus, cluster__workers=1, parallel__sp_size=1, run__plugins=[]), "two"
        )


def test_an_error_in_a_callback_ends_the_run_which_resumes(corpus: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"run__stop_step": 3, "checkpoint__every_steps": 2, "cluster__workers": 2}
    config = make_config(tmp_path, corpus, run__plugins=[f"{__name__}:Fails"], **changes)
    environment = {"PLUGIN_FILE": str(tmp_path / "steps")}
    prepare_attempt(config, "one")
    outcomes = run_ranks_to_outcomes(run_worker, 2, config, "one", environment={**environment, "FAIL_AT": "2"})
    for outcome in outcomes:
        assert "UserError: run.plugins: on_step of tests.distributed.test_plugins:Fails failed" in str(outcome.error)
        assert f"on rank {outcome.rank} at step 2 (KeyError: 'planted')" in str(outcome.error)
    history = read_history(config.run_dir)
    assert (history.status, [one.step for one in history.checkpoints]) == ("failed", [2])
    assert train(config, "two", environment=environment) == ("finished", 3)
    assert (tmp_path / "steps").read_text().split() == ["1", "1", "3", "3"], "both ranks were called"
    branch = prepare_run(make_config(tmp_path, corpus, **changes), Path("/"), branch=True)
    assert any("run.plugins changes from" in note for note in branch.notes)
