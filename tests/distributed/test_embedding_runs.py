"""A run on pairs of texts: each step is that of a plain loop whose negatives are all positives of the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.model import build_model
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.reference import ReferenceRequest, prepare_reference
from ray_ulysses.inspect.verification import verify_run
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.run_case import make_config, make_corpus, train
from tests.distributed.test_plain_loop import plain_optimizer
from tests.local_preparation import prepare_local
from tests.unit.tracking.journals import read_events

STEPS, CONTEXT, TEMPERATURE = 6, 192, 0.2


def corpus_of_pairs(folder: Path) -> Path:
    """Prepare pairs of random bytes; some are as long as a row, some a token longer, and some much longer."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(120):
        # With two end tokens.
        whole = {7: CONTEXT - 2, 8: CONTEXT - 1, 9: 300}.get(number % 10, int(rng.integers(8, 100)))
        texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in (whole // 3, whole - whole // 3)]
        rows.append(dict(zip(("anchor", "match"), texts, strict=True)))
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = RowFields(query="anchor", positive="match")
    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(path),), fields=fields), out=folder / "corpus"))
    return folder / "corpus"


def settings_of(**changes: Any) -> dict[str, Any]:
    return {
        "objective__kind": "embedding", "objective__temperature": TEMPERATURE, "data__context_tokens": CONTEXT,
        "data__rows_per_step": 4, "data__overlong": "drop", "data__eval_fraction": 0.2, "data__eval_rows": 3,
        "run__eval_every_steps": 3, "checkpoint__every_steps": 1, "optimizer__lr": 3e-3, **changes,
    }  # fmt: skip


def test_a_run_is_a_plain_loop_over_pairs(tmp_path: Path) -> None:
    path, base = corpus_of_pairs(tmp_path / "pairs"), tmp_path / "base"
    # A decoder with an output head, which the run does not need.
    described = dict(make_config(tmp_path, path).model.config or {})
    fields = {name: value for name, value in described.items() if name != "model_type"}
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).save_pretrained(base)
    start = {"model__init": "pretrained", "model__path": str(base)}
    # Two micro-batches for each rank, then one; rows of a step belong to two replicas, then to one.
    wide = {"cluster__workers": 4, "parallel__sp_size": 2, "memory__zero_stage": 3, **start}
    config = make_config(tmp_path, path, **settings_of(run__stop_step=3, **wide))
    assert train(config, "first") == ("finished", 3)
    narrow = {"cluster__workers": 2, "parallel__sp_size": 2, "parallel__ring_size": 2, "memory__zero_stage": 1, **start}
    config = make_config(tmp_path, path, **settings_of(run__stop_step=STEPS, **narrow))
    assert train(config, "second") == ("finished", STEPS)
    assert verify_run(config.run_dir).holds

    plan, corpus = load_plan(config.run_dir / "plan"), Corpus.open(path)
    assert corpus.info.are_queries
    # Of 12 pairs of each of these lengths, those of a row's length fit.
    assert plan.newest.totals.dropped_documents >= 2 * 12 * 0.5
    model: Any = AutoModel.from_config(AutoConfig.for_model("llama", **fields))
    stored = AutoModel.from_pretrained(base).state_dict()
    built = build_model(config, None).state_dict()
    assert built.keys() == stored.keys() and all(torch.equal(built[name], stored[name]) for name in stored)
    model.load_state_dict(stored)
    optimizer, longest = plain_optimizer(model), 0

    def vector(document: int, first: int, stop: int) -> torch.Tensor:
        tokens = torch.from_numpy(np.asarray(corpus.read(document, first, stop - first)).astype(np.int64))
        return model(input_ids=tokens[None], use_cache=False).last_hidden_state[0].mean(0)

    def measured(rows: Any, pieces: Any) -> tuple[torch.Tensor, float]:
        nonlocal longest
        queries, positives = [], []
        for piece in (piece for row in rows for piece in pieces(row)):
            length = int(corpus.lengths[piece.document])
            assert (piece.start, piece.length, piece.has_next_label) == (0, length, False), "a pair is whole"
            longest, border = max(longest, length), int(corpus.borders[piece.document])
            assert border == (length - 2) // 3 + 1
            queries.append(vector(piece.document, 0, border))
            positives.append(vector(piece.document, border, length))
        similarities = functional.cosine_similarity(torch.stack(queries)[:, None], torch.stack(positives)[None], dim=-1)
        own = torch.arange(len(queries))
        right = (similarities.argmax(-1) == own).double().mean()
        return functional.cross_entropy(similarities / TEMPERATURE, own), float(right)

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
        assert ours.pair_accuracy == pytest.approx(accuracy), ours.step
    for event in (one for one in read_events(config.run_dir) if isinstance(one, Evaluated)):
        assert (event.loss, event.pair_accuracy) == pytest.approx(evaluations[event.step], rel=1e-5), event.step

    for again in ([], [], ["--overwrite"]):
        assert run_cli(app, ["export", str(config.run_dir), "--dtype", "fp32", *again]) == 0
    folder = config.run_dir / f"export/step-{STEPS:08}"
    exported = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        tokens = torch.from_numpy(np.asarray(corpus.read(0, 0, 7)).astype(np.int64))[None]
        ours, theirs = exported(tokens).last_hidden_state, model(tokens).last_hidden_state
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert [one["path"] for one in json.loads((folder / "modules.json").read_text())] == ["", "1_Pooling"]
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    chosen = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    assert chosen == ["pooling_mode_mean_tokens"] and pooling["word_embedding_dimension"] == fields["hidden_size"]
    assert "pipeline_tag: sentence-similarity" in (folder / "README.md").read_text()
    assert run_cli(app, ["evaluate", str(config.run_dir)]) == 2


@pytest.mark.parametrize("kind", ["simpo", "next_token"])
def test_pairs_of_texts_are_for_embeddings_only(tmp_path: Path, kind: str) -> None:
    path = corpus_of_pairs(tmp_path / "pairs")
    settings = settings_of(objective__kind=kind, objective__temperature=0.05, run__stop_step=3)
    problems = prepare_run(make_config(tmp_path, path, **settings), Path("/")).report.problems
    assert [(one.path, one.hint) for one in problems] == [("data.path", "set objective.kind: embedding")]
    with pytest.raises(UserError, match="does not contain answers"):
        prepare_reference(ReferenceRequest(corpus=str(path), model=str(tmp_path), dtype="fp32"))


def test_embeddings_need_pairs_of_texts(tmp_path: Path) -> None:
    plain = make_corpus(tmp_path, ("bisect.py", "cmd.py"))
    config = make_config(tmp_path, plain, **settings_of(run__stop_step=1, data__context_tokens=16_384))
    problems = prepare_run(config, Path("/")).report.problems
    assert [one.path for one in problems if "--query-field" in one.hint] == ["data.path"]
