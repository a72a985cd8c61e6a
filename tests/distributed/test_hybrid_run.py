"""A run of a hybrid: trained, killed, resumed at other sizes of sp and ZeRO, exported, and loaded by Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch, unshard
from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.history import read_history
from tests.apart import relative
from tests.distributed.run_case import SMALL_FILES, assert_same_run, make_config, make_corpus, train, train_to_death
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    # With a router loss, which is one of whole rows whatever the layout.
    "output_router_logits": True, "router_aux_loss_coef": 0.02,
}  # fmt: skip
STEPS = 6


@pytest.mark.slow
def test_a_hybrid_is_trained_killed_resumed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = make_corpus(tmp_path, SMALL_FILES)

    def config_of(folder: str, workers: int, sp_size: int, zero_stage: int) -> Any:
        settings = {"model__config": QWEN3_NEXT, "checkpoint__every_steps": 2, "run__stop_step": STEPS}
        layout = {"cluster__workers": workers, "parallel__sp_size": sp_size, "parallel__allowed_sp": [1, 2, 4]}
        return make_config(tmp_path / folder, corpus, **settings, **layout, memory__zero_stage=zero_stage)

    unbroken = config_of("unbroken", 1, 1, 2)
    assert train(unbroken) == ("finished", STEPS)
    train_to_death(config_of("changing", 4, 2, 3), "first", (1, "step", 3))
    changed = config_of("changing", 4, 4, 2)
    assert train(changed, "second") == ("finished", STEPS)
    ours = read_history(changed.run_dir)
    assert [attempt.first_step for attempt in ours.attempts] == [1, 3]
    assert_same_run(ours, read_history(unbroken.run_dir))
    routers, wanted = (router_losses(one.run_dir) for one in (changed, unbroken))
    # At least top_k times the coefficient, which is that of equal shares.
    assert len(wanted) == STEPS and all(0.04 <= value < 0.08 for value in wanted)
    assert relative(routers, wanted) <= 1e-5

    assert run_cli(app, ["export", str(changed.run_dir)]) == 0, capsys.readouterr().err
    check_exported(changed.run_dir / f"export/step-{STEPS:08d}")


def router_losses(run_dir: Path) -> list[float]:
    """Return the router loss of each step, as its journal has it at last."""
    found: dict[int, Any] = {one.step: one.router_loss for one in read_events(run_dir) if isinstance(one, StepDone)}
    return [found[step] for step in sorted(found)]


def check_exported(out: Path) -> None:
    """Load an export with Transformers; a packed row gives the logits that each document gives alone."""
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
