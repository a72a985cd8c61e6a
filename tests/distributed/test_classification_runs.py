"""A run on classes of documents: each step is that of a plain loop, at every layout and after a resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.model import build_model
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.run.classes import with_classes
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.run_case import make_config, make_corpus, train
from tests.distributed.test_plain_loop import plain_optimizer
from tests.local_preparation import prepare_local
from tests.unit.tracking.journals import read_events

STEPS, CONTEXT = 6, 192
CLASSES = ("law", "news", "poem")


def labeled_corpus(folder: Path, classes: Sequence[str] = CLASSES) -> Path:
    """Prepare documents of random bytes; some are as long as a row, some a token longer, and some much longer."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(120):
        # With an end token.
        size = {7: CONTEXT - 1, 8: CONTEXT, 9: 300}.get(number % 10, int(rng.integers(3, 100)))
        text = "".join(map(chr, rng.integers(97, 123, size)))
        rows.append({"text": text, "kind": classes[int(rng.integers(len(classes)))]})
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = RowFields(text="text", label="kind")
    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(path),), fields=fields), out=folder / "corpus"))
    return folder / "corpus"


def settings_of(**changes: Any) -> dict[str, Any]:
    return {
        "objective__kind": "classification", "data__context_tokens": CONTEXT, "data__rows_per_step": 4,
        "data__overlong": "drop", "data__eval_fraction": 0.2, "data__eval_rows": 3, "run__eval_every_steps": 3,
        "checkpoint__every_steps": 1, "optimizer__lr": 3e-3, **changes,
    }  # fmt: skip


def base_embedding(base: Path) -> torch.Tensor:
    return load_file(base / "model.safetensors")["model.embed_tokens.weight"]


