"""Runs of KTO: each step is that of a plain loop with two models, at every layout and after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.evaluate import prepare_evaluation
from ray_ulysses.evaluation.report import EvaluationRequest
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.reference_case import plain_pair, reference_run, stored_model
from tests.distributed.run_case import make_config, train
from tests.distributed.test_dpo_runs import BETA, LAYOUTS, STEPS, settings_of
from tests.distributed.test_plain_loop import plain_optimizer
from tests.unit.data.test_labeled_answers import answer_corpus
from tests.unit.tracking.journals import read_events

WEIGHTS = {True: 1.5, False: 0.75}


def labeled_corpus(folder: Path, seed: int = 0, num_answers: int = 90) -> Path:
    """Prepare labeled answers of random bytes."""
    rng = np.random.default_rng(seed)
    texts = [["".join(map(chr, rng.integers(97, 123, int(rng.integers(3, 30))))) for _ in range(2)]
             for _ in range(num_answers)]  # fmt: skip
    labels = rng.integers(0, 3, num_answers) > 0
    rows = [{"p": prompt, "c": answer, "y": bool(label)} for (prompt, answer), label in zip(texts, labels, strict=True)]
    answer_corpus(folder, rows)
    return folder / "corpus"


@pytest.mark.parametrize(
    "layouts", [("sp2-dp2", "ring2"), pytest.param(("sp4", "one"), marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_run_on_labeled_answers_is_a_plain_loop(tmp_path: Path, layouts: tuple[str, str]) -> None:
    path = labeled_corpus(tmp_path / "answers")
    stored_model(tmp_path / "model")
    reference_run(path, tmp_path / "model")
    settings = settings_of(
        tmp_path / "model", "kto", data__eval_fraction=0.2, objective__desirable_weight=WEIGHTS[True],
        objective__undesirable_weight=WEIGHTS[False],
    )  # fmt: skip
    for session, stop in zip(layouts, (3, STEPS), strict=True):
        config = make_config(tmp_path, path, run__stop_step=stop, **settings, **LAYOUTS[session])
        assert train(config, session) == ("finished", stop)
    assert verify_run(config.run_dir).holds
    with pytest.raises(UserError, match="are labeled answers"):
        prepare_evaluation(EvaluationRequest(model=config.run_dir, is_run=True, tasks=("loss",)))

    plan = load_plan(config.run_dir / "plan")
    corpora = CorpusSet(plan.newest.sources)
    model, fixed = (AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32") for _ in range(2))
    optimizer = plain_optimizer(model)

    def losses_of(pieces: Sequence[Any]) -> list[tuple[torch.Tensor, bool, bool, float, float]]:
        """Return the loss of each answer of a row, by TRL's formulas, its label, whether it is right, reward and KL."""
        gained, labels = [], []
        for piece in pieces:
            corpus, document = corpora.locate(piece.document)
            with torch.no_grad():
                reference, _ = plain_pair(fixed, corpus, document)
            gained.append(plain_pair(model, corpus, document)[0] - reference)
            labels.append(corpus.info.classes[corpus.labels[document]] == "true")
        kl = torch.stack([other for _, other in gained]).mean().detach().clamp(min=0)
        kls.append(float(kl))
        found = []
        for (own, _), label in zip(gained, labels, strict=True):
            gain = own - kl if label else kl - own
            loss = WEIGHTS[label] * (1 - torch.sigmoid(BETA * gain))
            found.append((loss, label, bool((own > kl) == label), BETA * own.item(), kl.item()))
        return found

    def evaluated() -> tuple[float, float]:
        with torch.no_grad():
            found = [one for row in range(plan.evaluation.num_rows) for one in losses_of(plan.evaluation.pieces(row))]
        return float(torch.stack([one[0] for one in found]).mean()), sum(one[2] for one in found) / len(found)

    kls: list[float] = []
    evaluations, steps = {0: evaluated()}, []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        found = [one for row in plan.step_rows(step) for one in losses_of(plan.pieces(row))]
        loss = torch.stack([one[0] for one in found]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_of_step(stage_at(config, plan, step - 1), step)
        optimizer.step()
        good, other = ([one[3] for one in found if one[1] is label] for label in (True, False))
        chosen = sum(good) / len(good)
        means = [sum(one[2] for one in found) / len(found), chosen - sum(other) / len(other), chosen,
                 sum(one[4] for one in found) / len(found)]  # fmt: skip
        steps.append((loss.item(), norm.item(), means))
        if step % 3 == 0:
            evaluations[step] = evaluated()
    assert len({round(one, 6) for one in kls if one > 0}) > STEPS, "rows have different KL divergences above 0"
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
