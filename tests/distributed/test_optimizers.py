"""Muon, bf16 moments, parameter groups and frozen parameters: runs equal plain loops, written without the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.checkpoint.state import ShardedState
from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.engine.bf16_moments import CHUNK
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.tracking.history import read_history
from tests.apart import relative
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import SMALL_FILES, make_config, make_corpus, prepare_attempt, train
from tests.distributed.seam_case import zero_settings
from tests.distributed.test_plain_loop import plain_step

FREE_RUNNING = 1e-5
"""Law 2's floor for fp32 that runs freely."""
STEPS = 40
MODEL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 264, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_local_experts": 3,
    "num_experts_per_tok": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
RATE, DECAY, MAX_NORM, WARMUP = 4e-3, 0.5, 0.8, 4
LAYOUTS: dict[str, Sequence[dict[str, Any]]] = {
    # Each is trained in parts, which end after the given steps, on other workers and with another ZeRO stage.
    "4-zero-3-then-1-zero-1": ({"workers": 4, "stage": 3, "until": 21}, {"workers": 1, "stage": 1, "until": STEPS}),
    "1-zero-2": ({"workers": 1, "stage": 2, "until": STEPS},),
    "2-zero-1-then-4-zero-2": ({"workers": 2, "stage": 1, "until": 21}, {"workers": 4, "stage": 2, "until": STEPS}),
    "2-zero-3": ({"workers": 2, "stage": 3, "until": STEPS},),
    "1-zero-3-then-4-zero-1-then-2-zero-2": (
        {"workers": 1, "stage": 3, "until": 12}, {"workers": 4, "stage": 1, "until": 25},
        {"workers": 2, "stage": 2, "until": STEPS},
    ),
}  # fmt: skip


def settings(storage: Path, corpus: Path, workers: int = 1, stage: int = 1, until: int = STEPS, **other: Any) -> Config:
    options: dict[str, Any] = {
        "model__config": MODEL, "data__context_tokens": 64, "data__rows_per_step": 4, "parallel__sp_size": 1,
        "checkpoint__every_steps": None, "cluster__workers": workers, "memory__zero_stage": stage,
        "run__stop_step": until, "optimizer__lr": RATE, "optimizer__weight_decay": DECAY,
        "optimizer__max_grad_norm": MAX_NORM, "schedule__kind": "constant", "schedule__warmup_steps": WARMUP,
    }  # fmt: skip
    return make_config(storage, corpus, **options, **other)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"), SMALL_FILES)


class Plain(torch.optim.Optimizer):
    """Muon as published for groups with ``muon``, written for one process; AdamW of PyTorch for the others."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})
        others = [group for group in self.param_groups if not group["muon"]]
        self.adamw = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), eps=1e-8)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.adamw.param_groups = []
        for group in self.param_groups:
            rate = group["lr"] * group["scale"]
            if not group["muon"]:
                options = {**self.adamw.defaults, "weight_decay": group["weight_decay"]}
                self.adamw.param_groups.append({**options, "params": group["params"], "lr": rate})
                continue
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.95).add_(parameter.grad, alpha=0.05)
                updates = parameter.grad * 0.05 + momentum * 0.95
                for weight, update in zip(
                    parameter if parameter.dim() == 3 else [parameter],
                    updates if updates.dim() == 3 else [updates],
                    strict=True,
                ):
                    weight.mul_(1 - rate * group["weight_decay"])
                    weight.sub_(newton_schulz(update) * (rate * 0.2 * math.sqrt(max(weight.shape))))
        self.adamw.step()


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Follow torch.optim.Muon, but in fp32."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def plain_runs(
    config: Config, steps: int, choose: Callable[[str, nn.Parameter], dict[str, Any] | None]
) -> tuple[Steps, Steps]:
    """Return the steps of a plain loop, and of one that adds the rows of each step in the reverse order.

    Args:
        choose: Returns the options of a parameter by its name, or None if the parameter is frozen.
    """
    prepare_attempt(config, "plain")
    plan = load_plan(config.run_dir / "plan")
    reverse: Any = SimpleNamespace(step_rows=lambda step: list(plan.step_rows(step))[::-1], pieces=plan.pieces)
    return plain_run(config, plan, steps, choose), plain_run(config, reverse, steps, choose)


def plain_run(
    config: Config, plan: Plan, steps: int, choose: Callable[[str, nn.Parameter], dict[str, Any] | None]
) -> Steps:
    documents = Corpus.open(config.data.path or "")
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **fields), attn_implementation="eager")
    model.load_state_dict(build_model(config, None).state_dict())
    groups = []
    for name, parameter in model.named_parameters():
        options = choose(name, parameter)
        parameter.requires_grad_(options is not None)
        if options is not None:
            decay = DECAY if parameter.dim() > 1 else 0.0
            groups.append({"params": [parameter], "weight_decay": decay, "muon": False, "scale": 1.0, **options})
    optimizer = Plain(groups)
    found = []
    for step in range(1, steps + 1):
        rate = RATE * min(1.0, step / WARMUP)
        loss, _, norm = plain_step(model, optimizer, plan, step, documents.read, rate=rate, max_norm=MAX_NORM)
        found.append((loss, norm))
    return found


def check_steps(config: Config, runs: tuple[Steps, Steps]) -> None:
    """Compare losses and gradient norms with a plain loop, by law 2's bound."""
    steps = read_history(config.run_dir).steps
    assert [step.step for step in steps] == list(range(1, len(runs[0]) + 1))
    own = [step.loss for step in steps], [step.grad_norm for step in steps]
    for ours, wanted, reverse in zip(own, *(zip(*run, strict=True) for run in runs), strict=True):
        apart, drift = relative(ours, wanted), relative(reverse, wanted)
        print(f"{apart:.1e} apart; the plain loop and its reverse are {drift:.1e} apart")
        assert apart <= max(FREE_RUNNING, 3 * drift)