def test_a_run_is_a_plain_loop_over_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, base = labeled_corpus(tmp_path / "documents"), tmp_path / "base"
    # A decoder without a head for documents.
    described = dict(make_config(tmp_path, path).model.config or {})
    fields = {name: value for name, value in described.items() if name != "model_type"}
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).save_pretrained(base)
    start = {"model__init": "pretrained", "model__path": str(base)}
    wide = {"cluster__workers": 4, "parallel__sp_size": 2, "memory__zero_stage": 3, **start}
    config = with_classes(make_config(tmp_path, path, **settings_of(run__stop_step=3, **wide)), None)
    assert train(config, "first") == ("finished", 3)
    narrow = {"cluster__workers": 2, "parallel__sp_size": 2, "parallel__ring_size": 2, "memory__zero_stage": 1, **start}
    config = with_classes(make_config(tmp_path, path, **settings_of(run__stop_step=STEPS, **narrow)), None)
    assert train(config, "second") == ("finished", STEPS)
    assert verify_run(config.run_dir).holds

    plan, corpus = load_plan(config.run_dir / "plan"), Corpus.open(path)
    assert config.objective.classes == corpus.info.classes == CLASSES
    # Of 12 documents of each of these lengths, those of a row's length fit.
    assert plan.newest.totals.dropped_documents >= 2 * 12 * 0.5
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", num_labels=3, **fields))
    built = build_model(config, None)
    assert torch.equal(built.state_dict()["model.embed_tokens.weight"], base_embedding(base))
    assert 0.5 < float(built.get_parameter("score.weight").std()) / built.config.initializer_range < 2
    assert built.config.id2label == dict(enumerate(CLASSES)) and built.config.label2id["poem"] == 2
    model.load_state_dict(built.state_dict())
    optimizer, longest = plain_optimizer(model), 0

    def documents(pieces: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and classes of a row's documents."""
        nonlocal longest
        logits, classes = [], []
        for piece in pieces:
            length = int(corpus.lengths[piece.document])
            assert (piece.start, piece.length, piece.has_next_label) == (0, length, False), "a document is whole"
            longest = max(longest, length)
            tokens = torch.from_numpy(np.asarray(corpus.read(piece.document, 0, length)).astype(np.int64))
            logits.append(model(input_ids=tokens[None], use_cache=False).logits[0])
            classes.append(int(corpus.labels[piece.document]))
        return torch.stack(logits), torch.tensor(classes)

    def measured(rows: Any, pieces: Any) -> tuple[torch.Tensor, float]:
        logits, classes = (torch.cat(one) for one in zip(*(documents(pieces(row)) for row in rows), strict=True))
        right = (logits.argmax(-1) == classes).double().mean()
        return functional.cross_entropy(logits, classes), float(right)

    def evaluated() -> tuple[float, float]:
        with torch.no_grad():
            loss, accuracy = measured(range(plan.evaluation.num_rows), plan.evaluation.pieces)
        return float(loss), accuracy

    evaluations, steps = {0: evaluated()}, []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss, accuracy = measured(plan.step_rows(step), plan.pieces)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_of_step(stage_at(config, plan, step - 1), step)
        optimizer.step()
        steps.append((float(loss), float(norm), accuracy))
        if step % 3 == 0:
            evaluations[step] = evaluated()
    assert longest == CONTEXT
    for ours, (loss, norm, accuracy) in zip(read_history(config.run_dir).steps, steps, strict=True):
        assert ours.loss == pytest.approx(loss, rel=1e-5), ours.step
        assert ours.grad_norm == pytest.approx(norm, rel=1e-4), ours.step
        assert ours.accuracy == pytest.approx(accuracy), ours.step
    for event in (one for one in read_events(config.run_dir) if isinstance(one, Evaluated)):
        assert (event.loss, event.accuracy) == pytest.approx(evaluations[event.step], rel=1e-5), event.step
        assert event.pair_accuracy is None

    code = run_cli(app, ["export", str(config.run_dir), "--dtype", "fp32"])
    assert code == 0
    exported = AutoModelForSequenceClassification.from_pretrained(config.run_dir / f"export/step-{STEPS:08}")
    assert exported.config.id2label == dict(enumerate(CLASSES))
    with torch.no_grad():
        tokens = torch.from_numpy(np.asarray(corpus.read(0, 0, 20)).astype(np.int64))[None]
        torch.testing.assert_close(exported(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
    assert "pipeline_tag: text-classification" in (Path(exported.name_or_path) / "README.md").read_text()

    capsys.readouterr()
    assert run_cli(app, ["evaluate", str(config.run_dir), "--sp-size", "2", "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["classes"]
    confusion, losses = np.zeros((3, 3), dtype=int), []
    for number in np.flatnonzero(plan.held_out() & (corpus.lengths <= CONTEXT)):
        tokens = torch.from_numpy(np.asarray(corpus.read(number, 0, int(corpus.lengths[number]))).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        own = int(corpus.labels[number])
        confusion[own, int(logits.argmax())] += 1
        losses.append(float(functional.cross_entropy(logits, torch.tensor(own))))
    assert found["confusion"] == confusion.tolist() and confusion.trace() > 0
    assert found["loss_sum"] == pytest.approx(sum(losses), rel=1e-4)
    assert found["accuracy"] == pytest.approx(confusion.trace() / confusion.sum())
    assert found["scores"][1]["recall"] == pytest.approx(confusion[1, 1] / confusion[1].sum())
    assert run_cli(app, ["evaluate", str(config.run_dir), "--task", "retrieval"]) == 2


@pytest.mark.parametrize(
    ("settings", "path", "rule"),
    [
        ({"objective__classes": ["law", "news"]}, "data.path", "the class 'poem'"),
        ({"objective__kind": "simpo"}, "data.path", "pairs of answers"),
    ],
)
def test_corpora_that_do_not_suit_are_refused(tmp_path: Path, settings: dict[str, Any], path: str, rule: str) -> None:
    config = make_config(tmp_path, labeled_corpus(tmp_path / "documents"), **settings_of(run__stop_step=3, **settings))
    (problem,) = prepare_run(config, Path("/")).report.problems
    assert problem.path == path and rule in problem.rule


def test_documents_without_classes_are_refused_and_classes_may_be_ignored(tmp_path: Path) -> None:
    plain = make_corpus(tmp_path, ("bisect.py", "cmd.py"))
    config = make_config(tmp_path, plain, **settings_of(run__stop_step=1, data__context_tokens=16_384))
    problems = prepare_run(config, Path("/")).report.problems
    assert [one.path for one in problems if "--label-field" in one.hint] == ["data.path"]
    config = make_config(tmp_path, labeled_corpus(tmp_path / "documents"), run__stop_step=3)
    assert prepare_run(config, Path("/")).report.problems == ()
