"""Loss weights of documents and tokens, from the rows of a source to the gradient of a run: law 1 with weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.model import build_model
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.tracking.history import RunHistory, read_history
from tests.breadth import fast_only
from tests.distributed.plain_steps import plain_optimizer, plain_step
from tests.distributed.run_case import make_config, train
from tests.local_preparation import prepare_local

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
STEPS = 3


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


def trained(storage: Path, corpus: Path, workers: int, **overrides: Any) -> tuple[Config, RunHistory]:
    config = make_config(
        storage, corpus, cluster__workers=workers, run__stop_step=STEPS, schedule__warmup_steps=0, optimizer__lr=1e-3,
        **overrides,
    )  # fmt: skip
    train(config)
    return config, read_history(config.run_dir)


def reference(config: Config) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step by Transformers' own model, document by document."""
    (path, _), *_ = config.data_sources
    corpus, plan = Corpus.open(path), load_plan(config.run_dir / "plan")
    torch.manual_seed(0)
    weights = {name: value.detach().clone() for name, value in build_model(config, None).state_dict().items()}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(config.model.config or {})), attn_implementation="eager")
    model.load_state_dict(weights)
    optimizer, found = plain_optimizer(model), []
    for step in range(1, STEPS + 1):
        rate = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 60)))
        loss, _, norm = plain_step(model, optimizer, plan, step, corpus.read, rate=rate, weights=corpus.label_weights)
        found.append((loss, norm))
    return found


@pytest.mark.parametrize("layout", fast_only([(1, 1, 2), (2, 2, 2), (4, 2, 3)], (1, 1, 2)), ids=str)
def test_the_loss_is_the_mean_by_weight_at_every_layout(tmp_path: Path, layout: tuple[int, int, int]) -> None:
    workers, sp_size, stage = layout
    corpus = weighted_corpus(tmp_path / "data")
    config, ours = trained(tmp_path / "runs", corpus, workers, parallel__sp_size=sp_size, memory__zero_stage=stage)
    assert len(ours.steps) == STEPS
    for step, (loss, norm) in zip(ours.steps, reference(config), strict=True):
        assert abs(step.loss - loss) <= 1e-5 * loss, step.step
        assert abs(step.grad_norm - norm) <= 1e-4 * norm, step.step
    # What the model received is found again in plan and corpus, weights included.
    assert verify_run(config.run_dir).holds


@pytest.mark.slow
def test_one_weight_for_all_changes_nothing(tmp_path: Path) -> None:
    fields = {"workers": 1, "parallel__sp_size": 1, "data__rows_per_step": 2}
    plain = trained(tmp_path / "plain", weighted_corpus(tmp_path / "a", plain=True), **fields)[1]
    single, double = (
        trained(tmp_path / f"runs-{scale}", weighted_corpus(tmp_path / f"b-{scale}", scale), **fields)[1]
        for scale in (1.0, 2.0)
    )
    assert [step.loss for step in double.steps] == pytest.approx([step.loss for step in single.steps], rel=1e-6)
    norms = [[step.grad_norm for step in one.steps] for one in (double, single)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert [step.loss for step in plain.steps] != pytest.approx([step.loss for step in single.steps], rel=1e-4)
