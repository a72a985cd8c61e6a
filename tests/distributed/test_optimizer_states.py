"""The states of Muon and of bf16 moments: in peer memory, in another run, at the border of stages; frozen weights."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ray_ulysses.checkpoint import TensorPart, load_parts, read_manifest
from ray_ulysses.checkpoint.state import dtype_of
from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.config import Config
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.optimizer import MOMENTS
from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.breadth import fast_only
from tests.distributed.conftest import Addresses
from tests.distributed.run_case import assert_same_run, make_config, prepare_attempt, train, train_to_death
from tests.distributed.supervised import SupervisedRun, training_child
from tests.polling import wait_until

STEPS = 8
KINDS = ("muon", "adamw_bf16_moments")
TIMEOUT_S = 120.0


def config_for(storage: Path, corpus: Path, kind: str = "muon", stages: Any = (), **changes: Any) -> Config:
    settings = {
        "run__stop_step": STEPS, "checkpoint__every_steps": 100, "cluster__workers": 2, "optimizer__kind": kind,
        "data__rows_per_step": 4, "schedule__warmup_steps": 2, "optimizer__lr": 3e-3,
    }  # fmt: skip
    return make_config(storage, corpus, stages, **{**settings, **changes})


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def trained(kind: str) -> RunHistory:
        config = config_for(tmp_path_factory.mktemp("unbroken"), corpus, kind)
        train(config)
        return read_history(config.run_dir)

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_from_peer_memory_with_its_moments(
    corpus: Path, unbroken: Any, tmp_path: Path, peer_memory: Addresses, kind: str
) -> None:
    train_to_death(config_for(tmp_path, corpus, kind), "first", (1, "in memory", 4), peer_memory=peer_memory)
    other = config_for(tmp_path, corpus, kind, cluster__workers=4, memory__zero_stage=2)
    assert not (other.run_dir / "checkpoints").exists()
    assert train(other, "second", peer_memory=peer_memory) == ("finished", STEPS)
    history = read_history(other.run_dir)
    assert_same_run(history, unbroken(kind))
    assert history.attempts[-1].first_step > 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_form_again_have_their_moments(corpus: Path, unbroken: Any, tmp_path: Path, kind: str) -> None:
    config = config_for(tmp_path / "runs", corpus, kind)
    with SupervisedRun(config, {0: "a", 1: "b"}, tmp_path, waits_for_copies=True, pace_s=0.5) as run:

        def steps() -> int:
            return read_history(config.run_dir).step

        wait_until(lambda: steps() >= 3, "three steps", timeout_s=TIMEOUT_S, every_s=0.1, said=run.logs)
        child = training_child(run.processes[1].pid)
        assert child is not None
        os.kill(child, signal.SIGKILL)
        run.wait_until_ended(timeout_s=TIMEOUT_S)
    history = read_history(config.run_dir)
    assert_same_run(history, unbroken(kind))
    assert len(history.attempts) == 2 and history.attempts[1].first_step > 2 and history.lost_steps <= 1


def stored(config: Config, step: int, key: str) -> torch.Tensor:
    store = LocalStore(config.run_dir)
    manifest = read_manifest(store, step)
    spec = manifest.state.tensors[key]
    values = torch.empty(spec.num_elements, dtype=dtype_of(spec.dtype))
    load_parts(store, manifest, [TensorPart(key=key, start=0, tensor=values)])
    return values.float()


WEIGHT = {
    "muon": "momentum_buffer/model.layers.0.self_attn.q_proj.weight",
    "adamw_bf16_moments": "exp_avg/model.layers.0.self_attn.q_proj.weight",
}


def check_taken(kind: str, before: torch.Tensor, taken: torch.Tensor, new: torch.Tensor) -> None:
    """Compare moments after a step with those of a step from zero: the gradient is that of the same weights."""
    decay, bound = (0.95, 1e-5) if kind == "muon" else (0.9, 2.0**-7)
    wanted = before * decay + new
    assert (taken - wanted).norm() <= bound * wanted.norm() and (taken - new).norm() > 0.1 * wanted.norm()


@pytest.mark.parametrize("kind", fast_only(KINDS, "adamw_bf16_moments"))
def test_another_run_takes_over_the_moments_of_its_kind_only(corpus: Path, tmp_path: Path, kind: str) -> None:
    source = config_for(tmp_path / "first", corpus, kind, run__stop_step=3)
    train(source)
    start = {"model__resume_from": str(source.run_dir), "run__stop_step": 1, "data__context_tokens": 128}
    warm = config_for(tmp_path / "optimizer", corpus, kind, **start, model__resume_state="optimizer")
    cold = config_for(tmp_path / "weights", corpus, kind, **start, model__resume_state="weights")
    for config in (warm, cold):
        assert train(config) == ("finished", 1)
    states = [read_manifest(LocalStore(config.run_dir), 1).state for config in (warm, cold)]
    assert [state.optimizer_step for state in states] == [4, 1]
    check_taken(kind, stored(source, 3, WEIGHT[kind]), *(stored(config, 1, WEIGHT[kind]) for config in (warm, cold)))
    other = config_for(tmp_path / "other", corpus, "adamw", **start, model__resume_state="optimizer")
    with pytest.raises(UserError, match=rf"optimizer\.kind={kind} and this run has adamw"):
        prepare_attempt(other, "one")
    other = config_for(tmp_path / "other", corpus, "adamw", **start, model__resume_state="weights")
    assert train(other) == ("finished", 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_resets_the_moments_or_keeps_them(corpus: Path, tmp_path: Path, kind: str) -> None:
    moments = {"muon": {*MOMENTS["muon"], *MOMENTS["adamw"]}}.get(kind, {*MOMENTS["adamw"]})
    configs = []
    for how, steps in (("keep", 4), ("reset", 1)):
        stages = [{"name": "first", "steps": 3}, {"name": "second", "steps": 1, "optimizer": how}]
        config = config_for(tmp_path / how, corpus, kind, stages, run__stop_step=None, schedule__horizon_steps=None)
        assert train(config) == ("stage", 3)
        assert train(config, "second") == ("finished", 4)
        state = read_manifest(LocalStore(config.run_dir), 4).state
        assert state.optimizer_step == steps
        assert {key.partition("/")[0] for key in state.tensors} - {"fp32", "model", "frozen", "buffer"} == moments
        configs.append(config)
    check_taken(kind, stored(configs[0], 3, WEIGHT[kind]), *(stored(config, 4, WEIGHT[kind]) for config in configs))


def test_a_run_with_frozen_weights_is_exported_as_a_whole(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path, corpus, model__freeze=["*.embed_tokens.*", "*.mlp.*"], run__stop_step=2)
    train(config)
    capsys.readouterr()
    assert run_cli(app, ["export", str(config.run_dir), "--out", str(tmp_path / "out")]) == 0
    assert "differ from the live model's" in capsys.readouterr().out
    exported, initial = load_file(tmp_path / "out/model.safetensors"), build_model(config, None).state_dict()
    is_kept = {name: torch.equal(tensor, initial[name]) for name, tensor in exported.items()}
    assert is_kept == {name: "embed_tokens" in name or ".mlp." in name for name in exported}
    assert len(exported) == len({one.data_ptr() for one in initial.values()})
