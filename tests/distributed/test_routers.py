"""Routers of a run are counted and balanced as in a plain loop of PyTorch, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.engine.model import build_model
from ray_ulysses.evaluation.model_source import find_model
from ray_ulysses.evaluation.report import ModelRequest
from ray_ulysses.tracking.events import RoutersMeasured, StepDone
from ray_ulysses.tracking.history import read_history
from tests.apart import relative
from tests.distributed.conftest import Addresses
from tests.distributed.run_case import make_config, prepare_attempt, train, train_to_death
from tests.distributed.test_plain_loop import plain_optimizer
from tests.unit.tracking.journals import read_events

STEPS, FAST_STEPS, RATE, LEARNING_RATE = 40, 6, 0.004, 3e-4
BOUND = 1e-5
"""Law 2's floor for fp32 that runs freely."""
MODEL: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in (1, 2)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"cluster__workers": 1, "memory__zero_stage": 1, "memory__gradient_checkpointing": False},
    "slices, tiles": {"cluster__workers": 2, "parallel__sp_size": 2, "memory__zero_stage": 3, "memory__mlp_tile": 20},
    "ring": {
        "cluster__workers": 2, "parallel__sp_size": 2, "parallel__ring_size": 2, "memory__zero_stage": 2,
    },
    "rows and slices": {"cluster__workers": 4, "parallel__sp_size": 2, "memory__zero_stage": 3},
    "rows": {"cluster__workers": 4, "memory__zero_stage": 1, "memory__mlp_tile": 30},
    "fillers": {"cluster__workers": 3, "memory__zero_stage": 3, "memory__mlp_tile": 30},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a plain loop finds: for each step a loss, and for each router tokens by expert and a mean entropy."""

    losses: list[float]
    tokens: list[list[torch.Tensor]]
    entropies: list[list[float]]
    biases: list[list[torch.Tensor]]


def settings(storage: Path, corpus: Path, **layout: Any) -> Config:
    options: dict[str, Any] = {
        "model__config": MODEL, "data__context_tokens": 64, "data__rows_per_step": 4, "run__stop_step": STEPS,
        "checkpoint__every_steps": None, "parallel__sp_size": 1, "optimizer__lr": LEARNING_RATE,
        "optimizer__router_bias_rate": RATE, "schedule__kind": "constant", "schedule__warmup_steps": 0,
    }  # fmt: skip
    return make_config(storage, corpus, **{**options, **layout})


@pytest.fixture(scope="module")
def wanted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    config = settings(tmp_path_factory.mktemp("plain"), corpus, cluster__workers=1)
    prepare_attempt(config, "one")
    documents, plan = Corpus.open(corpus), load_plan(config.run_dir / "plan")
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("deepseek_v3", **fields), attn_implementation="eager"
    )
    model.load_state_dict(build_model(config, None).state_dict())
    optimizer = plain_optimizer(model, lr=LEARNING_RATE)
    found = Wanted(losses=[], tokens=[], entropies=[], biases=[])
    scored: dict[str, list[tuple[Any, ...]]] = {}
    for name in ROUTERS:
        model.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: scored[name].append(out))
    for step in range(1, STEPS + 1):
        scored.update({name: [] for name in ROUTERS})
        optimizer.zero_grad()
        loss, count = torch.zeros(()), 0
        for piece in (piece for row in plan.step_rows(step) for piece in plan.pieces(row)):
            size = piece.length + piece.has_next_label
            ids = torch.from_numpy(np.asarray(documents.read(piece.document, piece.start, size)).astype(np.int64))
            logits = model(input_ids=ids[None, : piece.length], use_cache=False).logits[0, : piece.num_labels]
            loss = loss + functional.cross_entropy(logits, ids[1:], reduction="sum")
            count += piece.num_labels
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.losses.append(float(loss.detach()) / count)
        found.tokens.append([])
        found.entropies.append([])
        for name in ROUTERS:
            tokens = torch.bincount(torch.cat([one[2] for one in scored[name]]).flatten(), minlength=8)
            found.tokens[-1].append(tokens)
            scores = torch.cat([one[0] for one in scored[name]]).detach().double().sigmoid()
            probabilities = scores / scores.sum(dim=-1, keepdim=True)
            found.entropies[-1].append(float(-(probabilities * probabilities.log()).sum(dim=-1).mean()))
            direction = torch.sign(tokens.double().mean() - tokens.double())
            model.get_submodule(name).e_score_correction_bias += RATE * direction
        found.biases.append([model.get_submodule(name).e_score_correction_bias.clone() for name in ROUTERS])
    return found


def biases_of(model: Any) -> list[torch.Tensor]:
    return [model.get_submodule(name).e_score_correction_bias for name in ROUTERS]


def assert_balanced(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], num_steps: int) -> None:
    for ours, bias in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, bias, rtol=0, atol=1e-6)
        # The expert that was balanced most has moved in the same direction in several steps.
        assert bias.abs().max() > (5 if num_steps == STEPS else 3) * RATE


@pytest.mark.parametrize(
    ("layout", "num_steps"),
    [("slices, tiles", FAST_STEPS), *(pytest.param(name, STEPS, marks=pytest.mark.slow) for name in LAYOUTS)],
)
def test_a_run_counts_and_balances_as_a_plain_loop(
    corpus: Path, wanted: Wanted, tmp_path: Path, layout: str, num_steps: int
) -> None:
    config = settings(tmp_path, corpus, **LAYOUTS[layout], run__stop_step=num_steps)
    train(config)
    events = read_events(config.run_dir)
    steps = [one for one in events if isinstance(one, StepDone)]
    measured = [one for one in events if isinstance(one, RoutersMeasured)]
    assert relative([one.loss for one in steps], wanted.losses[:num_steps]) <= BOUND
    assert [one.step for one in measured] == [one.step for one in steps] == list(range(1, num_steps + 1))
    for step, one, tokens, entropies in zip(steps, measured, wanted.tokens, wanted.entropies, strict=False):
        assert one.layers == (1, 2)
        assert one.imbalance == tuple(round(float(of.max() / of.double().mean()), 4) for of in tokens)
        assert one.dead == tuple(int((of == 0).sum()) for of in tokens)
        assert one.entropy == pytest.approx(entropies, abs=1e-4)
        assert step.router_imbalance == pytest.approx(max(one.imbalance), abs=1e-4)
        assert step.dead_experts == sum(one.dead)
        assert step.router_entropy == pytest.approx(sum(entropies) / 2, rel=1e-5)
    assert_balanced(
        biases_of(find_model(ModelRequest(model=config.run_dir, is_run=True, dtype="fp32")).build()),
        wanted.biases[num_steps - 1],
        num_steps,
    )


@pytest.mark.slow
def test_biases_survive_a_kill_a_resume_at_another_world_and_an_export(
    corpus: Path, wanted: Wanted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = {"parallel__allowed_sp": [1, 2], "checkpoint__every_steps": 5}
    first = {"cluster__workers": 2, "parallel__sp_size": 2, "memory__zero_stage": 3}
    train_to_death(settings(tmp_path, corpus, **worlds, **first), "first", (1, "step", 13))
    config = settings(tmp_path, corpus, **worlds, cluster__workers=4, memory__zero_stage=1)
    assert train(config, "second") == ("finished", STEPS)
    assert [attempt.first_step for attempt in read_history(config.run_dir).attempts][1] > 5
    assert run_cli(app, ["export", str(config.run_dir)]) == 0, capsys.readouterr().err
    exported = config.run_dir / f"export/step-{STEPS:08d}"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert_balanced(biases_of(model), wanted.biases[-1], STEPS)


@pytest.mark.slow
def test_biases_survive_a_kill_in_peer_memory(
    corpus: Path, wanted: Wanted, tmp_path: Path, peer_memory: Addresses
) -> None:
    config = settings(tmp_path, corpus, cluster__workers=2, parallel__sp_size=2)
    train_to_death(config, "first", (1, "in memory", 13), peer_memory=peer_memory)
    assert not (config.run_dir / "checkpoints").exists()
    assert train(config, "second", peer_memory=peer_memory) == ("finished", STEPS)
    assert [attempt.first_step for attempt in read_history(config.run_dir).attempts][1] > 13
    trained = find_model(ModelRequest(model=config.run_dir, is_run=True, dtype="fp32")).build()
    assert_balanced(biases_of(trained), wanted.biases[-1], STEPS)
