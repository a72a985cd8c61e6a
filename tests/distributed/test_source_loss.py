"""The loss of each corpus of a mixture is that of one process, at every layout and after a resume."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.engine.model import build_model
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.tracking.events import SourcesMeasured, StepDone
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.run_case import SMALL_FILES, make_config, make_corpus, train
from tests.distributed.test_plain_loop import plain_optimizer, plain_step, weighted_corpus
from tests.unit.tracking.journals import read_events

STEPS = 5


def plain_losses(model: Any, plan: Plan, step: int, corpora: CorpusSet) -> dict[str, tuple[float, float]]:
    """Return the weighted sum of losses and the sum of weights of each corpus in a step, document by document."""
    found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for piece in (piece for row in plan.step_rows(step) for piece in plan.pieces(row) if piece.num_labels):
        text = torch.from_numpy(
            np.asarray(corpora.read(piece.document, piece.start, piece.num_labels + 1)).astype(np.int64)
        )
        first = piece.start + 1
        weights = corpora.label_weights(piece.document, first, first + piece.num_labels)
        factors = torch.ones(piece.num_labels) if weights is None else torch.from_numpy(weights)
        with torch.no_grad():
            logits = model(input_ids=text[None, :-1], use_cache=False).logits[0]
        losses = functional.cross_entropy(logits, text[1:], reduction="none") * factors
        corpus, _ = corpora.locate(piece.document)
        loss_sum, weight = found[str(corpus.folder)]
        found[str(corpus.folder)] = (loss_sum + float(losses.double().sum()), weight + float(factors.double().sum()))
    return found


def test_each_corpus_has_the_loss_of_one_process_at_two_layouts(tmp_path: Path) -> None:
    plain, weighted = make_corpus(tmp_path / "plain", SMALL_FILES), weighted_corpus(tmp_path / "weighted")
    settings: dict[str, Any] = {
        "data__path": None, "data__sources": [{"path": str(one), "weight": 1.0} for one in (plain, weighted)],
        "data__context_tokens": 256, "data__rows_per_step": 8, "run__log_every_steps": 2,
        "checkpoint__every_steps": 1, "optimizer__lr": 3e-3,
    }  # fmt: skip
    wide = {"cluster__workers": 4, "parallel__sp_size": 2, "memory__zero_stage": 3}
    config = make_config(tmp_path, plain, run__stop_step=3, **settings, **wide)
    assert train(config, "first") == ("finished", 3)
    plan = load_plan(config.run_dir / "plan")
    narrow = {"cluster__workers": 2, "parallel__sp_size": 2, "parallel__ring_size": 2, "memory__zero_stage": 1}
    config = make_config(tmp_path, plain, run__stop_step=STEPS, **settings, **narrow)
    assert train(config, "second") == ("finished", STEPS)

    fields = {name: value for name, value in (config.model.config or {}).items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    torch.manual_seed(0)
    model.load_state_dict(build_model(config, None).state_dict())
    optimizer, corpora = plain_optimizer(model), CorpusSet(plan.newest.sources)
    wanted = []
    for step in range(1, STEPS + 1):
        wanted.append(plain_losses(model, plan, step, corpora))
        rate = rate_of_step(stage_at(config, plan, step - 1), step)
        plain_step(model, optimizer, plan, step, corpora.read, rate=rate, weights=_weights(corpora))

    events = read_events(config.run_dir)
    found = [event for event in events if isinstance(event, SourcesMeasured)]
    # Every second step is logged; 3 and 5 are the last steps of their commands.
    assert [event.step for event in found] == [2, 3, 4, 5]
    folders = {"plain/corpus": str(plain), "weighted/corpus": str(weighted)}
    assert {one.name for event in found for one in event.corpora} == set(folders)
    for event, steps in zip(found, ([1, 2], [3], [4], [5]), strict=True):
        for name, folder in folders.items():
            of_steps = [wanted[step - 1][folder] for step in steps]
            weight = sum(weight for _, weight in of_steps)
            one = next((one for one in event.corpora if one.name == name), None)
            assert (one is None) == (weight == 0), "a corpus without tokens has no loss"
            if one is not None:
                assert one.tokens == pytest.approx(weight, rel=1e-6)
                assert one.loss == pytest.approx(sum(loss for loss, _ in of_steps) / weight, rel=1e-5), (steps, name)
    losses = {event.step: event.loss for event in events if isinstance(event, StepDone)}
    last = found[-1].corpora
    mean = sum(one.loss * one.tokens for one in last) / sum(one.tokens for one in last)
    assert losses[STEPS] == pytest.approx(mean, rel=1e-6), "the loss of a step is the mean over its corpora"


def _weights(corpora: CorpusSet) -> Any:
    def read(document: int, first: int, last: int) -> np.ndarray[Any, Any]:
        found = corpora.label_weights(document, first, last)
        return np.ones(last - first, dtype=np.float32) if found is None else found

    return read
