"""The settings, corpora and tokenizers with which a run may start and resume."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.config import load_config
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.planner.report import PlanReport
from ray_ulysses.run.preflight import PreparedRun, check_resume, claim_directory, prepare_run, report_run
from ray_ulysses.storage.place import UnnamedServerError
from tests.distributed.run_case import claim_run, make_config, make_corpus
from tests.local_preparation import prepare_local
from tests.unit.attention.models import zoo_model
from tests.unit.data.corpora import text_corpus, varied_texts, write_texts
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer
from tests.unit.engine.quantized_checkpoints import write_checkpoint
from tests.unit.foreign_servers import ForeignRun


def test_a_run_goes_on_with_every_split_that_its_rows_allow(tmp_path: Path, stdlib: Path) -> None:

    def prepared(sp_size: int, ring_size: int | None = None) -> PreparedRun:
        split = {"parallel__sp_size": sp_size, "parallel__ring_size": ring_size, "cluster__workers": sp_size}
        return prepare_run(make_config(tmp_path / "runs", stdlib, **split), Path("/"))

    first = prepared(3)
    assert first.plan.settings.pad_multiple == 12
    claim_run(first)
    # Three ranks of four heads, a ring of 6 = 2 x 3, and back again: the run's rows are the ones it began with.
    for sp_size, ring_size in ((2, 2), (6, 6), (3, None)):
        again = prepared(sp_size, ring_size)
        assert again.plan.plan_id == first.plan.plan_id
        check_resume(again)
        claim_run(again)
    for sp_size, ring_size, words in ((5, None, r"parallel\.sp_size=5.* use 1, 2, 3, 4, 6 to"), (4, 2, "ring_size=2")):
        with pytest.raises(UserError, match=words):
            prepared(sp_size, ring_size).report.raise_problems()


def test_all_contradictions_of_a_resume_come_at_once_beside_the_plans_own_problems(
    tmp_path: Path, stdlib: Path
) -> None:
    claim_run(prepare_run(make_config(tmp_path / "runs", stdlib), Path("/")))
    model = {**(make_config(tmp_path, stdlib).model.config or {}), "hidden_size": 128, "vocab_size": 100}
    workers = {"parallel__sp_size": 3, "cluster__workers": 3}
    changes = {"run__seed": 7, "model__config": model, "data__context_tokens": 96, "run__stop_step": 10**6, **workers}
    found = prepare_run(make_config(tmp_path / "runs", stdlib, **changes), Path("/")).report.problems
    paths = "data.context_tokens run.seed model.config parallel.sp_size data.path run.stop_step"
    assert " ".join(problem.path for problem in found) == paths
    assert "vocab_size: 100, the run has 264" in str(found[2])
    # An error that leaves no plan to be made.
    with pytest.raises(ConfigError) as caught:
        prepare_run(make_config(tmp_path / "runs", tmp_path / "nothing", run__seed=7), Path("/"))
    assert [problem.path for problem in caught.value.problems] == ["data.path", "run.seed"]


def test_documents_beyond_a_learned_table_of_positions_are_refused_before_a_worker_starts(
    tmp_path: Path, stdlib: Path
) -> None:
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0)

    def problems(num_positions: int, **data: Any) -> list[str]:
        model = {
            "model_type": "gpt2", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "n_positions": num_positions, "bos_token_id": 0,
            "eos_token_id": 0, **no_dropout,
        }  # fmt: skip
        config = make_config(tmp_path / "runs", stdlib, model__config=model, run__stop_step=2, **data)
        report = prepare_run(config, Path("/")).report
        return [str(problem) for problem in report.problems]

    assert problems(256) == []
    (said,) = problems(200)
    assert said.startswith("data.context_tokens=256: ") and "at most 200" in said
    # A document that no row is made of does not count.
    (tmp_path / "some").mkdir()
    for number in range(40):
        (tmp_path / f"some/{number}.txt").write_text(f"{number} words " * (12 if number else 120))
    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / "some"),)), out=tmp_path / "some-corpus"))
    mixed = [{"path": str(tmp_path / "some-corpus"), "weight": 1.0}, {"path": str(stdlib), "weight": 0.0}]
    assert len(problems(200, data__path=None, data__sources=mixed)) == 1
    assert problems(200, data__path=None, data__sources=mixed, data__overlong="drop") == []


def test_corpora_that_share_documents_are_refused_and_prepared_apart_they_are_not(tmp_path: Path, stdlib: Path) -> None:
    # Copied files: only their content shows that the first corpus contains them.
    copies = tmp_path / "copies"
    copies.mkdir()
    for number, text in enumerate([Path(os.__file__).parent.joinpath("cmd.py").read_text(), "text of its own"]):
        (copies / f"{number}.py").write_text(text)
    request = PrepareRequest(sources=SourceSpec(paths=(str(copies),)), out=tmp_path / "second")
    prepare_local(request)

    def prepared(second: Path) -> PreparedRun:
        sources = [{"path": str(path)} for path in (stdlib, second)]
        return prepare_run(make_config(tmp_path / "runs", stdlib, data__path=None, data__sources=sources), Path("/"))

    with pytest.raises(UserError, match=r"second repeats 1 documents of .*copies/0\.py, also in"):
        prepared(tmp_path / "second")
    assert prepare_local(replace(request, out=tmp_path / "apart", without=(str(stdlib),))).num_documents == 1
    assert [source.num_documents for source in prepared(tmp_path / "apart").plan.newest.sources] == [8, 1]


def test_clear_text_credentials_and_a_jobs_relative_paths_fail(
    tmp_path: Path, stdlib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = {"tracking__enabled": True, "tracking__uri": "http://mlflow:5000"}

    def problems(**changes: object) -> list[str]:
        config = make_config(Path("runs"), stdlib, **tracked, **changes)
        return [problem.path for problem in prepare_run(config, tmp_path).report.problems]

    assert problems() == []
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    assert problems() == ["tracking.uri"]
    assert problems(tracking__allow_http=True) == []
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(ConfigError, match=rf"run\.storage='runs': .*write {tmp_path}/runs"):
        prepare_run(make_config(Path("runs"), stdlib), tmp_path).report.raise_problems()


def test_a_corpus_of_the_stored_plan_is_not_asked_for_on_a_server_that_only_the_plan_names(tmp_path: Path) -> None:
    first, second = make_corpus(tmp_path / "a", ("bisect.py",)), make_corpus(tmp_path / "b", ("cmd.py", "pdb.py"))
    config = make_config(tmp_path / "runs", first)
    claim_run(prepare_run(config, Path("/")))
    ForeignRun(tmp_path / "runs" / config.run.name).move_corpus(
        "s3://bucket/a?endpoint_override=127.0.0.1:9&scheme=http"
    )
    # The corpus of that fingerprint is at the configured path.
    check_resume(prepare_run(config, Path("/")))
    with pytest.raises(UnnamedServerError, match=r"data\.sources"):
        prepare_run(make_config(tmp_path / "runs", second), Path("/"), branch=True)


@pytest.mark.parametrize("checkpoints", [None, "elsewhere"])
def test_settings_and_plan_of_a_start_without_an_attempt_are_replaced(
    checkpoints: str | None, tmp_path: Path, stdlib: Path
) -> None:
    elsewhere = {} if checkpoints is None else {"checkpoint__storage": str(tmp_path / checkpoints)}

    def prepared(**changes: object) -> PreparedRun:
        found = prepare_run(make_config(tmp_path / "runs", stdlib, **{**elsewhere, **changes}), Path("/"))
        found.report.raise_problems()
        check_resume(found)
        return found

    changes = {"run__seed": 7, "data__context_tokens": 96, "parallel__sp_size": 4, "cluster__workers": 4}
    claim_directory(prepared())
    corrected = prepared(**changes)
    claim_directory(corrected)
    run_dir = corrected.config.run_dir
    assert load_config(run_dir / "config.yaml").run.seed == 7
    assert [one.plan_id for one in load_plan(run_dir / "plan").segments] == [corrected.plan.plan_id]
    # From the first attempt on they are fixed, wherever the new configuration looks for checkpoints.
    claim_attempt(corrected.run.store, 1)
    assert prepared(**changes).plan.plan_id == corrected.plan.plan_id
    for other in ({}, {"checkpoint__storage": str(tmp_path / "third")}):
        with pytest.raises(UserError, match=r"run\.seed"):
            prepared(**other)


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
    trained = {"model__path": str(model), "model__init": init, "model__config": None, "model__rope": "unchanged"}
    small = {"run__stop_step": 1, "parallel__sp_size": 1, "cluster__workers": 1}
    return prepare_run(make_config(model.parent / "runs", corpus, **trained, **small, **changes), Path("/")).report


def of_tokenizer(texts: tuple[str, ...]) -> list[str]:
    return [text for text in texts if "tokenizer" in text]


def test_pretrained_weights_are_not_trained_on_ids_of_another_tokenizer(model: Path, corpus: Path) -> None:
    fast_tokenizer(model)
    (problem,) = report_of(model, corpus).problems
    assert (problem.path, problem.value) == ("data.path", str(corpus))
    assert "prepared with the tokenizer bytes" in problem.rule and "have different texts" in problem.rule
    assert f"--tokenizer {model}" in problem.hint and "data.allow_other_tokenizer: true" in problem.hint
    for report in (report_of(model, corpus, data__allow_other_tokenizer=True), report_of(model, corpus, "random")):
        assert report.problems == () and len(of_tokenizer(report.notes)) == 1


def test_the_models_own_tokenizer_passes_and_none_is_noted(model: Path, corpus: Path, tmp_path: Path) -> None:
    prepared_with = fast_tokenizer(tmp_path / "tokenizer")
    sources = SourceSpec(paths=(str(write_texts(tmp_path / "texts", varied_texts(60))),))
    own = prepare_local(PrepareRequest(sources=sources, out=tmp_path / "own", tokenizer=str(prepared_with))).path
    # The tokenizer's directory is no longer needed.
    (prepared_with / "tokenizer.json").unlink()
    fast_tokenizer(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}))
    report = report_of(model, own)
    assert report.problems == () and of_tokenizer(report.notes) == []
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    report = report_of(bare, corpus)
    (note,) = of_tokenizer(report.notes)
    assert report.problems == () and "can't compare the corpus's tokenizer" in note


def test_a_quantized_checkpoint_is_named_in_the_plan_and_refused_for_a_part_of_a_model(
    corpus: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "base", "qwen3-fp8")
    report = report_of(tmp_path / "base", corpus)
    assert report.to_json()["source_format"] == "FP8, a scale per block of 16 x 16"
    model = {"model__path": str(tmp_path / "base"), "model__init": "pretrained", "model__config": None}
    config = make_config(tmp_path, corpus, **model)
    assert report_run(config, tmp_path, synthetic=True).source_format == report.source_format
    write_checkpoint(tmp_path / "whole", "qwen3_vl-fp8")
    with pytest.raises(UserError, match=r"model\.path=.*whole.*quantized, and model\.part=text .* dequantize"):
        report_of(tmp_path / "whole", corpus, model__part="text")


def test_validation_is_refused_with_the_other_problems_and_only_a_branch_changes_it(
    tmp_path: Path, stdlib: Path
) -> None:
    other = str(make_corpus(tmp_path / "other", ("queue.py",)))

    def prepared(*validation: str, **changes: Any) -> PreparedRun:
        settings = {"data__validation": list(validation), "run__eval_every_steps": 5, **changes}
        return prepare_run(make_config(tmp_path / "runs", stdlib, **settings), Path("/"))

    first = prepared(other)
    assert [one.path for one in first.plan.evaluation_sets] == [other] and not first.report.problems
    claim_run(first)
    assert prepared(other).new == ()
    with pytest.raises(ConfigError, match=r"(?s)run.seed=7.*data.validation: .* is the same corpus as"):
        prepared(str(stdlib), run__seed=7)
    moved = str(shutil.copytree(other, tmp_path / "moved"))
    paths = [problem.path for problem in prepared(moved, data__eval_rows=1).report.problems]
    assert paths == ["data.validation", "data.eval_rows"]
    model = {**(make_config(tmp_path, stdlib).model.config or {}), "vocab_size": 100}
    problems = prepared(other, model__config=model).report.problems
    assert {"data.path", "data.validation"} <= {problem.path for problem in problems}
