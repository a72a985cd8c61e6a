"""A corpus of another tokenizer than the model's: refused for pretrained weights, noted for random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.planner.report import PlanReport
from ray_ulysses.run.preflight import prepare_run
from tests.distributed.run_case import make_config
from tests.local_preparation import prepare_local
from tests.unit.attention.models import zoo_model
from tests.unit.data.corpora import text_corpus, varied_texts, write_texts
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has weights for the ids of either tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "llama"
    zoo_model("llama", vocab_size=320).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("corpus"), varied_texts(60)).path


def report_of(model: Path, corpus: Path, init: str = "pretrained", **changes: Any) -> PlanReport:
    config = make_config(
        model.parent / "runs",
        corpus,
        model__path=str(model),
        model__init=init,
        model__config=None,
        model__rope="unchanged",
        run__stop_step=1,
        parallel__sp_size=1,
        cluster__workers=1,
        **changes,
    )
    return prepare_run(config, Path("/")).report


def of_tokenizer(texts: tuple[str, ...]) -> list[str]:
    return [text for text in texts if "tokenizer" in text]


def test_pretrained_weights_are_not_trained_on_ids_of_another_tokenizer(model: Path, corpus: Path) -> None:
    fast_tokenizer(model)
    report = report_of(model, corpus)
    (problem,) = report.problems
    assert (problem.path, problem.value) == ("data.path", str(corpus))
    assert "prepared with the tokenizer bytes" in problem.rule and "stand for other texts" in problem.rule
    assert f"--tokenizer {model}" in problem.hint and "data.allow_other_tokenizer: true" in problem.hint
    allowed = report_of(model, corpus, data__allow_other_tokenizer=True)
    assert allowed.problems == () and len(of_tokenizer(allowed.notes)) == 1
    random = report_of(model, corpus, "random")
    assert random.problems == () and of_tokenizer(random.notes) == of_tokenizer(allowed.notes)


def test_the_models_own_tokenizer_is_neither_a_problem_nor_a_note(model: Path, tmp_path: Path) -> None:
    prepared_with = fast_tokenizer(tmp_path / "tokenizer")
    sources = SourceSpec(paths=(str(write_texts(tmp_path / "texts", varied_texts(60))),))
    own = prepare_local(PrepareRequest(sources=sources, out=tmp_path / "own", tokenizer=str(prepared_with))).path
    # The tokenizer's directory is not needed any more.
    (prepared_with / "tokenizer.json").unlink()
    fast_tokenizer(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}))
    report = report_of(model, own)
    assert report.problems == () and of_tokenizer(report.notes) == []


def test_a_model_directory_without_a_tokenizer_is_noted(corpus: Path, tmp_path: Path) -> None:
    zoo_model("llama", vocab_size=320).save_pretrained(tmp_path / "bare")
    report = report_of(tmp_path / "bare", corpus)
    assert report.problems == ()
    (note,) = of_tokenizer(report.notes)
    assert "could not be compared" in note