@pytest.fixture(scope="module")
def muon_runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Steps, Steps]:
    def choose(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"muon": "layers." in name and parameter.dim() > 1}

    return plain_runs(settings(tmp_path_factory.mktemp("plain"), corpus, optimizer__kind="muon"), STEPS, choose)


@pytest.mark.parametrize("layout", fast_only(LAYOUTS, "4-zero-3-then-1-zero-1"))
def test_muon_is_the_published_algorithm_on_whole_matrices_and_each_expert(
    corpus: Path, muon_runs: tuple[Steps, Steps], tmp_path: Path, layout: str
) -> None:
    for part in LAYOUTS[layout]:
        config = settings(tmp_path, corpus, **part, optimizer__kind="muon")
        train(config)
    check_steps(config, muon_runs)


GROUPS: list[dict[str, Any]] = [
    {"match": ["*.layers.1.mlp.*"], "lr_scale": 0.25, "weight_decay": 0.0},
    {"match": ["*norm.weight", "lm_head.*"], "lr_scale": 3.0, "weight_decay": 2.0},
    # The first match applies, so these are the other weights of the layer.
    {"match": ["model.layers.1.*"], "lr_scale": 0.5},
]
FREEZE = ["model.embed_tokens.*", "model.layers.0.*"]
GROUPED: dict[str, Sequence[dict[str, Any]]] = {
    "2-zero-3": ({"workers": 2, "stage": 3, "until": 30},),
    "2-zero-2-then-1-zero-1": ({"workers": 2, "stage": 2, "until": 11}, {"workers": 1, "stage": 1, "until": 30}),
}  # fmt: skip


@pytest.fixture(scope="module")
def grouped_runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Steps, Steps]:
    def choose(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        if any(fnmatchcase(name, pattern) for pattern in FREEZE):
            return None
        if "layers.1.mlp." in name:
            return {"scale": 0.25, "weight_decay": 0.0}
        if name.endswith("norm.weight") or name.startswith("lm_head."):
            return {"scale": 3.0, "weight_decay": 2.0}
        return {"scale": 0.5} if "layers.1." in name else {}

    config = settings(tmp_path_factory.mktemp("plain"), corpus, optimizer__groups=GROUPS, model__freeze=FREEZE)
    return plain_runs(config, 30, choose)


@pytest.mark.parametrize("layout", fast_only(GROUPED, "2-zero-3"))
def test_groups_and_frozen_layers_are_those_of_a_plain_loop(
    corpus: Path, grouped_runs: tuple[Steps, Steps], tmp_path: Path, layout: str
) -> None:
    for part in GROUPED[layout]:
        config = settings(tmp_path, corpus, **part, optimizer__groups=GROUPS, model__freeze=FREEZE)
        train(config)
    check_steps(config, grouped_runs)


@pytest.mark.slow
def test_only_the_head_and_the_norms_are_trained(corpus: Path, tmp_path: Path) -> None:
    def choose(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        return {} if name.endswith("norm.weight") or name.startswith("lm_head.") else None

    freeze = ["*.embed_tokens.*", "*.self_attn.*", "*.mlp.*"]
    runs = plain_runs(settings(tmp_path / "plain", corpus, model__freeze=freeze), 10, choose)
    config = settings(tmp_path, corpus, workers=2, stage=3, until=10, model__freeze=freeze)
    train(config)
    check_steps(config, runs)


class Linear(nn.Module):
    """A model whose gradients are exact in fp32, so that every layout has the same bits."""

    SIZES = ((13, 7), (33,), (CHUNK // 2 + 3, 3), (5, 3, 2))

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(size, generator=generator) for size in self.SIZES)
        self.slopes = [torch.randint(-64, 65, size, generator=generator) / 64 for size in self.SIZES]

    def forward(self, factor: float) -> torch.Tensor:
        parts = [(weight * slope).sum() * factor for weight, slope in zip(self.weights, self.slopes, strict=True)]
        return torch.stack(parts).sum()


def updated_state(rank: int, world_size: int, stages: Sequence[int]) -> list[list[tuple[str, int, torch.Tensor]]]:
    """Train five steps at each stage; return this rank's elements of the state."""
    found = []
    for stage in stages:
        engine = build_engine(Linear(), zero_settings(stage=stage, weight_decay=0.1, kind="adamw_bf16_moments", seed=3))
        for step in range(5):
            engine.backward(engine(2.0 ** -(step % 3)))
            engine.step()
        source = state_source(engine)
        assert isinstance(source, ShardedState)
        found.append([(part.key, part.start, part.tensor.detach().clone()) for part in source.parts])
        engine.destroy()
        dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(1, 4), (2,)], ids=str)
def test_bf16_moments_have_the_same_bits_at_every_world_and_stage(worlds: Sequence[int]) -> None:
    states = []
    for world_size in dict.fromkeys((1, *worlds)):
        ranks = run_ranks(updated_state, world_size, (1, 2, 3))
        for parts in zip(*ranks, strict=True):
            whole: dict[str, list[tuple[int, torch.Tensor]]] = {}
            for key, start, tensor in (part for of_rank in parts for part in of_rank):
                whole.setdefault(key, []).append((start, tensor))
            joined = {key: [one for _, one in sorted(held, key=lambda item: item[0])] for key, held in whole.items()}
            states.append({key: torch.cat(held) for key, held in joined.items()})
    assert {key.partition("/")[0] for key in states[0]} == {"fp32", "exp_avg", "exp_avg_sq"}
    assert states[0]["exp_avg/weights.0"].dtype == torch.bfloat16
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert not [key for key in state if not torch.equal(state[key], states[0][key])]
