"""A run is a plain loop of PyTorch, document by document: every setting of the optimizer, and weights of labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.config import Config
from ray_ulysses.config.optimizer import OptimizerSection, ScheduleSection
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.model import build_model
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.apart import relative
from tests.breadth import fast_only
from tests.distributed.checkpoint_layouts_case import can_swap
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, prepare_attempt, run_worker, train
from tests.local_preparation import prepare_local

STEPS, WARMUP, HORIZON, DECAY = 11, 3, 9, 4
FREE_RUNNING = 1e-5
"""Law 2's floor for fp32 that runs freely."""
# Each is chosen so that its default would show: eps is as large as moments, clipping is at work in every step.
OPTIMIZER: dict[str, Any] = {
    "lr": 2e-3, "betas": [0.7, 0.8], "eps": 1e-3, "weight_decay": 2.0, "max_grad_norm": 0.4, "z_loss": 3e-3,
    # Of a model without routers.
    "router_loss": None, "router_bias_rate": None,
}  # fmt: skip
SCHEDULE: dict[str, Any] = {
    "kind": "wsd", "warmup_steps": WARMUP, "horizon_steps": HORIZON, "decay_steps": DECAY, "min_lr_ratio": 0.3,
}  # fmt: skip
ROPE = {"rope_theta": 500.0}
MODEL: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 512,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage-1": {"memory__zero_stage": 1},
    "stage-2-cpu": {"memory__zero_stage": 2, "memory__offload_optimizer": "cpu"},
    "stage-2-slices": {"memory__zero_stage": 2, "parallel__sp_size": 2},
    "stage-3-slices": {"memory__zero_stage": 3, "parallel__sp_size": 2, "cluster__workers": 4},
    "stage-3-alone": {"memory__zero_stage": 3, "cluster__workers": 1},
    "stage-3-weights": {
        "memory__zero_stage": 3, "memory__offload_optimizer": "cpu", "memory__offload_param": "cpu",
    },
    "stage-3-nvme": {"memory__zero_stage": 3, "memory__offload_optimizer": "nvme"},
}  # fmt: skip


def settings(storage: Path, corpus: Path, **layout: Any) -> Config:
    both = {f"optimizer__{name}": value for name, value in OPTIMIZER.items()}
    both |= {f"schedule__{name}": value for name, value in SCHEDULE.items()}
    options: dict[str, Any] = {
        "model__config": MODEL, "model__rope": ROPE, "data__context_tokens": 128, "data__rows_per_step": 4,
        "run__stop_step": STEPS, "checkpoint__every_steps": None, "cluster__workers": 2, "parallel__sp_size": 1,
    }  # fmt: skip
    return make_config(storage, corpus, **{**options, **both, **layout})


def weighted_corpus(folder: Path, scale: float = 1.0, plain: bool = False) -> Path:
    """Prepare documents of tokens: each has one weight, one per token with zeros among them, or none."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(90):
        ids = rng.integers(0, 256, int(rng.integers(20, 200))).tolist()
        each = rng.choice([0.0, 0.25, 1.0, 3.0], len(ids)) * scale
        weight = [each.tolist(), float(rng.uniform(0.1, 4)) * scale, scale][number % 3]
        rows.append({"ids": ids, "w": None if plain else weight})
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = RowFields.from_options({"tokens_field": "ids", "weight_field": "w"})
    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(path),), fields=fields), out=folder / "corpus"))
    return folder / "corpus"


def plain_optimizer(model: torch.nn.Module, *, weight_decay: float = 0.1, **options: Any) -> torch.optim.AdamW:
    """Return AdamW that decays matrices alone."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"betas": (0.9, 0.95), "eps": 1e-8, **options})


def plain_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    step: int,
    read: Callable[[int, int, int], Any],
    *,
    rate: float,
    max_norm: float = 1.0,
    z_loss: float = 0.0,
    weights: Callable[[int, int, int], Any] | None = None,
) -> tuple[float, float, float]:
    """Train a step; return its loss, z-loss and gradient norm.

    Args:
        read: Returns tokens of a document: of which, from where, how many.
        weights: Returns label weights of a document, from a token to another; None weighs all alike.
    """
    optimizer.zero_grad()
    loss, z_sum, count = torch.zeros(()), torch.zeros(()), 0.0
    for piece in (piece for row in plan.step_rows(step) for piece in plan.pieces(row) if piece.num_labels):
        text = torch.from_numpy(np.asarray(read(piece.document, piece.start, piece.num_labels + 1)).astype(np.int64))
        factors = torch.ones(piece.num_labels)
        if weights is not None:
            factors = torch.from_numpy(weights(piece.document, piece.start + 1, piece.start + piece.num_labels + 1))
        logits = model(input_ids=text[None, :-1], use_cache=False).logits[0]
        loss = loss + (functional.cross_entropy(logits, text[1:], reduction="none") * factors).sum()
        z_sum = z_sum + z_loss * (logits.logsumexp(-1).square() * factors).sum()
        count += float(factors.double().sum())
    ((loss + z_sum) / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return float(loss.detach()) / count, float(z_sum.detach()) / count, float(norm)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weighted_corpus(tmp_path_factory.mktemp("data") / "weighted")


@pytest.fixture(scope="module")
def wanted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float, float]]:
    """Loss, z-loss and gradient norm of each step of a loop that knows nothing of the package but its plan."""
    config = settings(tmp_path_factory.mktemp("plain"), corpus)
    prepare_attempt(config, "one")
    documents, plan = Corpus.open(corpus), load_plan(config.run_dir / "plan")
    positions = {"sliding_attention": 10_000.0, "full_attention": ROPE["rope_theta"]}
    fields = {name: value for name, value in MODEL.items() if name != "model_type"} | {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in positions.items()}
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **fields), attn_implementation="eager")
    torch.manual_seed(0)
    model.load_state_dict(build_model(config, None).state_dict())
    optimizer = plain_optimizer(
        model, betas=tuple(OPTIMIZER["betas"]), eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"]
    )
    found = []
    for step in range(1, STEPS + 1):
        factor = min(step / WARMUP, 1.0) * (1 - 0.7 * min(1.0, max(0.0, (step - (HORIZON - DECAY)) / DECAY)))
        found.append(
            plain_step(
                model, optimizer, plan, step, documents.read, rate=OPTIMIZER["lr"] * factor,
                max_norm=OPTIMIZER["max_grad_norm"], z_loss=OPTIMIZER["z_loss"], weights=documents.label_weights,
            )
        )  # fmt: skip
    return found


