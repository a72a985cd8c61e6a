"""A run with every setting of the optimizer away from its default is a plain loop of PyTorch, at every layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.config import Config
from ray_ulysses.config.learning import OptimizerSection, ScheduleSection
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.engine.model import build_model
from ray_ulysses.tracking.history import read_history
from tests.apart import relative
from tests.breadth import fast_only
from tests.distributed.checkpoint_layouts_case import can_swap
from tests.distributed.harness import run_ranks
from tests.distributed.plain_steps import plain_optimizer, plain_step
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_worker, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

STEPS, WARMUP, HORIZON, DECAY = 30, 5, 25, 10
FREE_RUNNING = 1e-5
"""Law 2's floor for fp32 that runs freely."""
# Each is chosen so that its default would show: eps is as large as moments, clipping is at work in every step.
OPTIMIZER: dict[str, Any] = {
    "lr": 2e-3, "betas": [0.7, 0.8], "eps": 1e-3, "weight_decay": 2.0, "max_grad_norm": 0.4, "z_loss": 3e-3,
    # Of a model without routers.
    "router_loss": None,
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
    "stage-3": {"memory__zero_stage": 3},
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
        "model__config": MODEL, "model__rope": ROPE, "data__rows_per_step": 4, "run__stop_step": STEPS,
        "checkpoint__every_steps": None, "cluster__workers": 2, "parallel__sp_size": 1,
    }  # fmt: skip
    return make_config(storage, corpus, **{**options, **both, **layout})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


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
                max_norm=OPTIMIZER["max_grad_norm"], z_loss=OPTIMIZER["z_loss"],
            )
        )  # fmt: skip
    return found


def test_every_setting_of_the_optimizer_is_away_from_its_default() -> None:
    for section, chosen in ((OptimizerSection, OPTIMIZER), (ScheduleSection, SCHEDULE)):
        assert set(chosen) == set(section.model_fields)
        own, default = (section.model_validate(values).model_dump() for values in (chosen, {}))
        assert {name for name in own if own[name] == default[name]} <= {"router_loss"}


@pytest.mark.parametrize("layout", fast_only(LAYOUTS, "stage-3-alone"))
def test_thirty_steps_are_those_of_a_plain_loop(
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
