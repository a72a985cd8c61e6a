"""A run on pairs of answers: each step is that of a plain loop, at every layout and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.model import build_model
from ray_ulysses.evaluation.held_out import held_out_documents
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.run_case import make_config, train
from tests.distributed.test_plain_loop import plain_optimizer
from tests.local_preparation import prepare_local
from tests.unit.tracking.journals import read_events

STEPS = 6
CONTEXT = 192


def pair_corpus(folder: Path, seed: int = 0, num_pairs: int = 90) -> Path:
    """Prepare pairs of random bytes; every tenth is longer than a row."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_pairs):
        size = 150 if number % 10 == 9 else 40
        prompt, chosen, rejected = (
            "".join(map(chr, rng.integers(97, 123, int(rng.integers(3, size))))) for _ in range(3)
        )
        if number % 10 == 5:
            # With two end tokens, one token longer than a row.
            prompt, chosen, rejected = "p" * 20, "cde"[seed] * 70 + f"{number:02}", "r" * (CONTEXT - 1 - 112)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = RowFields(prompt="prompt", chosen="chosen", rejected="rejected")
    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(path),), fields=fields), out=folder / "corpus"))
    return folder / "corpus"


def plain_pair(
    model: Any, tokens: torch.Tensor, spans: list[tuple[int, int]], kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pair's loss and the rewards of its answers."""
    border = spans[0][1]
    means = []
    for text, (start, stop) in (
        (tokens[:border], spans[0]),
        (tokens[border:], tuple(one - border for one in spans[1])),
    ):
        log_probs = functional.log_softmax(model(input_ids=text[None], use_cache=False).logits[0].double(), dim=-1)
        means.append(log_probs[start - 1 : stop - 1].gather(1, text[start:stop, None]).mean())
    if kind == "simpo":
        gain = 2.0 * (means[0] - means[1]) - 0.5
        loss = -0.9 * torch.log(torch.sigmoid(gain)) - 0.1 * torch.log(torch.sigmoid(-gain))
    else:
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        loss = -means[0] - 2.0 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    return loss - 0.3 * means[0], 2.0 * torch.stack(means).detach()


@pytest.mark.parametrize("kind", ["simpo", pytest.param("orpo", marks=pytest.mark.slow)])
def test_a_run_is_a_plain_loop_over_pairs(tmp_path: Path, kind: str) -> None:
    path = pair_corpus(tmp_path / "pairs")
    settings: dict[str, Any] = {
        "objective__kind": kind, "objective__beta": 2.0, "objective__sft_weight": 0.3,
        **({"objective__margin": 0.5, "objective__label_smoothing": 0.1} if kind == "simpo" else {}),
        "data__context_tokens": CONTEXT, "data__rows_per_step": 4, "data__overlong": "drop",
        "data__eval_fraction": 0.2,
        # An odd number: one of two groups evaluates a row of padding.
        "data__eval_rows": 3, "run__eval_every_steps": 3, "checkpoint__every_steps": 1, "optimizer__lr": 3e-3,
    }  # fmt: skip
    wide = {"cluster__workers": 4, "parallel__sp_size": 2, "memory__zero_stage": 3, "memory__loss_tile": 16}
    config = make_config(tmp_path, path, run__stop_step=3, **settings, **wide)
    of_texts = {name: value for name, value in settings.items() if not name.startswith("objective")}
    wrong = make_config(tmp_path, path, run__stop_step=3, **of_texts, **wide)
    (problem,) = prepare_run(wrong, Path("/")).report.problems
    assert problem.path == "data.path" and "need a preference loss" in problem.rule
    assert train(config, "first") == ("finished", 3)
    narrow = {"cluster__workers": 2, "parallel__sp_size": 2, "parallel__ring_size": 2, "memory__zero_stage": 1}
    config = make_config(tmp_path, path, run__stop_step=STEPS, **settings, **narrow)
    assert train(config, "second") == ("finished", STEPS)
    assert verify_run(config.run_dir).holds
    assert held_out_documents(None, config.run_dir, trust_run=False).are_pairs

    plan, corpus = load_plan(config.run_dir / "plan"), Corpus.open(path)
    assert corpus.info.are_pairs and plan.newest.totals.dropped_documents > 0
    fields = {name: value for name, value in (config.model.config or {}).items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    torch.manual_seed(0)
    model.load_state_dict(build_model(config, None).state_dict())
    optimizer, spans = plain_optimizer(model), corpus.spans
    assert spans is not None

    def pair(piece: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(int(spans.offsets[piece.document]), int(spans.offsets[piece.document + 1]))
        found = list(zip(spans.starts[own].tolist(), spans.stops[own].tolist(), strict=True))
        assert len(found) == 2 and piece.length + piece.has_next_label == found[1][1], "a pair is whole"
        seen.add(piece.has_next_label)
        tokens = torch.from_numpy(np.asarray(corpus.read(piece.document, 0, found[1][1])).astype(np.int64))
        return plain_pair(model, tokens, found, kind)

    def evaluated() -> tuple[float, float]:
        with torch.no_grad():
            rows = range(plan.evaluation.num_rows)
            losses, rewards = zip(*(pair(one) for row in rows for one in plan.evaluation.pieces(row)), strict=True)
        return float(torch.stack(losses).mean()), sum(float(one > other) for one, other in rewards) / len(rewards)

    seen: set[bool] = set()
    evaluations, steps = {0: evaluated()}, []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses, rewards = zip(*(pair(one) for row in plan.step_rows(step) for one in plan.pieces(row)), strict=True)
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_of_step(stage_at(config, plan, step - 1), step)
        optimizer.step()
        chosen, rejected = torch.stack(rewards).unbind(1)
        means = ((chosen > rejected).double().mean(), (chosen - rejected).mean(), chosen.mean())
        steps.append((float(loss), float(norm), [float(one) for one in means]))
        if step % 3 == 0:
            evaluations[step] = evaluated()
    assert seen == {False, True}, "one pair is a token longer than a row"
    for ours, (loss, norm, means) in zip(read_history(config.run_dir).steps, steps, strict=True):
        assert ours.loss == pytest.approx(loss, rel=1e-5), ours.step
        assert ours.grad_norm == pytest.approx(norm, rel=1e-4), ours.step
        assert [ours.pair_accuracy, ours.pair_margin, ours.chosen_reward] == pytest.approx(means, rel=1e-5), ours.step
    for event in (one for one in read_events(config.run_dir) if isinstance(one, Evaluated)):
        assert (event.loss, event.pair_accuracy) == pytest.approx(evaluations[event.step], rel=1e-5), event.step