def test_every_setting_of_the_optimizer_is_away_from_its_default() -> None:
    for section, chosen in ((OptimizerSection, OPTIMIZER), (ScheduleSection, SCHEDULE)):
        # A warm-up is given in steps or as a ratio.
        # Other kinds and groups have tests of their own, in test_optimizers.
        elsewhere = {"kind", "groups"} if section is OptimizerSection else {"warmup_ratio"}
        assert set(chosen) == set(section.model_fields) - elsewhere
        own, default = (section.model_validate(values).model_dump() for values in (chosen, {}))
        kept = {name for name in own if own[name] == default[name]}
        assert kept <= {"router_loss", "router_bias_rate", "warmup_ratio", "kind", "groups"}


@pytest.mark.parametrize("layout", fast_only(LAYOUTS, "stage-3-alone"))
def test_every_step_is_that_of_a_plain_loop(
    corpus: Path, wanted: list[tuple[float, float, float]], tmp_path: Path, layout: str
) -> None:
    options = LAYOUTS[layout]
    if options.get("memory__offload_optimizer") == "nvme":
        if not run_ranks(can_swap, 1)[0]:
            pytest.skip("DeepSpeed's op for NVMe can't be built here")
        options = options | {"memory__nvme_path": str(tmp_path / "swap")}
    config = settings(tmp_path / "runs", corpus, **options)
    train(config)
    check_steps(config, wanted)


@pytest.mark.slow
def test_the_optimizer_that_is_offloaded_from_a_gpu_decays_weights_and_not_gradients(
    corpus: Path, wanted: list[tuple[float, float, float]], tmp_path: Path
) -> None:
    """With a stand-in for DeepSpeed's Adam for the host, which can't be compiled on every machine."""
    layout = {"memory__zero_stage": 3, "memory__offload_optimizer": "cpu", "cluster__workers": 1}
    config = settings(tmp_path, corpus, **layout)
    train(config, worker=run_beside_a_gpu)
    check_steps(config, wanted)


class HostAdam(torch.optim.Adam):
    def __init__(self, groups: Any, *, adamw_mode: bool, **options: Any) -> None:
        super().__init__(groups, decoupled_weight_decay=adamw_mode, **options)


def run_beside_a_gpu(*arguments: Any) -> tuple[str, int]:
    beside_a_gpu = SimpleNamespace(optim=torch.optim, cuda=SimpleNamespace(is_available=lambda: True))
    with (
        mock.patch("ray_ulysses.engine.zero.torch", beside_a_gpu),
        mock.patch("deepspeed.ops.adam.DeepSpeedCPUAdam", HostAdam),
    ):
        return run_worker(*arguments)


def check_steps(config: Config, wanted: list[tuple[float, float, float]]) -> None:
    steps = read_history(config.run_dir).steps
    assert len(steps) == STEPS
    losses, z_losses, norms = zip(*wanted, strict=True)
    assert min(norms) > OPTIMIZER["max_grad_norm"], "clipping is at work in every step"
    assert relative([step.loss for step in steps], losses) <= FREE_RUNNING
    assert relative([step.z_loss for step in steps], z_losses) <= FREE_RUNNING
    assert relative([step.grad_norm for step in steps], norms) <= FREE_RUNNING
    # What the model received is found again in plan and corpus, weights included.
    assert verify_run(config.run_dir).holds


@pytest.mark.slow
def test_one_weight_for_all_changes_nothing(tmp_path: Path) -> None:
    def trained(name: str, **options: Any) -> RunHistory:
        corpus = weighted_corpus(tmp_path / name, **options)
        config = settings(tmp_path / name, corpus, cluster__workers=1, run__stop_step=3)
        train(config)
        return read_history(config.run_dir)

    single, double, plain = trained("single"), trained("double", scale=2.0), trained("plain", plain=True)
    assert [step.loss for step in double.steps] == pytest.approx([step.loss for step in single.steps], rel=1e-6)
    norms = [[step.grad_norm for step in one.steps] for one in (double, single)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert [step.loss for step in plain.steps] != pytest.approx([step.loss for step in single.steps], rel=1e-4)
