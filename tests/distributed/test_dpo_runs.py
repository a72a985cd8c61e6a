"""Runs of DPO and IPO: each step is that of a plain loop with two models, at every layout and after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.tracking.events import Evaluated, SourcesMeasured
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.reference_case import FIELDS, plain_pair, reference_run, stored_model
from tests.distributed.run_case import make_config, train, train_to_death
from tests.distributed.test_pair_runs import CONTEXT, pair_corpus
from tests.distributed.test_plain_loop import plain_optimizer
from tests.unit.tracking.journals import read_events

STEPS, BETA = 6, 0.3
LAYOUTS: dict[str, dict[str, Any]] = {
    "sp2-dp2": {"cluster__workers": 4, "parallel__sp_size": 2, "memory__zero_stage": 3, "memory__loss_tile": 16},
    "ring2": {"cluster__workers": 2, "parallel__sp_size": 2, "parallel__ring_size": 2, "memory__zero_stage": 1},
    "one": {"cluster__workers": 1, "parallel__sp_size": 1, "memory__zero_stage": 2},
    "sp4": {"cluster__workers": 4, "parallel__sp_size": 4, "memory__zero_stage": 2, "memory__loss_tile": 5},
    "sp2-ring2": {"cluster__workers": 4, "parallel__sp_size": 4, "parallel__ring_size": 2, "memory__zero_stage": 3},
    "dp4": {"cluster__workers": 4, "parallel__sp_size": 1, "memory__zero_stage": 1},
}
LAYOUTS["killed"] = LAYOUTS["sp2-dp2"]


def settings_of(model: Path, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "model__init": "pretrained", "model__path": str(model), "model__config": {"model_type": "llama", **FIELDS},
        "objective__kind": kind, "objective__beta": BETA, "data__context_tokens": CONTEXT, "data__rows_per_step": 4,
        "data__overlong": "drop", "data__eval_rows": 3, "run__eval_every_steps": 3, "checkpoint__every_steps": 1,
        "optimizer__lr": 3e-3, **more,
    }  # fmt: skip


def plain_loss(
    kind: str, policy: torch.Tensor, reference: torch.Tensor, tokens: Sequence[int]
) -> tuple[torch.Tensor, list[float]]:
    """Return a pair's loss as TRL computes it, and its metrics.

    The losses are those of `DPOTrainer` with ``loss_type`` sigmoid and ``label_smoothing`` 0.1, to which an SFT term
    is added, and ipo, whose log-probabilities are means over tokens.
    """
    if kind == "dpo":
        rewards = BETA * (policy - reference)
        logits = rewards[0] - rewards[1]
        loss = -0.9 * logsigmoid(logits) - 0.1 * logsigmoid(-logits) - 0.3 * policy[0] / tokens[0]
    else:
        rewards = BETA * (policy - reference) / torch.tensor(tokens)
        loss = ((rewards[0] - rewards[1]) / BETA - 1 / (2 * BETA)) ** 2
    chosen, rejected = rewards.tolist()
    return loss, [float(chosen > rejected), chosen - rejected, chosen, (policy - reference).mean().item()]


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("dpo", ("sp2-dp2", "ring2")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (
            ("ipo", ("ring2", "sp2-dp2")), ("dpo", ("one", "sp4")), ("dpo", ("sp2-ring2", "dp4")),
            ("ipo", ("dp4", "one")), ("ipo", ("killed", "ring2")),
        )),
    ],
)  # fmt: skip
def test_a_run_is_a_plain_loop_with_two_models(tmp_path: Path, kind: str, layouts: tuple[str, str]) -> None:
    paths = [pair_corpus(tmp_path / f"pairs-{seed}", seed, 50 - 7 * seed) for seed in range(3)]
    stored_model(tmp_path / "model")
    for path in paths:
        reference_run(path, tmp_path / "model")
    smoothed = {"objective__label_smoothing": 0.1, "objective__sft_weight": 0.3} if kind == "dpo" else {}
    settings = settings_of(
        tmp_path / "model", kind, data__path=None, data__sources=[{"path": str(one)} for one in paths[:2]],
        data__validation=[str(paths[2])], **smoothed,
    )  # fmt: skip
    for session, stop in zip(layouts, (3, STEPS), strict=True):
        if stop == STEPS:
            # The run keeps the reference model with which it began, even if another one takes its place.
            model_then = (tmp_path / "model" / "model.safetensors").read_bytes()
            stored_model(tmp_path / "model", seed=77)
        config = make_config(tmp_path, paths[0], run__stop_step=stop, **settings, **LAYOUTS[session])
        if session == "killed":
            train_to_death(config, session, (1, "step", stop))
        else:
            assert train(config, session) == ("finished", stop)
    assert verify_run(config.run_dir).holds
    (tmp_path / "model" / "model.safetensors").write_bytes(model_then)

    plan = load_plan(config.run_dir / "plan")
    corpora = CorpusSet((*plan.newest.sources, *plan.newest.validation))
    model, fixed = (AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32") for _ in range(2))
    optimizer = plain_optimizer(model)

    def pair(piece: Any) -> tuple[torch.Tensor, list[float]]:
        corpus, document = corpora.locate(piece.document)
        with torch.no_grad():
            reference, tokens = plain_pair(fixed, corpus, document)
        return plain_loss(kind, plain_pair(model, corpus, document)[0], reference, tokens)

    def evaluated() -> tuple[float, float]:
        with torch.no_grad():
            rows = range(plan.evaluation.num_rows)
            found = [pair(one) for row in rows for one in plan.evaluation.pieces(row)]
        return float(torch.stack([loss for loss, _ in found]).mean()), sum(one[0] for _, one in found) / len(found)

    evaluations, steps, seen = {0: evaluated()}, [], set()
    trained: list[tuple[int, str, float]] = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        pieces = [one for row in plan.step_rows(step) for one in plan.pieces(row)]
        seen |= {corpora.locate(one.document)[0].fingerprint for one in pieces}
        found = [pair(one) for one in pieces]
        folders = [str(corpora.locate(one.document)[0].folder) for one in pieces]
        trained += [(step, folder, one.item()) for folder, (one, _) in zip(folders, found, strict=True)]
        loss = torch.stack([one for one, _ in found]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_of_step(stage_at(config, plan, step - 1), step)
        optimizer.step()
        means = [sum(values) / len(found) for values in zip(*(one for _, one in found), strict=True)]
        steps.append((loss.item(), norm.item(), means))
        if step % 3 == 0:
            evaluations[step] = evaluated()
    assert len(seen) == 2, "both corpora are trained on"
    measured = [one for one in read_events(config.run_dir) if isinstance(one, SourcesMeasured)]
    assert measured
    for before, event in itertools.pairwise([SimpleNamespace(step=0), *measured]):
        for corpus in event.corpora:
            steps_since = range(before.step + 1, event.step + 1)
            own = [one for step, folder, one in trained if step in steps_since and f"/{corpus.name}" in folder]
            assert (corpus.tokens, corpus.loss) == (len(own), pytest.approx(sum(own) / len(own), rel=1e-5)), event.step
    for ours, (loss_of_step, norm_of_step, wanted) in zip(read_history(config.run_dir).steps, steps, strict=True):
        assert ours.loss == pytest.approx(loss_of_step, rel=1e-5), ours.step
        assert ours.grad_norm == pytest.approx(norm_of_step, rel=1e-4), ours.step
        measured = [ours.pair_accuracy, ours.pair_margin, ours.chosen_reward, ours.pair_kl]
        # At step 1, rewards are differences of equal values, so their order is that of rounding errors.
        first = 1 if ours.step == 1 else 0
        assert measured[first:] == pytest.approx(wanted[first:], rel=1e-5, abs=1e-5), ours.step
    for event in (one for one in read_events(config.run_dir) if isinstance(one, Evaluated)):
        loss, accuracy = evaluations[event.step]
        assert event.loss == pytest.approx(loss, rel=1e-5), event.step
        assert event.step == 0 or event.pair_accuracy == accuracy, event.step


def test_an_adapter_is_compared_with_its_base(tmp_path: Path) -> None:
    path = pair_corpus(tmp_path / "pairs")
    stored_model(tmp_path / "model")
    reference_run(path, tmp_path / "model")
    settings = settings_of(tmp_path / "model", "dpo", model__adapter={"rank": 4, "alpha": 32}, data__eval_fraction=0.2)
    config = make_config(tmp_path, path, run__stop_step=3, **settings, **LAYOUTS["ring2"])
    assert train(config) == ("finished", 3)
    first, *_, last = read_history(config.run_dir).steps
    assert first.loss == pytest.approx(0.693147, rel=1e-4), "the second matrix of a new adapter is zero"
    assert abs(first.pair_kl or 0.0) < 1e-4 < abs(last.pair_kl or 0.0)
    before, *_, after = [one for one in read_events(config.run_dir) if isinstance(one, Evaluated)]
    assert before.loss == pytest.approx(0.693147, rel=1e-4) and before.loss != after.loss
