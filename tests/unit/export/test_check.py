"""The sample of the check, and its error if the model has diverged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses.engine.model_config import described_config
from ray_ulysses.errors import RunError
from ray_ulysses.evaluation.model_source import find_model
from ray_ulysses.evaluation.report import ModelRequest
from ray_ulysses.export.check import take_sample
from ray_ulysses.run.secrets_file import stored_config
from tests.breadth import fast_only
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.export.runs import (
    assert_same,
    export,
    fields_of,
    tensors_in,
    word_tokenizer,
    write_checkpoint,
    write_config,
)
from tests.unit.inspect.runs import SETTINGS, make_run


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["weights", "logits"])
def test_a_diverged_model_is_reported_as_such(tmp_path: Path, value: float) -> None:
    model = zoo_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(value)
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"]()))
    write_checkpoint(tmp_path / "run", model)
    what = "lm_head.weight" if value != value else "logits are not finite, but its weights are"
    with pytest.raises(RunError, match=what):
        export(tmp_path / "run")
    assert list((tmp_path / "run/export").iterdir()) == []


@pytest.mark.parametrize(("most", "length"), [(None, 256), (64, 64)])
def test_without_a_plan_the_sample_is_seeded_tokens(tmp_path: Path, most: int | None, length: int) -> None:
    sample = take_sample(tmp_path, 50, most)
    assert sample == take_sample(tmp_path, 50, most) and sample.origin.startswith("seeded tokens")
    assert [len(document) for document in sample.documents] == [length, length]
    assert sample.documents[0] != sample.documents[1]
    tokens = {token for document in sample.documents for token in document}
    assert tokens <= set(range(50)) and len(tokens) > 40


@pytest.mark.parametrize("damage", ["plan.json", "rows.parquet", "middle", "corpus"])
def test_seeded_tokens_replace_an_unreadable_plan_or_corpus(planned: Path, tmp_path: Path, damage: str) -> None:
    path = planned / "plan/segment-0000" / ("pieces.parquet" if damage == "middle" else damage)
    if damage == "corpus":
        (tmp_path / "data").rename(tmp_path / "away")
    elif damage == "middle":
        content = bytearray(path.read_bytes())
        # The footer stays intact, so the plan can be opened.
        content[4:60] = bytes(56)
        path.write_bytes(content)
    else:
        path.write_bytes(path.read_bytes()[:40])
    sample = take_sample(planned, 264, None)
    what = "corpus" if damage == "corpus" else "data plan"
    assert sample.origin.startswith(f"seeded tokens, since the run's {what} can't be read (")


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    corpus = text_corpus(tmp_path / "data", varied_texts(20))
    run_dir = make_run(tmp_path / "run", [corpus.path]).folder
    torch.manual_seed(0)
    write_checkpoint(run_dir, AutoModelForCausalLM.from_config(described_config(stored_config(run_dir))))
    return run_dir


def test_an_unreadable_plan_does_not_prevent_the_export(planned: Path) -> None:
    sample = take_sample(planned, 264, 16)
    assert sample.origin == "the run's first training rows"
    assert [len(document) for document in sample.documents] == [16, 16]
    whole = export(planned)
    assert whole.check is not None and whole.check.origin == "the run's first training rows"
    (planned / "plan/segment-0000/rows.parquet").write_bytes(b"PAR1")
    report = export(planned, out=planned / "export/again")
    assert report.check is not None and report.check.holds
    assert "seeded tokens, since the run's data plan can't be read" in report.check.origin
    assert report.tokenizer.startswith("none: the run's data plan can't be read")
    assert_same(tensors_in(Path(report.out)), tensors_in(Path(whole.out)))


def test_a_checkpoint_before_a_branch_has_the_context_of_its_own_steps(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path / "data", varied_texts(40))
    run = make_run(tmp_path / "run", [corpus.path])
    fields = small_tree()["model"]["config"] | {"max_position_embeddings": 64}
    write_config(
        run.folder, fields, data__path=str(corpus.path), data__context_tokens=256, model__rope={"rope_theta": 2e4}
    )
    model = AutoModelForCausalLM.from_config(described_config(stored_config(run.folder)))
    run.branch(4, replace(SETTINGS, context_tokens=256), [corpus.path])
    for step, context in ((4, 128), (5, 256)):
        write_checkpoint(run.folder, model, step=step)
        report = export(run.folder, step=step, check=False)
        assert (report.context_tokens, report.max_positions) == (context, context)
        assert json.loads((Path(report.out) / "config.json").read_text())["max_position_embeddings"] == context
        source = find_model(ModelRequest(model=run.folder, is_run=True, step=step))
        assert (source.context_tokens, source.config.data.context_tokens) == (context, context)
    for file in run.folder.glob("plan/segment-0000/plan.json"):
        file.write_text("torn")
    assert export(run.folder, step=4, out=tmp_path / "again", check=False).context_tokens == 256, (
        "the value in config.yaml"
    )


@pytest.mark.parametrize("has_corpus", fast_only([True, False], True))
def test_published_files_contain_no_local_paths(planned: Path, tmp_path: Path, has_corpus: bool) -> None:
    if not has_corpus:
        (planned / "plan/segment-0000/rows.parquet").write_bytes(b"PAR1")
    for name, tokenizer in (("run's", None), ("given", word_tokenizer(tmp_path / "words", 65))):
        report = export(planned, out=planned / "export" / name, tokenizer=tokenizer)
        for file in ("README.md", "ray_ulysses_export.json", "config.json", "generation_config.json"):
            assert str(tmp_path) not in (Path(report.out) / file).read_text(), file
        again = export(planned, out=planned / "export" / name, tokenizer=tokenizer)
        assert again.was_there and again.out == report.out
