"""A run of a masked language model: each step is that of a plain loop, at every layout and after a resume."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from ray_ulysses.cli import app, run
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader, RowSlice
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.model import build_model
from ray_ulysses.evaluation.evaluate import prepare_evaluation
from ray_ulysses.evaluation.report import EvaluationRequest
from ray_ulysses.evaluation.run_evaluation import evaluate_locally
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.run.masks import read_masking
from ray_ulysses.run.preflight import claim_directory, prepare_run
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.loop import open_rows, rate_of_step
from tests.distributed.run_case import make_config, train
from tests.distributed.test_plain_loop import plain_optimizer
from tests.local_preparation import prepare_local
from tests.mask_tokenizer import mask_tokenizer
from tests.unit.tracking.journals import read_events

STEPS = 6
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256,
    },
    "modernbert": {
        "model_type": "modernbert", "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "global_attn_every_n_layers": 3, "local_attention": 32,
        "max_position_embeddings": 1024, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2,
        "eos_token_id": 3,
    },
}  # fmt: skip


def corpus_of(folder: Path, tokenizer: Path) -> Path:
    """Prepare short parts of the standard library's sources."""
    folder.mkdir(parents=True)
    text = Path(os.__file__).with_name("bisect.py").read_text() + Path(os.__file__).with_name("cmd.py").read_text()
    places = [0]
    while places[-1] < 12_000:
        places.append(places[-1] + 40 + (places[-1] * 7) % 330)
    for number, (start, stop) in enumerate(itertools.pairwise(places)):
        (folder / f"{number:03}.txt").write_text(text[start:stop])
    request = PrepareRequest(sources=SourceSpec(paths=(str(folder),)), out=folder / "corpus", tokenizer=str(tokenizer))
    prepare_local(request)
    return folder / "corpus"


def settings_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "model__config": ENCODERS[kind], "objective__kind": "mlm", "objective__mask_fraction": 0.2,
        "data__rows_per_step": 4, "data__eval_fraction": 0.2, "data__eval_rows": 3, "run__eval_every_steps": 3,
        "checkpoint__every_steps": 1, "optimizer__lr": 3e-3, **changes,
    }  # fmt: skip


def masked_sums(model: Any, row: RowSlice) -> tuple[torch.Tensor, int]:
    """Return the summed loss of a row, whose documents the model reads one at a time, and its number of labels."""
    losses, start = [], 0
    for length in row.document_lengths:
        ids, labels = (torch.from_numpy(one[start : start + length])[None] for one in (row.input_ids, row.labels))
        logits = model(input_ids=ids).logits
        losses.append(functional.cross_entropy(logits[0], labels[0], ignore_index=IGNORE_INDEX, reduction="sum"))
        start += length
    return torch.stack(losses).sum(), int((row.labels != IGNORE_INDEX).sum())


