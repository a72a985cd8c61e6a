"""A run of a hybrid: trained, killed, resumed at other sizes of sp and ZeRO, exported, and loaded by Transformers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch, unshard
from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.tracking.history import read_history
from tests.apart import relative
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.distributed.run_case import make_config, make_corpus, prepare_attempt, run_paced_worker, run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    # With a router loss, which is one of whole rows whatever the layout.
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
}
STEPS = 6


@pytest.mark.slow
def test_a_hybrid_is_trained_killed_resumed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = make_corpus(tmp_path, ("bisect.py", "cmd.py", "copy.py"))

    def config_of(folder: str, workers: int, sp_size: int, **changes: Any) -> Any:
        settings = {"model__config": QWEN3_NEXT, "checkpoint__every_steps": 2, "run__stop_step": STEPS}
        layout = {"cluster__workers": workers, "parallel__sp_size": sp_size, "parallel__allowed_sp": [1, 2, 4]}
        return make_config(tmp_path / folder, corpus, **settings, **layout, **changes)

    unbroken = config_of("unbroken", 1, 1, memory__zero_stage=2)
    prepare_attempt(unbroken, "only")
    assert run_ranks(run_worker, 1, unbroken, "only", timeout_s=200) == [("finished", STEPS)]

    first = config_of("changing", 4, 2, memory__zero_stage=3)
    prepare_attempt(first, "first")
    outcomes = run_ranks_to_outcomes(run_paced_worker, 4, first, "first", kill=(1, "step", 3), timeout_s=200)
    assert outcomes[1].exit_code == -signal.SIGKILL
    second = config_of("changing", 4, 4, memory__zero_stage=2)
    prepare_attempt(second, "second")
    assert run_ranks(run_worker, 4, second, "second", timeout_s=200) == [("finished", STEPS)] * 4

    assert [attempt.first_step for attempt in read_history(second.run_dir).attempts] == [1, 3]
    wanted, ours = ([step.loss for step in read_history(one.run_dir).steps] for one in (unbroken, second))
    assert len(ours) == len(wanted) == STEPS
    assert relative(ours, wanted) <= 1e-5
    routers = [router_losses(one.run_dir) for one in (second, unbroken)]
    assert routers[0].keys() == routers[1].keys() == set(range(1, STEPS + 1))
    # At least top_k times the coefficient, which is that of equal shares.
    assert all(0.04 <= value < 0.08 for value in routers[1].values())
    assert relative([routers[0][step] for step in routers[1]], [*routers[1].values()]) <= 1e-5

    assert run_cli(app, ["export", str(second.run_dir)]) == 0, capsys.readouterr().err
    check_exported(second.run_dir, STEPS)


def router_losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for path in sorted(run_dir.glob("journal/*")) for line in path.read_text().splitlines()]
    return {line["step"]: line["router_loss"] for line in lines if line["event"] == "step"}


def check_exported(run_dir: Path, step: int) -> None:
    """Load a run's export with Transformers; a packed row gives the logits that each document gives alone."""
    out = run_dir / f"export/step-{step:08d}"
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert type(loaded).__name__ == "Qwen3NextForCausalLM"
    lengths = (90, 1, 37)
    ids = torch.randint(0, 256, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        alone = torch.cat([loaded(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)
        mesh = SequenceMesh.from_group(None)
        batch = shard_batch(ids, None, lengths, mesh)
        packed = unshard(apply_ulysses(loaded, mesh)(**batch.model_inputs()).logits, batch)
    assert float((packed - alone).norm() / alone.norm()) <= 1e-5
