"""``ray-ulysses evaluate`` of a run and of its export is the same, and what it can't do is refused with a way out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from ray_ulysses.cli import app, run
from ray_ulysses.commands.evaluate import parse_lengths
from ray_ulysses.config.loading import load_config, parse_config
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.model import build_model
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.evaluate import default_lengths, prepare_evaluation
from ray_ulysses.evaluation.report import EvaluationReport, EvaluationRequest, PositionBin, PositionLoss
from ray_ulysses.report.page import render_report
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.storage.retry import StorageAwayError
from tests.local_preparation import prepare_local
from tests.s3_server import S3Server
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts, write_texts
from tests.unit.evaluation.test_retrieval import merging_tokenizer
from tests.unit.export.runs import fields_of, word_tokenizer, write_checkpoint, write_config
from tests.unit.export.test_adapters import make_run as make_adapted
from tests.unit.inspect.runs import SETTINGS, make_run

VOCAB = 320
SMALL = ("--lengths", "900", "--depths", "2", "--cases", "1", "--max-tokens", "3000", "--json")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("held"), varied_texts(10, longest=2500)).path


def make_trained(run_dir: Path, architecture: str = "llama", dtype: str = "fp32", **changes: Any) -> None:
    """Write a run of a model that reads bytes, with a checkpoint."""
    model = zoo_model(architecture, vocab_size=VOCAB)
    write_config(run_dir, fields_of(ARCHITECTURES[architecture](vocab_size=VOCAB)), dtype, **changes)
    write_checkpoint(run_dir, model, dtype=dtype)


class Told:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        assert run(app, ["evaluate", *map(str, arguments)]) == code
        captured = self._capsys.readouterr()
        return captured.err.strip() if code else captured.out

    def json(self, *arguments: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self(*arguments))
        return found


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return Told(capsys)


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("gemma2", "fp32"), pytest.param("qwen3", "bf16", marks=pytest.mark.slow)]
)
def test_a_run_and_its_exports_give_the_same_numbers(
    told: Told, corpus: Path, tmp_path: Path, architecture: str, dtype: str
) -> None:
    make_trained(tmp_path / "run", architecture, dtype)
    assert run(app, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--no-check"]) == 0
    told._capsys.readouterr()
    ours = told.json(tmp_path / "run", "--data", corpus, *SMALL)
    theirs = told.json(tmp_path / "hf", "--data", corpus, *SMALL, "--out", tmp_path / "out")
    assert (ours["step"], theirs["step"], ours["dtype"], theirs["dtype"]) == (4, None, dtype, dtype)
    for name in ("position_loss", "context_gain", "retrieval"):
        assert ours[name] == theirs[name], name
    written = tmp_path / "run/evaluation/step-00000004"
    assert json.loads((written / "evaluation.json").read_text()) == ours
    ElementTree.parse(written / "retrieval.svg")
    bins = ours["position_loss"]["bins"]
    assert sum(one["tokens"] for one in bins) == ours["position_loss"]["tokens"]
    assert sum(one["loss_sum"] for one in bins) == pytest.approx(ours["position_loss"]["loss_sum"], rel=1e-12)
    assert len(ours["retrieval"]) == 3 * 1 * 2


def test_a_bf16_run_is_evaluated_in_fp32_from_its_master_weights(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run", "llama", "bf16")
    make_trained(tmp_path / "masters", "llama", "fp32")
    options = ("--data", corpus, "--task", "loss", *SMALL)
    upcast = told.json(tmp_path / "run", *options, "--dtype", "fp32")
    assert upcast["position_loss"] == told.json(tmp_path / "masters", *options)["position_loss"]
    assert upcast["position_loss"] != told.json(tmp_path / "run", *options)["position_loss"]


def test_a_runs_own_documents_are_those_held_out_and_training_text_is_said(
    told: Told, corpus: Path, tmp_path: Path
) -> None:
    for name, fraction in (("without", 0.0), ("with", 0.4)):
        planned = make_run(
            tmp_path / name, [corpus], replace(SETTINGS, context_tokens=1024, eval_fraction=fraction, eval_rows=100)
        )
        assert planned.plan.evaluation.num_rows == 0 or fraction
        make_trained(tmp_path / name, data__path=str(corpus))
    options = (*SMALL, "--max-tokens", "99999")
    trained = told.json(tmp_path / "without", *options)
    assert trained["is_training_text"] and trained["data"].startswith("the run's own training text")
    assert any(note.startswith("the losses are of training text") for note in trained["notes"])
    held = told.json(tmp_path / "with", *options)
    assert not held["is_training_text"] and "held out" in held["data"] and held["notes"] == []
    assert held["position_loss"]["documents"] < trained["position_loss"]["documents"] == 10
    given = told.json(tmp_path / "without", "--data", corpus, *SMALL)
    assert given["is_training_text"] and given["data"].endswith("which the run was trained on")


def test_documents_are_read_from_an_object_store_and_results_written_there(
    told: Told, corpus: Path, tmp_path: Path, s3: S3Server, prefix: str
) -> None:
    make_trained(tmp_path / "run")
    there, out = (s3.uri(f"{prefix}/{name}") for name in ("corpus", "results"))
    for path in corpus.rglob("*"):
        if path.is_file():
            open_store(there).create(path.relative_to(corpus).as_posix(), [path.read_bytes()])
    found = told.json(tmp_path / "run", "--data", there, "--task", "loss", *SMALL, "--out", out)
    assert json.loads(open_store(out).read_whole("evaluation.json")) == found
    here = told.json(tmp_path / "run", "--data", corpus, "--task", "loss", *SMALL)
    assert found["position_loss"] == here["position_loss"]
    assert (tmp_path / "run/evaluation").exists() and found["data"] == f"all documents of {place_of(there)}"


def test_the_table_names_what_was_measured(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    text = told(tmp_path / "run", "--data", corpus, *SMALL[:-1])
    for line in (
        "loss by position, nats per token, ",
        "loss of the same 8 spans of ",
        "retrieval, key_value: correct answers out of 1 per length and depth (chance 1e-05)",
        "length  depth 0%  depth 100%  all  chance among the numbers shown",
    ):
        assert line in text


def test_a_report_that_was_drawn_is_drawn_again_with_the_evaluation(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", [corpus], replace(SETTINGS, context_tokens=1024)).trained(4)
    make_trained(tmp_path / "run", data__path=str(corpus))
    options = ("--data", corpus, "--task", "loss", *SMALL)
    told(tmp_path / "run", *options)
    assert not (tmp_path / "run/report.html").exists(), "nobody asked for one"
    (tmp_path / "run/report.html").write_text("drawn before")
    told(tmp_path / "run", *options)
    assert (tmp_path / "run/report.html").read_text() == render_report(tmp_path / "run")


def test_the_result_is_printed_when_the_report_cannot_be_drawn_again(
    told: Told, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trained(tmp_path / "run")
    (tmp_path / "run/report.html").write_text("drawn before")

    def away(run_dir: Path, **options: object) -> str:
        raise StorageAwayError("the storage did not answer")

    monkeypatch.setattr("ray_ulysses.report.page.render_report", away)
    assert told.json(tmp_path / "run", "--data", corpus, "--task", "loss", *SMALL)["step"] == 4


@pytest.mark.slow
def test_other_libraries_print_nothing_in_any_process(corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    (tmp_path / "lora").mkdir()
    make_adapted(tmp_path / "lora", "gemma2", {"rank": 2, "train_embeddings": True}, "fp32")
    exported = tmp_path / "run/export/step-00000004"
    evaluated = ["evaluate", exported, "--data", corpus, "--sp-size", "2", "--out", tmp_path / "out", *SMALL]
    for command in (["export", tmp_path / "run"], ["export", tmp_path / "lora/run"], evaluated):
        done = subprocess.run(
            [sys.executable, "-m", "ray_ulysses", *map(str, command), "-q"], capture_output=True, text=True, timeout=300
        )
        lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        assert (done.returncode, lines) == (0, [])


def test_lengths_are_powers_of_four_up_to_the_context() -> None:
    assert parse_lengths("4k, 1k,100,1024,1M") == (100, 1024, 4096, 2**20)
    assert default_lengths(8192) == (1024, 4096, 8192)
    assert default_lengths(512) == (512,)
    for text in ("", "1k,", "x", "1", "-5", "1.5k", "9" * 20):
        with pytest.raises(UserError, match="--lengths="):
            parse_lengths(text)


def test_what_can_not_be_evaluated_is_refused_with_a_way_out(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    write_config(tmp_path / "untrained", fields_of(ARCHITECTURES["llama"](vocab_size=VOCAB)))
    zoo_model("llama", vocab_size=100).save_pretrained(tmp_path / "narrow")
    zoo_model("llama", vocab_size=VOCAB).save_pretrained(tmp_path / "hf")
    zoo_model("gpt2", vocab_size=VOCAB).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    merging_tokenizer(tmp_path / "many")
    folder, data = tmp_path / "run", ("--data", corpus)
    refused: dict[tuple[object, ...], str] = {
        (tmp_path / "nowhere",): "is neither a run (no config.yaml) nor a model directory (no config.json); give",
        (tmp_path / "adapter",): "is an adapter without its model; give the run that",
        (folder, "--lengths", "1z"): "is not a number of tokens of 2 or more; write lengths as 1024 or 1k",
        (folder, "--step", "3", *data): "--step=3 is not a committed step of this run; use one of 4",
        (tmp_path / "hf", "--step", "3"): "--step=3: needs a run, but ",
        (tmp_path / "untrained", *data): "RUN has no committed checkpoint in ",
        (folder,): "--data: is not given, and the run's own documents can't be read (it has no data plan); give a",
        (tmp_path / "hf",): "--data: is not given, and a model directory names no documents; give a corpus",
        (
            folder,
            "--data",
            tmp_path,
        ): "is not a prepared corpus (no corpus.json); create one with `ray-ulysses prepare`",
        (tmp_path / "narrow", *data): "--data: the documents contain token 256, but the model's vocabulary has 100",
        (folder, "--tokenizer", tmp_path / "x", *data): "no such directory; use 'bytes', or the local directory",
        (folder, "--lengths", "200", *data): "--lengths=200: has no room for the facts and questions of several_keys,",
        (
            tmp_path / "gpt2",
            "--task",
            "loss",
            "--lengths",
            "100,257",
            *data,
        ): "the model's table of 256 positions, which can't be extended",
        (folder, "--tokenizer", tmp_path / "many", *data): "--tokenizer: produces token ",
    }
    for arguments, text in refused.items():
        said = told(*arguments, code=2)
        # Beside it only what Transformers says of itself.
        assert said.rpartition("\n")[2].startswith("error: ") and text in said, (arguments, said)


def test_results_that_can_not_be_written_are_refused_before_the_model_is_evaluated(
    told: Told, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trained(tmp_path / "run")
    (tmp_path / "file").touch()
    monkeypatch.setattr("ray_ulysses.evaluation.run_evaluation.evaluate_locally", lambda *_: pytest.fail("evaluated"))
    out = tmp_path / "file/out"
    said = told(tmp_path / "run", "--data", corpus, "--task", "loss", *SMALL, "--out", out, code=1)
    assert f"error: --out='{out}': can't be written (" in said and said.endswith("give another directory")


def test_numbers_that_can_no_longer_be_written_are_printed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tmp_path / "run")
    out = tmp_path / "out"

    def evaluate_while_the_place_goes(*_: object) -> EvaluationReport:
        # Nothing is left of the try whether it can be written.
        assert not out.exists() and not list(tmp_path.glob(".*"))
        out.touch()
        one = PositionBin(first=0, last=1, tokens=2, loss_sum=5.0)
        loss = PositionLoss(documents=1, tokens=2, loss_sum=5.0, bins=(one,))
        return EvaluationReport(
            model="m", step=None, dtype="fp32", data="documents", is_training_text=False, sp_size=1, seed=0,
            lengths=(900,), versions={}, notes=(), position_loss=loss, context_gain=None, retrieval=(), seconds=1.0,
        )  # fmt: skip

    monkeypatch.setattr("ray_ulysses.evaluation.run_evaluation.evaluate_locally", evaluate_while_the_place_goes)
    arguments = ["evaluate", str(tmp_path / "run"), "--data", str(corpus), "--task", "loss", *SMALL, "--out", str(out)]
    assert run(app, arguments) == 1
    printed, said = capsys.readouterr()
    assert json.loads(printed)["position_loss"]["loss"] == 2.5
    assert f"error: --out='{out}': can't be written (" in said
    out.unlink()
    assert run(app, [one for one in arguments if one != "--json"]) == 1
    printed = capsys.readouterr().out
    assert "2.5000" in printed and str(out) not in printed


def test_documents_of_another_tokenizer_are_refused(told: Told, corpus: Path, tmp_path: Path) -> None:
    zoo_model("llama", vocab_size=VOCAB).save_pretrained(tmp_path / "hf")
    words = word_tokenizer(tmp_path / "words", 5)
    for path in words.glob("tokenizer*"):
        (tmp_path / "hf" / path.name).write_bytes(path.read_bytes())
    for task in ("loss", "retrieval"):
        said = told(tmp_path / "hf", "--data", corpus, "--task", task, *SMALL, code=2)
        assert "prepared with the tokenizer bytes, which gives other tokens than the model's own in" in said
    options = (tmp_path / "hf", "--data", corpus, "--task", "loss", *SMALL, "--out", tmp_path / "out")
    assert told.json(*options, "--tokenizer", "bytes")["retrieval"] == []
    make_run(tmp_path / "run", [corpus])
    make_trained(tmp_path / "run", data__path=str(corpus))
    source = SourceSpec(paths=(str(write_texts(tmp_path / "texts", ["w1 w2 w3"])),))
    other = prepare_local(PrepareRequest(sources=source, out=tmp_path / "other", tokenizer=str(words)))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
    said = told(tmp_path / "hf", "--data", other.path, "--task", "loss", *SMALL, code=2)
    assert f"tokenizer {words}, which gives other tokens than the model's own" in said, "with another end token alone"
    said = told(tmp_path / "run", "--data", other.path, "--task", "loss", code=2)
    assert f"was prepared with the tokenizer {words}, but the corpus of the run ({corpus}) with another;" in said


def test_a_corpus_whose_tokenizer_is_gone_needs_one_for_retrieval_alone(told: Told, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    words = word_tokenizer(tmp_path / "words", 5)
    source = SourceSpec(paths=(str(write_texts(tmp_path / "texts", ["w1 w2 w3 " * 50, "w2 w4 " * 90])),))
    other = prepare_local(PrepareRequest(sources=source, out=tmp_path / "other", tokenizer=str(words))).path
    words.rename(tmp_path / "elsewhere")
    said = told(tmp_path / "run", "--data", other, *SMALL, code=2)
    assert "--tokenizer: is not given, and the documents' tokenizer can't be loaded (tokenizer=" in said
    assert said.endswith("give one with --tokenizer DIR, or leave retrieval out with --task loss")
    assert told.json(tmp_path / "run", "--data", other, "--task", "loss", *SMALL)["position_loss"]["documents"] == 2


def test_each_task_is_measured_alone(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    both = told.json(tmp_path / "run", "--data", corpus, *SMALL)
    loss = told.json(tmp_path / "run", "--data", corpus, *SMALL, "--task", "loss")
    assert (loss["position_loss"], loss["context_gain"]) == (both["position_loss"], both["context_gain"])
    assert loss["retrieval"] == [] and not (tmp_path / "run/evaluation/step-00000004/retrieval.svg").exists()
    retrieval = told.json(tmp_path / "run", "--data", corpus, *SMALL, "--task", "retrieval")
    assert retrieval["retrieval"] == both["retrieval"]
    assert (retrieval["position_loss"], retrieval["context_gain"]) == (None, None)


def test_contexts_that_no_document_has_are_named(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    found = told.json(tmp_path / "run", "--data", corpus, "--task", "loss", *SMALL, "--lengths", "64,1m")
    assert [one["context_tokens"] for one in found["context_gain"]["contexts"]] == [64]
    assert any(
        note.startswith("context gain: no document has 1,048,576 tokens before a span") for note in found["notes"]
    )


@pytest.mark.parametrize(("positions", "lengths"), [(128, ()), (256, ("--lengths", "100,256"))])
def test_contexts_beyond_a_table_of_positions_are_named_and_left_out(
    told: Told, corpus: Path, tmp_path: Path, positions: int, lengths: tuple[str, ...]
) -> None:
    zoo_model("gpt2", vocab_size=VOCAB, max_position_embeddings=positions).save_pretrained(tmp_path / "gpt2")
    options = ("--data", corpus, "--task", "loss", "--max-tokens", "500", "--json", "--out", tmp_path / "out")
    found = told.json(tmp_path / "gpt2", *options, *lengths)
    assert found["lengths"][-1] == positions and found["context_gain"] is None
    assert found["position_loss"]["bins"][-1]["last"] == positions - 1
    left_out = "100, 256" if lengths else "1"
    assert found["notes"] == [
        f"context gain: {left_out} tokens before a span of 256 are beyond the model's table of {positions} positions"
    ]


def test_a_run_whose_rows_are_longer_than_its_table_of_positions_is_evaluated_up_to_the_table(
    told: Told, corpus: Path, tmp_path: Path
) -> None:
    model = zoo_model("gpt2", vocab_size=VOCAB, max_position_embeddings=512)
    write_config(tmp_path / "run", fields_of(model.config), data__context_tokens=4096)
    write_checkpoint(tmp_path / "run", model)
    found = told.json(tmp_path / "run", "--data", corpus, "--task", "loss", "--max-tokens", "600", "--json")
    assert found["lengths"] == [512] and found["position_loss"]["bins"][-1]["last"] == 511
    assert [one["context_tokens"] for one in found["context_gain"]["contexts"]] == [256] and found["notes"] == []


@pytest.mark.parametrize("step", ["latest", "best"])
def test_a_checkpoint_that_is_committed_meanwhile_is_not_evaluated(corpus: Path, tmp_path: Path, step: Any) -> None:
    folder, model = tmp_path / "run", zoo_model("llama", vocab_size=VOCAB)
    write_config(folder, fields_of(ARCHITECTURES["llama"](vocab_size=VOCAB)))
    write_checkpoint(folder, model, metrics={"eval_loss": 0.7})
    request = EvaluationRequest(model=folder, is_run=True, step=step, data=corpus, lengths=(900,))
    prepared = prepare_evaluation(request)
    write_checkpoint(folder, model, step=5, metrics={"eval_loss": 0.5})
    # Each of several processes prepares what the command has prepared.
    assert prepare_evaluation(prepared.request).source.step == prepared.source.step == 4
    assert prepare_evaluation(request).source.step == 5


def test_a_run_with_stages_has_the_positions_of_the_stage_that_trained_the_step(
    told: Told, corpus: Path, tmp_path: Path
) -> None:
    fields = fields_of(ARCHITECTURES["llama"](vocab_size=VOCAB))
    tree = small_tree(model__config=fields, data__path=str(corpus), cluster__workers=1)
    tree["run"] |= {"name": "run", "storage": str(tmp_path)}
    stages = [{"name": "short", "steps": 2, "context_tokens": 256}, {"name": "long", "rope": {"rope_theta": 300.0}}]
    config = parse_config({**tree, "stages": stages})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(config.to_yaml())
    losses = {}
    # The checkpoint says which stage it is of: neither the plan nor the corpora are looked at.
    for step, stage in ((2, "short"), (4, "long")):
        model = zoo_model("llama", vocab_size=VOCAB)
        write_checkpoint(tmp_path / "run", model, step=step, extra={"stage": stage})
        options = ("--data", corpus, "--task", "loss", *SMALL)
        found = told.json(tmp_path / "run", "--step", step, *options)
        assert run(app, ["export", str(tmp_path / "run"), "--step", str(step), "--no-check"]) == 0
        told._capsys.readouterr()
        exported = tmp_path / f"run/export/step-{step:08d}"
        assert told.json(exported, *options, "--out", tmp_path / "out")["position_loss"] == found["position_loss"]
        losses[step] = found["position_loss"]["loss"]
    # Far above the rounding of fp32 sums.
    assert abs(losses[2] - losses[4]) > 1e-5


def test_a_damaged_checkpoint_ends_with_1_and_names_the_file(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    (damaged,) = (tmp_path / "run/checkpoints/step-00000004").rglob("rank-00000-of-00002.safetensors")
    content = bytearray(damaged.read_bytes())
    header = int.from_bytes(content[:8], "little")
    places = json.loads(content[8 : 8 + header])
    start = next(place["data_offsets"][0] for name, place in places.items() if name.startswith("fp32/"))
    content[8 + header + start] ^= 0x10
    damaged.write_bytes(content)
    said = told(tmp_path / "run", "--data", corpus, *SMALL, code=1)
    assert "error: the checkpoint of step 4 is damaged: " in said and damaged.name in said
    assert said.endswith("; give another step with --step, or restore the file")
    assert not (tmp_path / "run/evaluation").exists()


def test_a_run_with_adapters_gives_the_numbers_of_its_merged_export(told: Told, corpus: Path, tmp_path: Path) -> None:
    fields = fields_of(ARCHITECTURES["qwen3"](vocab_size=VOCAB))
    adapter = {"rank": 3, "targets": ["q_proj", "down_proj"]}
    write_config(tmp_path / "run", fields, model__adapter=adapter)
    model = build_model(load_config(tmp_path / "run/config.yaml"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    write_checkpoint(tmp_path / "run", model, frozen=frozen)
    assert run(app, ["export", str(tmp_path / "run"), "--merge", "--out", str(tmp_path / "merged"), "--no-check"]) == 0
    told._capsys.readouterr()
    options = ("--data", corpus, *SMALL)
    ours = told.json(tmp_path / "run", *options)
    theirs = told.json(tmp_path / "merged", *options, "--out", tmp_path / "out")
    assert ours["retrieval"] == theirs["retrieval"]
    assert ours["position_loss"]["loss"] == pytest.approx(theirs["position_loss"]["loss"], abs=1e-6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    write_checkpoint(tmp_path / "run", model, frozen=frozen, step=5)
    without = told.json(tmp_path / "run", *options)
    assert abs(without["position_loss"]["loss"] - ours["position_loss"]["loss"]) > 1e-4


@pytest.mark.parametrize(
    ("option", "value"),
    [("--task", "speed"), ("--dtype", "int8"), ("--cases", "0"), ("--sp-size", "0"), ("--seed", "-1")],
)
def test_an_option_out_of_its_range_is_refused(told: Told, option: str, value: str) -> None:
    assert option in told("runs/a", option, value, code=2)
