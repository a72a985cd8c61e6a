"""An exported directory equals save_pretrained's output for the trained model, and gives the same logits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import ray_ulysses.export.export_run as module
from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export import frozen_base
from ray_ulysses.export.report import ExportRequest
from ray_ulysses.export.tensors import Stored, published_tensors
from ray_ulysses.run.start_point import choose_checkpoint
from ray_ulysses.run_names import REPORT_FILE
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.place import open_store, place_of
from tests.breadth import fast_only
from tests.distributed.run_case import make_corpus
from tests.s3_server import S3Server
from tests.stores import CountingStore
from tests.unit.attention.models import ARCHITECTURES, VOCAB, zoo_model
from tests.unit.export.runs import (
    TINY_LLAMA,
    assert_same,
    export,
    fields_of,
    silent,
    tensors_in,
    write_checkpoint,
    write_config,
)

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_run(run_dir: Path, architecture: str, dtype: str = "fp32", model: Any = None, **checkpoint: Any) -> Any:
    """Write a run with a checkpoint of a zoo model; return the model."""
    model = zoo_model(architecture) if model is None else model
    write_config(run_dir, fields_of(ARCHITECTURES[architecture]()), dtype)
    write_checkpoint(run_dir, model, dtype=dtype, **checkpoint)
    return model


def saved_by_transformers(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return tensors_in(folder)


def test_the_zoo_is_exported_and_gives_the_logits_of_the_live_model(tmp_path: Path, architecture: str) -> None:
    model = make_run(tmp_path / "run", architecture)
    report = export(tmp_path / "run", max_shard_bytes=20_000)
    assert report.check is not None and report.check.holds and report.check.bound == 1e-5
    print(f"{architecture}: {report.check.relative:.1e}")
    out = Path(report.out)
    assert out == tmp_path / "run/export/step-00000004"
    assert_same(tensors_in(out), saved_by_transformers(model, tmp_path / "wanted"))
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info.values())
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.float32
    ids = torch.randint(1, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, wanted = (each(input_ids=ids, use_cache=False).logits for each in (loaded.eval(), model.eval()))
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", fast_only(ARCHITECTURES, "deepseek_v3", "gemma4_text"))


@pytest.mark.parametrize("name", fast_only(["llama", "qwen3", "mixtral"], "llama"))
@pytest.mark.parametrize("weights", fast_only(["model", "bf16", "fp32", "fp16", "not stored"], "fp16", "not stored"))
def test_each_precision_is_rounded_once_from_the_master_weights(tmp_path: Path, name: str, weights: Any) -> None:
    model = make_run(tmp_path / "run", name, "bf16", with_model=weights != "not stored")
    weights = "model" if weights == "not stored" else weights
    report = export(tmp_path / "run", weights=weights)
    assert report.check is not None and report.check.holds
    assert {path.name for path in Path(report.out).glob("model*")} == {"model.safetensors"}, "one file has no index"
    dtype = TORCH["bf16" if weights == "model" else weights]
    assert_same(tensors_in(Path(report.out)), saved_by_transformers(model.to(dtype), tmp_path / "wanted"))
    fields = json.loads((Path(report.out) / "config.json").read_text())
    assert fields["dtype"] == fields["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(report.out, dtype="auto").dtype == dtype


def test_frozen_parameters_and_buffers_are_exported(tmp_path: Path) -> None:
    model = zoo_model("deepseek_v3")
    bias = next(name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
    with torch.no_grad():
        model.get_buffer(bias).uniform_(-1, 1)
    frozen = [name for name, _ in model.named_parameters() if ".0." in name or "embed" in name]
    make_run(tmp_path / "run", "deepseek_v3", "bf16", model=model, frozen=frozen)
    report = export(tmp_path / "run")
    assert report.check is not None and report.check.holds
    ours = tensors_in(Path(report.out))
    assert torch.equal(ours[bias], model.get_buffer(bias))
    assert ours[bias].dtype == torch.float32
    wanted = saved_by_transformers(model, tmp_path / "wanted")
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name].float(), wanted[name].to(ours[name].dtype).float()) for name in wanted)


def test_files_respect_the_maximum_size_and_the_index_lists_each_tensor(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "qwen3_moe", "bf16")
    report = export(tmp_path / "run", max_shard_bytes=6_000)
    out = Path(report.out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 5
    total = 0
    for name in files:
        with safe_open(out / name, framework="pt") as file:
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
        assert size <= 6_000 or len(held) == 1
        assert {index["weight_map"][key] for key in held} == {name}
        total += size
    assert index["metadata"]["total_size"] == total
    assert index["metadata"]["total_parameters"] == report.parameters
    assert report.files == {path.name: path.stat().st_size for path in out.iterdir() if path.name in report.files}
    assert report.files.keys() | {"ray_ulysses_export.json"} == {path.name for path in out.iterdir()}


def test_a_value_beyond_fp16_is_refused(tmp_path: Path) -> None:
    model = zoo_model("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = 1e6
    make_run(tmp_path / "run", "llama", model=model)
    with pytest.raises(RunError, match=r"--dtype=fp16: model\.norm\.weight has the value 1e\+06"):
        export(tmp_path / "run", weights="fp16")
    assert list((tmp_path / "run/export").iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "llama")
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"](num_hidden_layers=3, hidden_size=64)))
    with pytest.raises(RunError, match=r"model\.embed_tokens\.weight is \[61, 64\] in the model"):
        export(tmp_path / "run")
    assert not (tmp_path / "run/export").exists()


def test_only_what_is_exported_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo_model("mixtral", hidden_size=128, intermediate_size=256)
    config = ARCHITECTURES["mixtral"](hidden_size=128, intermediate_size=256)
    write_config(tmp_path / "run", fields_of(config), "bf16")
    write_checkpoint(tmp_path / "run", model, dtype="bf16")
    store = CountingStore(LocalStore(tmp_path / "run"))
    request = ExportRequest(run_dir=tmp_path / "run", check=False)
    manifest = choose_checkpoint(store, "latest")
    before = store.bytes_read
    monkeypatch.setattr(frozen_base, "find_checkpoint", lambda *_, **options: (store, manifest))
    report = module.export_run(request, silent)
    weights = 2 * report.parameters
    # The rest are the manifest and checksum tables; neither moments nor master weights are read.
    assert weights <= store.bytes_read - before < 1.5 * weights


def test_an_architecture_that_rearranges_elements_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("hrm_text", num_hidden_layers=2, vocab_size=61)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stored = {
        name: Stored(key=f"fp32/{name}", shape=tuple(tensor.shape), dtype=torch.float32, published=torch.float32)
        for name, tensor in model.state_dict().items()
    }
    with pytest.raises(RunError, match="HrmTextForCausalLM can't be exported"):
        published_tensors(model, stored)


def test_files_unlike_the_live_model_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", "llama")
    original = module.write_files

    def write_and_change(folder: Path, *args: Any) -> None:
        original(folder, *args)
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-2] ^= 0x01
        path.write_bytes(content)

    monkeypatch.setattr(module, "write_files", write_and_change)
    with pytest.raises(RunError, match="the export failed its check"):
        export(tmp_path / "run")
    assert list((tmp_path / "run/export").iterdir()) == []


@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
def test_a_damaged_file_is_named_and_nothing_is_published(tmp_path: Path, cut: bool) -> None:
    make_run(tmp_path / "run", "llama", step=2)
    make_run(tmp_path / "run", "llama", step=4)
    shards = tmp_path / "run/checkpoints/step-00000004/attempt-0001"
    damaged = shards / "rank-00001-of-00002.safetensors"
    content = damaged.read_bytes()
    if cut:
        damaged.write_bytes(content[:-1])
    else:
        header = int.from_bytes(content[:8], "little")
        entry = json.loads(content[8 : 8 + header])["fp32/model.norm.weight"]
        byte = 8 + header + entry["data_offsets"][0]
        damaged.write_bytes(content[:byte] + bytes([content[byte] ^ 0x40]) + content[byte + 1 :])
    with pytest.raises(RunError, match=r"rank-00001-of-00002\.safetensors") as error:
        export(tmp_path / "run")
    assert ("use --step 2," if cut else "fp32/model.norm.weight") in str(error.value)
    assert not (tmp_path / "run/export/step-00000004").exists()
    assert export(tmp_path / "run", step=2).step == 2


def test_a_checkpoint_that_retention_deletes_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", "llama")
    original = module.write_files

    def delete_and_write(*args: Any) -> None:
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
        original(*args)

    monkeypatch.setattr(module, "write_files", delete_and_write)
    with pytest.raises(RunError, match="of step 4 was deleted during the export"):
        export(tmp_path / "run")


def test_an_export_among_the_runs_own_files_is_refused_early(tmp_path: Path) -> None:
    model = zoo_model("llama")
    write_config(tmp_path / "runs/a", fields_of(ARCHITECTURES["llama"]()), checkpoint__storage=str(tmp_path / "far"))
    write_checkpoint(tmp_path / "far/a", model)
    for own in (tmp_path / "runs/a", tmp_path / "far/a"):
        out = own / "checkpoints/step-00000008"
        with pytest.raises(UserError, match=f"--out='{out}': is in {own}"):
            export(tmp_path / "runs/a", check=False, out=out)
        assert not out.exists()
    report = export(tmp_path / "runs/a", check=False)
    assert Path(report.out) == tmp_path / "runs/a/export/step-00000004"
    assert export(tmp_path / "runs/a", check=False) == replace(report, was_there=True)
    assert_same(tensors_in(Path(report.out)), saved_by_transformers(model, tmp_path / "wanted"))


@pytest.fixture
def run(s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectLocation:
    """Copy a run with a checkpoint from disk to an object store."""
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    local = tmp_path / "run"
    write_config(local, TINY_LLAMA.to_diff_dict() | {"model_type": "llama"})
    write_checkpoint(local, AutoModelForCausalLM.from_config(TINY_LLAMA))
    place = place_of(s3.uri(prefix)) / "run"
    assert isinstance(place, ObjectLocation)
    there = open_store(place)
    for path in sorted(local.rglob("*")):
        if path.is_file():
            key = str(path.relative_to(local))
            there.create(key, [LocalStore(local).read_whole(key)])
    return place


def test_a_run_in_a_store_is_exported_evaluated_and_reported(
    run: ObjectLocation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command(app, [*map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    store = open_store(run)
    place = run / "export/step-00000004"
    code, out, err = ask("export", run)
    assert code == 0 and f"copying to {place}" in err, err
    names = {key.rpartition("/")[2] for key in store.list("export/step-00000004")}
    assert {"config.json", "model.safetensors", "ray_ulysses_export.json"} <= names
    assert not list((tmp_path / "node" / "exports").rglob("*.safetensors")), "the staged copy is deleted"
    code, out, err = ask("export", run)
    assert code == 0 and "copying to" not in err, "an identical export exists"
    code, out, err = ask("export", run, "--dtype", "bf16")
    assert code == 2 and "add --overwrite to replace it" in err
    code, out, err = ask("export", run, "--out", tmp_path / "out")
    assert code == 0 and (tmp_path / "out" / "model.safetensors").is_file()

    corpus = make_corpus(tmp_path / "data", ("bisect.py",))
    code, out, err = ask("evaluate", run, "--task", "loss", "--lengths", 32, "--max-tokens", 500, "--data", corpus)
    assert code == 0, err
    found = json.loads(store.read_whole("evaluation/step-00000004/evaluation.json"))
    assert found["step"] == 4 and found["position_loss"]["loss"] > 0

    code, out, err = ask("report", run)
    assert code == 0, err
    page = store.read_whole(REPORT_FILE)
    assert page.startswith(b"<!") and b"position" in page
    code, out, err = ask("inspect", run, "--checkpoints", "--json")
    assert code == 0 and [one["step"] for one in json.loads(out)["checkpoints"]] == [4]
    code, out, err = ask("inspect", place_of(str(run)).parent / "nobody")
    assert code == 2 and "is not a run directory" in err
