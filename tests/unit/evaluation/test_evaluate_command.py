"""``ray-ulysses evaluate`` gives the same numbers for a run and its export, and refuses impossible options."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from ray_ulysses.cli import app, run
from ray_ulysses.commands.evaluate import parse_lengths
from ray_ulysses.config.loading import load_config, parse_config
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.engine.adapter import add_adapter
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.text_part import keep_text_part
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
from tests.unit.export.test_decoder_merge import make_run as make_part
from tests.unit.export.test_decoder_merge import make_whole
from tests.unit.inspect.runs import SETTINGS, make_run

VOCAB = 320
SMALL = ("--lengths", "900", "--depths", "2", "--cases", "1", "--max-tokens", "3000", "--json")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("held"), varied_texts(10, longest=2500)).path


def make_trained(run_dir: Path, architecture: str = "llama", dtype: str = "fp32", **changes: Any) -> None:
    """Write a run with a checkpoint of a model for byte tokens."""
    model = zoo_model(architecture, vocab_size=VOCAB)
    write_config(run_dir, fields_of(ARCHITECTURES[architecture](vocab_size=VOCAB)), dtype, **changes)
    write_checkpoint(run_dir, model, dtype=dtype)


class Told:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        assert run(app, ["evaluate", *map(str, arguments)]) == code
        captured = self._capsys.readouterr()
        return captured.err.strip() if code else captured.out

    def export(self, *arguments: object) -> None:
        assert run(app, ["export", *map(str, arguments), "--no-check"]) == 0
        self._capsys.readouterr()

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
    told.export(tmp_path / "run", "--out", tmp_path / "hf")
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
    # Each task alone gives the same numbers.
    loss = told.json(tmp_path / "run", "--data", corpus, *SMALL, "--task", "loss")
    assert (loss["position_loss"], loss["context_gain"]) == (ours["position_loss"], ours["context_gain"])
    assert loss["retrieval"] == [] and not (written / "retrieval.svg").exists()
    retrieval = told.json(tmp_path / "run", "--data", corpus, *SMALL, "--task", "retrieval")
    assert retrieval["retrieval"] == ours["retrieval"]
    assert (retrieval["position_loss"], retrieval["context_gain"]) == (None, None)
    lengths = (64, 2**20)
    prepared = prepare_evaluation(
        EvaluationRequest(model=tmp_path / "run", is_run=True, data=corpus, tasks=("loss",), lengths=lengths)
    )
    assert prepared.contexts == (64,), "no document is long enough for the other context"
    assert any("no document has 1,048,576 tokens before a span" in note for note in prepared.notes)


def test_a_bf16_run_is_evaluated_in_fp32_from_its_master_weights(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run", "llama", "bf16")
    make_trained(tmp_path / "masters", "llama", "fp32")
    options = ("--data", corpus, "--task", "loss", *SMALL)
    upcast = told.json(tmp_path / "run", *options, "--dtype", "fp32")
    assert upcast["position_loss"] == told.json(tmp_path / "masters", *options)["position_loss"]
    assert upcast["position_loss"] != told.json(tmp_path / "run", *options)["position_loss"]


def test_a_runs_held_out_documents_are_preferred_to_its_training_text(told: Told, corpus: Path, tmp_path: Path) -> None:
    for name, fraction in (("without", 0.0), ("with", 0.4)):
        planned = make_run(
            tmp_path / name, [corpus], replace(SETTINGS, context_tokens=1024, eval_fraction=fraction, eval_rows=100)
        )
        assert planned.plan.evaluation.num_rows == 0 or fraction
        make_trained(tmp_path / name, data__path=str(corpus))
    options = (*SMALL, "--max-tokens", "99999")
    trained = told.json(tmp_path / "without", *options)
    assert trained["is_training_text"] and trained["data"].startswith("the run's training documents")
    assert any(note.startswith("the losses are measured on training text") for note in trained["notes"])
    held = told.json(tmp_path / "with", *options)
    assert not held["is_training_text"] and "held-out" in held["data"] and held["notes"] == []
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


def test_an_existing_report_is_updated_with_the_evaluation(
    told: Told, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", [corpus], replace(SETTINGS, context_tokens=1024)).trained(4)
    make_trained(tmp_path / "run", data__path=str(corpus))
    options = ("--data", corpus, "--task", "loss", *SMALL)
    table = told(tmp_path / "run", *options[:-1])
    assert "loss by position, nats per token, " in table and "loss of the same 8 spans of " in table
    assert not (tmp_path / "run/report.html").exists()
    (tmp_path / "run/report.html").write_text("drawn before")
    told(tmp_path / "run", *options)
    assert (tmp_path / "run/report.html").read_text() == render_report(tmp_path / "run")

    def away(run_dir: Path, **options: object) -> str:
        raise StorageAwayError("the storage did not respond")

    monkeypatch.setattr("ray_ulysses.report.page.render_report", away)
    assert told.json(tmp_path / "run", *options)["step"] == 4, "the result is printed without the report"


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


def test_impossible_requests_are_refused_with_a_way_out(told: Told, corpus: Path, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    write_config(tmp_path / "untrained", fields_of(ARCHITECTURES["llama"](vocab_size=VOCAB)))
    zoo_model("llama", vocab_size=100).save_pretrained(tmp_path / "narrow")
    zoo_model("llama", vocab_size=VOCAB).save_pretrained(tmp_path / "hf")
    zoo_model("gpt2", vocab_size=VOCAB).save_pretrained(gpt2 := tmp_path / "gpt2")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    merging_tokenizer(tmp_path / "many")
    folder, data = tmp_path / "run", ("--data", corpus)
    refused: dict[tuple[object, ...], str] = {
        (tmp_path / "nowhere",): "is neither a run (no config.yaml) nor a model directory (no config.json); specify",
        (tmp_path / "adapter",): "is an adapter without its base model; specify the run that",
        (folder, "--lengths", "1z"): "is not a token count of 2 or more; write lengths as 1024 or 1k",
        (folder, "--step", "3", *data): "--step=3 is not a committed step of this run; use one of 4",
        (tmp_path / "hf", "--step", "3"): "--step=3: applies only to a run, but ",
        (tmp_path / "untrained", *data): "RUN has no committed checkpoint in ",
        (folder,): "--data: is not set, and the run's own documents can't be read (the run has no data plan); specify",
        (tmp_path / "hf",): "--data: must be set, because a model directory has no documents; specify a corpus",
        (folder, "--data", tmp_path): "is not a prepared corpus (no corpus.json); create one with `ray-ulysses",
        (tmp_path / "narrow", *data): "--data: the documents contain token 256, but the model has only 100 tokens",
        (folder, "--tokenizer", tmp_path / "x", *data): "no such directory; use 'bytes', or the local directory",
        (folder, "--lengths", "200", *data): "--lengths=200: is too short, since the facts and questions of",
        (gpt2, "--task", "loss", "--lengths", "100,257", *data): "the model's table of 256 positions, which, unlike",
        (folder, "--task", "speed"): "--task",
        (folder, "--sp-size", "0"): "--sp-size",
        (folder, "--tokenizer", tmp_path / "many", *data): "--tokenizer: produces token ",
    }
    for arguments, text in refused.items():
        said = told(*arguments, code=2)
        last = said.rpartition("\n")[2]
        assert last.lower().startswith("error: ") and text in last, (arguments, said)


def test_unwritable_results_are_refused_early_or_printed(
    told: Told, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tmp_path / "run")
    out = tmp_path / "out"

    def evaluate_and_block_the_directory(*_: object) -> EvaluationReport:
        # The test write left nothing behind.
        assert not out.exists() and not list(tmp_path.glob(".*"))
        out.touch()
        one = PositionBin(first=0, last=1, tokens=2, loss_sum=5.0)
        loss = PositionLoss(documents=1, tokens=2, loss_sum=5.0, bins=(one,))
        return EvaluationReport(
            model="m", step=None, dtype="fp32", data="documents", is_training_text=False, sp_size=1, seed=0,
            lengths=(900,), versions={}, notes=(), position_loss=loss, context_gain=None, retrieval=(), seconds=1.0,
        )  # fmt: skip

    monkeypatch.setattr("ray_ulysses.evaluation.run_evaluation.evaluate_locally", evaluate_and_block_the_directory)
    arguments = ["evaluate", str(tmp_path / "run"), "--data", str(corpus), "--task", "loss", *SMALL, "--out", str(out)]
    assert run(app, arguments) == 1
    printed, said = capsys.readouterr()
    assert json.loads(printed)["position_loss"]["loss"] == 2.5
    assert f"error: --out='{out}': can't be written (" in said
    monkeypatch.setattr("ray_ulysses.evaluation.run_evaluation.evaluate_locally", lambda *_: pytest.fail("evaluated"))
    said = told(tmp_path / "run", "--data", corpus, "--task", "loss", *SMALL, "--out", out / "below", code=1)
    assert f"error: --out='{out / 'below'}': can't be written (" in said and said.endswith("use another directory")


def test_documents_of_another_tokenizer_are_refused(told: Told, corpus: Path, tmp_path: Path) -> None:
    zoo_model("llama", vocab_size=VOCAB).save_pretrained(tmp_path / "hf")
    words = word_tokenizer(tmp_path / "words", 5)
    for path in words.glob("tokenizer*"):
        (tmp_path / "hf" / path.name).write_bytes(path.read_bytes())
    for task in ("loss", "retrieval"):
        said = told(tmp_path / "hf", "--data", corpus, "--task", task, *SMALL, code=2)
        assert "prepared with the tokenizer bytes, which differs from the model's tokenizer in" in said
    options = (tmp_path / "hf", "--data", corpus, "--task", "loss", *SMALL, "--out", tmp_path / "out")
    assert told.json(*options, "--tokenizer", "bytes")["retrieval"] == []
    make_run(tmp_path / "run", [corpus])
    make_trained(tmp_path / "run", data__path=str(corpus))
    source = SourceSpec(paths=(str(write_texts(tmp_path / "texts", ["w1 w2 w3"])),))
    other = prepare_local(PrepareRequest(sources=source, out=tmp_path / "other", tokenizer=str(words)))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
    said = told(tmp_path / "hf", "--data", other.path, "--task", "loss", *SMALL, code=2)
    assert f"tokenizer {words}, which differs from the model's tokenizer" in said, "with another end token alone"
    said = told(tmp_path / "run", "--data", other.path, "--task", "loss", code=2)
    assert (
        f"prepared with the tokenizer {words}, which differs from the tokenizer of the run's corpus ({corpus})" in said
    )


def test_a_corpus_without_its_tokenizer_needs_one_only_for_retrieval(told: Told, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    words = word_tokenizer(tmp_path / "words", 5)
    source = SourceSpec(paths=(str(write_texts(tmp_path / "texts", ["w1 w2 w3 " * 50, "w2 w4 " * 90])),))
    other = prepare_local(PrepareRequest(sources=source, out=tmp_path / "other", tokenizer=str(words))).path
    words.rename(tmp_path / "elsewhere")
    said = told(tmp_path / "run", "--data", other, *SMALL, code=2)
    assert "--tokenizer: is not set, and the documents' tokenizer can't be loaded (tokenizer=" in said
    assert said.endswith("set --tokenizer DIR, or skip retrieval with --task loss")
    assert told.json(tmp_path / "run", "--data", other, "--task", "loss", *SMALL)["position_loss"]["documents"] == 2


@pytest.mark.parametrize(("positions", "lengths"), [(128, ()), (256, ("--lengths", "100,256"))])
def test_contexts_beyond_a_table_of_positions_are_omitted(
    told: Told, corpus: Path, tmp_path: Path, positions: int, lengths: tuple[str, ...]
) -> None:
    zoo_model("gpt2", vocab_size=VOCAB, max_position_embeddings=positions).save_pretrained(tmp_path / "gpt2")
    options = ("--data", corpus, "--task", "loss", "--max-tokens", "600", "--json", "--out", tmp_path / "out")
    found = told.json(tmp_path / "gpt2", *options, *lengths)
    assert found["lengths"][-1] == positions and found["context_gain"] is None
    assert found["position_loss"]["bins"][-1]["last"] == positions - 1
    left_out = "100, 256" if lengths else "1"
    assert found["notes"] == [
        f"context gain: {left_out} tokens before a span of 256 exceed the model's table of {positions} positions"
    ]
    if not lengths:
        # Rows longer than the table are evaluated up to its end.
        model = zoo_model("gpt2", vocab_size=VOCAB, max_position_embeddings=512)
        write_config(tmp_path / "run", fields_of(model.config), data__context_tokens=4096)
        write_checkpoint(tmp_path / "run", model)
        found = told.json(tmp_path / "run", *options)
        assert found["lengths"] == [512] and found["position_loss"]["bins"][-1]["last"] == 511
        assert [one["context_tokens"] for one in found["context_gain"]["contexts"]] == [256] and found["notes"] == []


@pytest.mark.parametrize("step", ["latest", "best"])
def test_a_checkpoint_committed_later_is_not_evaluated(corpus: Path, tmp_path: Path, step: Any) -> None:
    folder, model = tmp_path / "run", zoo_model("llama", vocab_size=VOCAB)
    write_config(folder, fields_of(ARCHITECTURES["llama"](vocab_size=VOCAB)))
    write_checkpoint(folder, model, metrics={"eval_loss": 0.7})
    request = EvaluationRequest(model=folder, is_run=True, step=step, data=corpus, lengths=(900,))
    prepared = prepare_evaluation(request)
    write_checkpoint(folder, model, step=5, metrics={"eval_loss": 0.5})
    # Every process prepares the same checkpoint as the command.
    assert prepare_evaluation(prepared.request).source.step == prepared.source.step == 4
    assert prepare_evaluation(request).source.step == 5


def test_a_run_with_stages_has_the_positions_of_the_steps_stage(told: Told, corpus: Path, tmp_path: Path) -> None:
    fields = fields_of(ARCHITECTURES["llama"](vocab_size=VOCAB))
    tree = small_tree(model__config=fields, data__path=str(corpus), cluster__workers=1)
    tree["run"] |= {"name": "run", "storage": str(tmp_path)}
    stages = [{"name": "short", "steps": 2, "context_tokens": 256}, {"name": "long", "rope": {"rope_theta": 300.0}}]
    config = parse_config({**tree, "stages": stages})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(config.to_yaml())
    losses = {}
    # The checkpoint records its stage; neither the plan nor the corpora are read.
    for step, stage in ((2, "short"), (4, "long")):
        model = zoo_model("llama", vocab_size=VOCAB)
        write_checkpoint(tmp_path / "run", model, step=step, extra={"stage": stage})
        options = ("--data", corpus, "--task", "loss", *SMALL)
        found = told.json(tmp_path / "run", "--step", step, *options)
        told.export(tmp_path / "run", "--step", step)
        exported = tmp_path / f"run/export/step-{step:08d}"
        assert told.json(exported, *options, "--out", tmp_path / "out")["position_loss"] == found["position_loss"]
        losses[step] = found["position_loss"]["loss"]
    # Far above fp32 rounding errors.
    assert abs(losses[2] - losses[4]) > 1e-5


def test_a_damaged_checkpoint_is_reported_with_its_file(told: Told, corpus: Path, tmp_path: Path) -> None:
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
    assert said.endswith("; select another step with --step, or restore the file")
    assert not (tmp_path / "run/evaluation").exists()


def test_a_run_with_adapters_of_the_text_part_gives_the_numbers_of_its_merged_export(
    told: Told, corpus: Path, tmp_path: Path
) -> None:
    decoder = deepcopy(make_whole(tmp_path / "base", "gemma3", vocab_size=VOCAB))
    keep_text_part(decoder)
    adapter = {"rank": 2, "targets": ["q_proj", "down_proj"]}
    trained = add_adapter(decoder, AdapterSection(**adapter), seed=1)
    with torch.no_grad():
        for one in trained.parameters():
            one.add_(0.2 * torch.randn(one.shape, generator=torch.Generator().manual_seed(2)) * one.requires_grad)
    make_part(tmp_path / "run", tmp_path / "base", trained, adapter=adapter)
    told.export(tmp_path / "run", "--merge", "--out", tmp_path / "merged")
    options = ("--data", corpus, *SMALL)
    ours = told.json(tmp_path / "run", *options)["position_loss"]["loss"]
    theirs = told.json(tmp_path / "merged", *options, "--out", tmp_path / "out")["position_loss"]["loss"]
    before = told.json(tmp_path / "base", *options, "--out", tmp_path / "before")["position_loss"]["loss"]
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert abs(ours - before) > 1e-4


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
    told.export(tmp_path / "run", "--merge", "--out", tmp_path / "merged")
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
