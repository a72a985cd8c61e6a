"""Every metric that a run logs has exactly one unit."""

from __future__ import annotations

import pytest
import torch

from ray_ulysses.engine.router_health import LayerRouting
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.tracking.metric_units import EVAL_LOSS, METRIC_UNITS, STEP_METRICS, TOKENS_PER_S, WORLD_SIZE
from ray_ulysses.tracking.mlflow_models import METRIC_PREFIX
from ray_ulysses.tracking.run_time import TimeSpent
from ray_ulysses.trainer.record import SystemMeter
from ray_ulysses.trainer.step import Flags, StepMeter, StepResult
from tests.unit.planner.runs import LLAMA_3_8B


def test_every_metric_has_one_unit_and_every_unit_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    of_documents = dict.fromkeys(("pair_accuracy", "pair_margin", "chosen_reward", "pair_kl", "accuracy"), 0.5)
    result = StepResult(
        loss=2.0, z_loss=0.1, router_loss=0.2, grad_norm=1.0, is_finite=True, bad_rows=(), tokens=8, digest=0,
        flags=Flags(), of_documents=of_documents,
        routing=(LayerRouting(layer=3, imbalance=1.5, dead=2, entropy=0.7),),
    )  # fmt: skip
    monkeypatch.setattr("ray_ulysses.trainer.step.peak_bf16_flops", lambda name: 1e12)
    meter = StepMeter(ModelShape.from_config_dict(LLAMA_3_8B), torch.device("cpu"), world_size=4)
    fields = set(meter.numbers(result, seconds=1.0, document_tokens=8, cost=64, learning_rate=0.1))
    assert {*STEP_METRICS, "tokens_per_s", "world_size"} == fields
    of_corpora = {"eval/books/loss", "source/books/loss", "eval/pair_accuracy", "eval/accuracy"}
    recorded = {*STEP_METRICS.values(), TOKENS_PER_S, WORLD_SIZE, EVAL_LOSS, *of_corpora, f"{METRIC_PREFIX}loss"}
    recorded |= set(TimeSpent(steps_s=1.0).metrics()) | set(SystemMeter(torch.device("cpu")).read())
    found = {name: [one for one in METRIC_UNITS if one.is_of(name)] for name in recorded}
    assert {name: len(units) for name, units in found.items() if len(units) != 1} == {}
    assert {name.partition("/")[0] for name in recorded} == {
        "train",
        "pairs",
        "router",
        "eval",
        "source",
        "time",
        "memory",
        "checkpoint",
        "system",
    }
    assert [one.name for one in METRIC_UNITS if not any(map(one.is_of, recorded))] == []