def plain_steps(
    config: Any, plan: Plan, readers: tuple[RowReader, RowReader]
) -> tuple[list[Any], dict[int, float], Any]:
    """Train a plain loop on the run's rows; return loss and norm of each step, evaluations by step, and the model."""
    fields = {name: value for name, value in config.model.config.items() if name != "model_type"}
    kind = config.model.config["model_type"]
    described = AutoConfig.for_model(kind, **fields)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(described, name):
            setattr(described, name, 0.0)
    model = AutoModelForMaskedLM.from_config(described)
    model.load_state_dict(build_model(config, None).state_dict())
    optimizer = plain_optimizer(model)

    def evaluated() -> float:
        with torch.no_grad():
            rows = [readers[1].read("evaluation", row, 0, 1) for row in range(plan.evaluation.num_rows)]
            sums, counts = zip(*(masked_sums(model, row) for row in rows), strict=True)
        return float(torch.stack(sums).sum()) / sum(counts)

    evaluations, steps = {0: evaluated()}, []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        rows = [readers[0].read("train", row, 0, 1) for row in plan.step_rows(step)]
        sums, counts = zip(*(masked_sums(model, row) for row in rows), strict=True)
        loss = torch.stack(sums).sum() / sum(counts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_of_step(stage_at(config, plan, step - 1), step)
        optimizer.step()
        steps.append((float(loss), float(norm)))
        if step % 3 == 0:
            evaluations[step] = evaluated()
    return steps, evaluations, model.eval()


@pytest.mark.parametrize(
    ("kind", "unit"), [("bert", "token"), ("modernbert", "word"), pytest.param("bert", "span", marks=pytest.mark.slow)]
)
def test_a_run_is_a_plain_loop_over_masked_documents(tmp_path: Path, kind: str, unit: str) -> None:
    tokenizer = mask_tokenizer(tmp_path / "tokenizer")
    path = corpus_of(tmp_path / "texts", tokenizer)
    settings = settings_of(kind, objective__mask_unit=unit)
    wide = {"cluster__workers": 4, "parallel__sp_size": 2, "memory__zero_stage": 3, "memory__loss_tile": 16}
    assert train(make_config(tmp_path, path, run__stop_step=3, **settings, **wide), "first") == ("finished", 3)
    # No node needs the tokenizer once the run has begun.
    (tokenizer / "tokenizer.json").rename(tokenizer / "moved.json")
    narrow = {"cluster__workers": 2, "parallel__sp_size": 2, "parallel__ring_size": 2, "memory__zero_stage": 1}
    config = make_config(tmp_path, path, run__stop_step=STEPS, **settings, **narrow)
    assert train(config, "second") == ("finished", STEPS)
    assert verify_run(config.run_dir).holds

    plan = load_plan(config.run_dir / "plan")
    readers = open_rows(config, plan)
    masking = read_masking(config.run_dir)
    assert masking is not None and masking.unit == unit and (masking.word_starts is not None)
    steps, evaluations, model = plain_steps(config, plan, readers)
    for ours, (loss, norm) in zip(read_history(config.run_dir).steps, steps, strict=True):
        assert ours.loss == pytest.approx(loss, rel=1e-5), ours.step
        assert ours.grad_norm == pytest.approx(norm, rel=1e-4), ours.step
        assert ours.tokens == plan.step_tokens(ours.step), "the plan counts the tokens of documents"
    for event in (one for one in read_events(config.run_dir) if isinstance(one, Evaluated)):
        assert event.loss == pytest.approx(evaluations[event.step], rel=1e-5), event.step
    assert evaluations[0] == pytest.approx(math.log(200), rel=0.1), "an untrained model knows nothing"
    # The tokenizer is copied into the export.
    (tokenizer / "moved.json").rename(tokenizer / "tokenizer.json")
    check_evaluation_and_export(config.run_dir, model)


def check_evaluation_and_export(run_dir: Path, model: Any) -> None:
    """Check that `evaluate` and `export` agree with the plain model."""
    request = EvaluationRequest(model=run_dir, is_run=True, tasks=("loss",), lengths=(256,), max_tokens=10**6)
    prepared = prepare_evaluation(request)
    found, total, tokens = evaluate_locally(prepared, print).position_loss, 0.0, 0
    held = prepared.held
    assert found is not None and held.masking is not None
    for place in range(held.numbers.size):
        passage = held.passage(place, 0, int(min(held.lengths[place], 256)), first_scored=0)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(passage.masked_tokens)[None]).logits[0]
        losses = functional.cross_entropy(logits, torch.from_numpy(passage.tokens), reduction="none")
        total += float(losses[torch.from_numpy(passage.is_scored)].sum())
        tokens += int(passage.is_scored.sum())
    assert (found.tokens, found.loss_sum) == (tokens, pytest.approx(total, rel=1e-4))
    assert run(app, ["export", str(run_dir)]) == 0
    out = run_dir / "export" / f"step-{STEPS:08}"
    assert "pipeline_tag: fill-mask" in (out / "README.md").read_text()
    exported, ids = AutoModelForMaskedLM.from_pretrained(out).eval(), torch.arange(5, 60)[None]
    assert AutoTokenizer.from_pretrained(out).mask_token == "[MASK]"
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-3, atol=1e-4)
    again = prepare_evaluation(replace(request, model=out, is_run=False, data=held.corpora.corpora[0].path))
    assert again.held.masking is not None and again.held.masking.word_starts is not None


def test_a_run_that_has_not_begun_leaves_no_masks_behind(tmp_path: Path) -> None:
    path = corpus_of(tmp_path / "texts", mask_tokenizer(tmp_path / "tokenizer"))
    config = make_config(tmp_path, path, run__stop_step=1, **settings_of("bert"))
    claim_directory(prepare_run(config, Path("/")))
    assert read_masking(config.run_dir) is not None
    config = make_config(tmp_path, path, run__stop_step=1, data__rows_per_step=4)
    claim_directory(prepare_run(config, Path("/")))
    assert read_masking(config.run_dir) is None


def test_a_step_without_a_token_to_predict_has_no_loss(tmp_path: Path) -> None:
    tokenizer = mask_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    # The vocabulary has no accents, so all tokens are unknown.
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text("é " * 60 + "è " * number)
    request = PrepareRequest(
        sources=SourceSpec(paths=(str(tmp_path / "texts"),)), out=tmp_path / "corpus", tokenizer=str(tokenizer)
    )
    prepare_local(request)
    changes = {"data__rows_per_step": 2, "data__eval_fraction": 0.3, "data__eval_rows": 1}
    few = {"cluster__workers": 1, "parallel__sp_size": 1, "run__stop_step": 1, "run__eval_every_steps": 1}
    config = make_config(tmp_path, tmp_path / "corpus", **settings_of("bert", **changes, **few))
    assert train(config, "first") == ("finished", 1)
    (step,) = read_history(config.run_dir).steps
    assert (step.loss, step.grad_norm) == (0.0, 0.0)


def test_what_masks_need_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    without = corpus_of(tmp_path / "without", mask_tokenizer(tmp_path / "plain", has_mask=False))
    config = make_config(tmp_path, without, run__stop_step=3, **settings_of("bert"))
    (problem,) = prepare_run(config, Path("/")).report.problems
    assert problem.path == "data.path" and "mask token" in problem.rule
    small = {**ENCODERS["bert"], "vocab_size": 150}
    path = corpus_of(tmp_path / "texts", mask_tokenizer(tmp_path / "tokenizer"))
    config = make_config(tmp_path, path, run__stop_step=3, **settings_of("bert", model__config=small))
    problems = prepare_run(config, Path("/")).report.problems
    assert problems and all("vocab" in str(one) for one in problems)
