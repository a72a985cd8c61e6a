"""A decoder is merged into its multimodal checkpoint: its tensors change, and no other byte."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.engine.adapter import add_adapter
from ray_ulysses.engine.text_part import keep_text_part
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.decoder_merge import DecoderMerge, plan_merge
from ray_ulysses.export.export_run import export_run
from ray_ulysses.export.report import ExportRequest, python_lines
from tests.breadth import fast_only
from tests.unit.attention.multimodal import MULTIMODAL, multimodal_model
from tests.unit.config.trees import small_tree
from tests.unit.export.runs import assert_same, export, tensors_in, write_checkpoint

OTHERS = {"preprocessor_config.json": "{}", "README.md": "# The whole", "chat_template.jinja": "{{ messages }}"}


def make_whole(base: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write a complete multimodal checkpoint in several files; return its model."""
    model = multimodal_model(name, **changes).to(dtype)
    model.save_pretrained(base, max_shard_size="20KB")
    for other, text in OTHERS.items():
        (base / other).write_text(text)
    return model


def trained_decoder(whole: Any) -> Any:
    decoder = deepcopy(whole).float()
    keep_text_part(decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return decoder


def make_run(run_dir: Path, base: Path, decoder: Any, dtype: str = "fp32", **changes: Any) -> None:
    model = {"init": "pretrained", "path": str(base), "part": "text", "dtype": dtype, **changes}
    tree = small_tree() | {"model": model}
    tree["run"] |= {"name": run_dir.name, "storage": str(run_dir.parent)}
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(parse_config(tree).to_yaml())
    frozen = [name for name, one in decoder.named_parameters() if not one.requires_grad]
    write_checkpoint(run_dir, decoder, dtype=dtype, frozen=frozen)


def check_merged(tmp_path: Path, whole: Any, dtype: str = "fp32") -> tuple[Path, Any, Any]:
    """Train and export the decoder of ``whole``; compare the directory with the base and the loaded model.

    Returns:
        The exported directory, the decoder and the report.
    """
    base, decoder = tmp_path / "base", trained_decoder(whole)
    make_run(tmp_path / "run", base, decoder, dtype)
    report = export(tmp_path / "run")
    out = Path(report.out)
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
        else:
            before, after = load_file(path), load_file(out / path.name)
            assert {name: (one.dtype, one.shape) for name, one in before.items()} == {
                name: (one.dtype, one.shape) for name, one in after.items()
            }
    assert {path.name for path in out.iterdir()} == {path.name for path in base.iterdir()} | {"ray_ulysses_export.json"}
    new = dict(decoder.named_parameters(remove_duplicate=False))
    wanted = {
        name: new[name].detach().to(one.dtype) if name in new else one.detach()
        for name, one in whole.named_parameters(remove_duplicate=False)
    }
    assert len(wanted) > len(new)
    loaded = AutoModelForMultimodalLM.from_pretrained(out, dtype="auto")
    assert_same({name: one.detach() for name, one in loaded.named_parameters(remove_duplicate=False)}, wanted)
    return out, decoder, report


@pytest.mark.parametrize("name", fast_only(MULTIMODAL, "qwen2_vl"))
def test_only_the_decoder_changes(tmp_path: Path, name: str) -> None:
    _, decoder, report = check_merged(tmp_path, make_whole(tmp_path / "base", name))
    assert report.check is not None and report.check.holds and report.check.bound == 1e-5
    assert report.parameters == sum(parameter.numel() for parameter in decoder.parameters())
    assert report.loaded_with == "AutoModelForMultimodalLM"
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    assert export(tmp_path / "run").was_there


@pytest.mark.parametrize("stored", fast_only([torch.bfloat16, torch.float32], torch.bfloat16))
def test_the_dtypes_of_the_multimodal_checkpoint_are_kept(tmp_path: Path, stored: torch.dtype) -> None:
    check_merged(tmp_path, make_whole(tmp_path / "base", "gemma3", stored), "bf16")


@pytest.mark.slow
def test_a_checkpoint_with_the_models_own_names_keeps_these_names(tmp_path: Path) -> None:
    whole = make_whole(tmp_path / "base", "gemma3")
    old = tensors_in(tmp_path / "base")
    for path in (tmp_path / "base").glob("model*"):
        path.unlink()
    renamed = {}
    for name, tensor in old.items():
        here = name.replace("language_model.model.", "model.language_model.")
        renamed[re.sub(r"^(vision_tower|multi_modal_projector)", r"model.\1", here)] = tensor
    save_file(renamed, tmp_path / "base/model.safetensors", {"format": "pt"})
    assert "model.language_model.norm.weight" in tensors_in(check_merged(tmp_path, whole)[0])


def test_a_tied_head_that_is_stored_twice_changes_in_both_places(tmp_path: Path) -> None:
    whole = make_whole(tmp_path / "base", "qwen2_5_vl")
    last = sorted((tmp_path / "base").glob("*.safetensors"))[-1]
    head = {"lm_head.weight": whole.lm_head.weight.detach().clone()}
    save_file(load_file(last) | head, last, {"format": "pt"})
    out, decoder, _ = check_merged(tmp_path, whole)
    assert torch.equal(tensors_in(out)["lm_head.weight"], decoder.lm_head.weight)


@pytest.mark.slow
def test_an_untied_head_stays_untied_whatever_the_configuration_says(tmp_path: Path) -> None:
    # Mistral Small 3's config.json does not say whether the head is tied, and the default is tied.
    whole = make_whole(tmp_path / "base", "mistral3")
    fields = json.loads((tmp_path / "base/config.json").read_text())
    assert not torch.equal(whole.lm_head.weight, whole.get_input_embeddings().weight)
    fields["tie_word_embeddings"] = True
    (tmp_path / "base/config.json").write_text(json.dumps(fields))
    check_merged(tmp_path, whole)


@pytest.mark.parametrize("name", fast_only(["gemma3", "qwen3_vl", "qwen3_vl_moe"], "gemma3"))
def test_an_adapter_of_the_decoder_loads_on_the_whole_and_merges_into_it(tmp_path: Path, name: str) -> None:
    whole = make_whole(tmp_path / "base", name)
    decoder, adapter = deepcopy(whole), {"rank": 2, "targets": ["q_proj", "down_proj"], "train_norms": True}
    if name == "qwen3_vl_moe":
        adapter = {"rank": 2, "targets": ["q_proj", "experts", "gate"], "ranks": {"experts": 3}, "alphas": {"gate": 5}}
    keep_text_part(decoder)
    trained = add_adapter(decoder, AdapterSection(**adapter), seed=1)
    with torch.no_grad():
        for one in trained.parameters():
            one.add_(0.05 * torch.randn(one.shape) * one.requires_grad)
    make_run(tmp_path / "run", tmp_path / "base", trained, adapter=adapter)
    report = export(tmp_path / "run", out=tmp_path / "adapter")
    assert report.check is not None and report.check.holds
    names: dict[str, Any] = {}
    exec("\n".join(python_lines(report, str(tmp_path / "adapter"))), names)
    # The vision tower has projections with the same names.
    adapted = {name for name, _ in names["model"].named_parameters() if "lora_" in name}
    assert adapted == {name for name, _ in trained.named_parameters() if "lora_" in name}
    ids = torch.arange(9)[None]
    with torch.no_grad():
        wanted = trained(input_ids=ids, use_cache=False).logits
        found = names["model"](input_ids=ids, use_cache=False).logits
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    merged = export(tmp_path / "run", out=tmp_path / "merged", merge=True)
    assert merged.check is not None and merged.check.holds
    changed = {
        name
        for name, one in tensors_in(tmp_path / "merged").items()
        if not one.equal(tensors_in(tmp_path / "base")[name])
    }
    assert any("q_proj" in name for name in changed) and not any("vision" in name for name in changed)
    with pytest.raises(UserError, match=r"^--dtype"):
        export(tmp_path / "run", out=tmp_path / "other", merge=True, weights="bf16")


@pytest.fixture
def gemma3(tmp_path: Path) -> tuple[Path, Path]:
    make_run(tmp_path / "run", tmp_path / "base", trained_decoder(make_whole(tmp_path / "base", "gemma3")))
    return tmp_path / "base", tmp_path / "run"


def test_other_weights_and_folders_are_not_copied_and_reported(gemma3: tuple[Path, Path]) -> None:
    base, run = gemma3
    (base / "consolidated.safetensors").write_bytes(b"the decoder as it was")
    (base / "original").mkdir()
    said: list[str] = []
    out = Path(export_run(ExportRequest(run_dir=run), said.append).out)
    assert f"not copied from {base}: consolidated.safetensors, original" in said
    assert not {"consolidated.safetensors", "original"} & {path.name for path in out.iterdir()}


def test_options_that_would_change_other_parts_are_refused(gemma3: tuple[Path, Path]) -> None:
    options: list[tuple[dict[str, Any], str]] = [({"weights": "bf16"}, "--dtype")]
    options += [({"max_shard_bytes": 7}, "--max-shard-size"), ({"tokenizer": Path("t")}, "--tokenizer")]
    for option, named in options:
        with pytest.raises(UserError, match=rf"{named}.*model\.part=text"):
            export(gemma3[1], **option)


def test_a_source_file_that_vanishes_is_named(gemma3: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, run = gemma3

    def find_and_remove(*args: Any) -> DecoderMerge:
        found = plan_merge(*args)
        (base / "preprocessor_config.json").unlink()
        return found

    monkeypatch.setattr("ray_ulysses.export.export_run.plan_merge", find_and_remove)
    with pytest.raises(RunError, match=r"model\.path='.*base': preprocessor_config\.json"):
        export(run)
    assert list((run / "export").iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        ("gone", UserError, "restore the checkpoint"),
        ("missing", RunError, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ("type", RunError, r"up_proj\.weight is I32"),
    ],
)
def test_a_mismatched_base_is_refused(tmp_path: Path, damage: str, error: type[Exception], said: str) -> None:
    base, name = tmp_path / "base", "model.layers.1.mlp.up_proj.weight"
    make_run(tmp_path / "run", base, trained_decoder(make_whole(base, "qwen2_vl")))
    (file,) = (path for path in base.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    if damage == "gone":
        base.rename(tmp_path / "elsewhere")
    else:
        taken = tensors.pop(name)
        if damage == "type":
            tensors[name] = taken.int()
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(error, match=said):
        export(tmp_path / "run")
    assert not (tmp_path / "run/export").exists()
