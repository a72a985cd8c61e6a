"""The losses of validation corpora are those of one process, from step 0 on, at every layout and after a resume."""

from __future__ import annotations

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
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.run_case import MORE_FILES, SMALL_FILES, make_config, make_corpus, train
from tests.distributed.test_plain_loop import plain_optimizer, plain_step
from tests.unit.tracking.journals import read_events

STEPS, EVERY = 4, 2


def plain_losses(model: Any, plan: Plan, corpora: CorpusSet) -> list[tuple[str, float, int]]:
    """Return name, mean loss and number of labels of each evaluation set, document by document."""
    found = []
    for one in plan.evaluation_sets:
        loss_sum, count = 0.0, 0
        for piece in (piece for row in one.rows for piece in plan.evaluation.pieces(row) if piece.num_labels):
            read = corpora.read(piece.document, piece.start, piece.num_labels + 1)
            text = torch.from_numpy(np.asarray(read).astype(np.int64))
            with torch.no_grad():
                logits = model(input_ids=text[None, :-1], use_cache=False).logits[0]
            loss_sum += float(functional.cross_entropy(logits, text[1:], reduction="sum"))
            count += piece.num_labels
        found.append((one.name, loss_sum / count, count))
    return found


def test_each_corpus_has_the_loss_of_one_process_before_the_first_step_and_after_a_resume(tmp_path: Path) -> None:
    trained, first, second = (
        make_corpus(tmp_path / name, files)
        for name, files in (("t", SMALL_FILES), ("first", MORE_FILES[:2]), ("second", MORE_FILES[2:]))
    )
    settings: dict[str, Any] = {
        "data__validation": [str(first), str(second)], "data__eval_fraction": 0.3, "data__eval_rows": 3,
        "run__eval_every_steps": EVERY, "checkpoint__every_steps": 1, "optimizer__lr": 3e-3,
    }  # fmt: skip
    config = make_config(tmp_path, trained, run__stop_step=3, **settings)
    assert train(config, "first") == ("finished", 3)
    plan = load_plan(config.run_dir / "plan")
    other = {"cluster__workers": 2, "parallel__sp_size": 1, "memory__zero_stage": 1}
    config = make_config(tmp_path, trained, run__stop_step=STEPS, **settings, **other)
    assert train(config, "second") == ("finished", STEPS)

    shape = config.model.config or {}
    fields = {name: value for name, value in shape.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    torch.manual_seed(0)
    model.load_state_dict(build_model(config, None).state_dict())
    optimizer, corpora = plain_optimizer(model), CorpusSet((*plan.newest.sources, *plan.newest.validation))
    wanted = {0: plain_losses(model, plan, corpora)}
    for step in range(1, STEPS + 1):
        rate = rate_of_step(stage_at(config, plan, step - 1), step)
        plain_step(model, optimizer, plan, step, corpora.read, rate=rate)
        wanted[step] = plain_losses(model, plan, corpora)

    events = [event for event in read_events(config.run_dir) if isinstance(event, Evaluated)]
    assert [event.step for event in events] == [0, 2, 3, 4], "3 and 4 are the last steps of their commands"
    for event in events:
        assert [(one.name, one.tokens) for one in event.corpora] == [(name, num) for name, _, num in wanted[event.step]]
        for one, (_, loss, _) in zip(event.corpora, wanted[event.step], strict=True):
            assert one.loss == pytest.approx(loss, rel=1e-5), (event.step, one.name)
        tokens = sum(one.tokens for one in event.corpora)
        assert event.tokens == tokens
        assert event.loss == pytest.approx(sum(one.loss * one.tokens for one in event.corpora) / tokens, rel=1e-12)
    assert [one.name for one in events[0].corpora] == ["held_out", "first/corpus", "second/corpus"]
    assert [one.path for one in events[0].corpora] == [None, str(first), str(second)]
    assert events[-1].loss < events[0].loss - 0.01, "nothing was learned"
