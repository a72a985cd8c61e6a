from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from ray_ulysses.checkpoint.state import StateDescription, TensorSpec
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model, check_architecture, compile_layers, differs_from_stored
from ray_ulysses.engine.model_config import described_config, planned_config
from ray_ulysses.errors import UserError
from ray_ulysses.export.architecture import describe
from tests.unit.attention.models import tiny_model
from tests.unit.config.trees import small_tree

INLINE = small_tree()["model"]["config"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def config_of(**changes: Any) -> Config:
    return parse_config(small_tree(**changes))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(config_of(run__seed=5)).save_pretrained(path)
    return path


def pretrained(directory: Path | str, **changes: Any) -> Config:
    return config_of(**{"model__init": "pretrained", "model__path": str(directory), "model__config": None, **changes})


def weights(config: Config) -> dict[str, torch.Tensor]:
    return dict(build_model(config).state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_random_model_depends_on_the_seed_alone_and_is_rounded_to_its_dtype() -> None:
    wanted = weights(config_of())
    torch.manual_seed(99)
    torch.rand(3)
    other_world = config_of(cluster__workers=2, parallel__sp_size=2, memory__gradient_checkpointing=False)
    assert same(weights(other_world), wanted)
    assert not same(weights(config_of(run__seed=1)), wanted)
    assert same(weights(config_of(model__dtype="bf16")), {name: one.bfloat16() for name, one in wanted.items()})


def test_weights_or_the_shape_alone_are_loaded_from_a_local_directory(directory: Path) -> None:
    wanted = weights(config_of(run__seed=5))
    assert same(weights(pretrained(directory)), wanted)
    assert same(weights(pretrained(directory, model__config=INLINE, run__seed=8)), wanted)
    assert same(weights(pretrained(directory, model__init="random", run__seed=3)), weights(config_of(run__seed=3)))


def test_a_model_that_is_not_the_described_one_is_refused_with_every_field(directory: Path) -> None:
    described = {**INLINE, "vocab_size": 400, "num_hidden_layers": 3}
    with pytest.raises(UserError) as error:
        build_model(pretrained(directory, model__config=described))
    assert "vocab_size is 320 in model.path and 400 in model.config" in str(error.value)
    assert "num_hidden_layers is 2 in model.path and 3 in model.config" in str(error.value)


UP = "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def half(path: Path, _: Tensors) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def save(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (half, "weights can't be loaded"),
        (lambda path, _: (path / "model.safetensors").unlink(), "weights can't be loaded"),
        (lambda path, _: (path / "generation_config.json").write_text("[]"), "weights can't be loaded"),
        (lambda path, _: (path / "config.json").unlink(), r"no config\.json with a model_type"),
        (lambda path, own: save(path, own | {"model.norm.weight": torch.zeros(5)}), "weights can't be loaded"),
        (
            lambda path, own: save(path, {name: own[name] for name in own.keys() - {UP}}),
            rf"lack 1 of the model\'s tensors \({UP}",
        ),
        # Transformers writes such files for a model that was dequantized on loading.
        (
            lambda path, own: save(
                path, own | {UP: own[UP].to(torch.float8_e4m3fn), f"{UP}_scale_inv": torch.ones(1, 1)}
            ),
            r"quantized \(.*up_proj\.weight_scale_inv scales",
        ),
    ],
    ids=["half", "none", "generation", "no-config", "other-shape", "lacks-one", "scales"],
)
def test_a_directory_without_the_complete_model_is_refused(
    directory: Path, tmp_path: Path, damage: Any, text: str
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    damage(tmp_path, load_file(tmp_path / "model.safetensors"))
    with pytest.raises(UserError, match=rf"^model\.path='.*': .*{text}"):
        build_model(pretrained(tmp_path))


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    tied = {**INLINE, "tie_word_embeddings": True}
    build_model(config_of(model__config=tied)).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert same(weights(pretrained(tmp_path)), weights(config_of(model__config=tied)))


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["single", "shards"])
def test_a_hub_head_is_untied_though_its_config_ties_it(
    shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under ZeRO-3, Transformers 5.23 would compare empty placeholders and drop the head.
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    build_model(config_of()).save_pretrained(snapshot, max_shard_size=shard_size)
    fields = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    inline = {**fields, "tie_word_embeddings": True}
    for config in (pretrained("owner/name"), pretrained("owner/name", model__config=inline)):
        assert described_config(config).tie_word_embeddings is False
    # Neither a checkpoint, which records the tie, nor planning needs the weights from the hub.

    def away(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("the hub is away")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", away)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert described_config(pretrained("owner/name"), is_tied=True).tie_word_embeddings is True
    assert planned_config(pretrained("owner/name")).tie_word_embeddings is True
    # If one rank can't download the weights, it must not continue with another model than the other ranks.
    with pytest.raises(UserError, match=r"model\.path='owner/name': the weights can't be downloaded \(the hub at "):
        described_config(pretrained("owner/name"))


@pytest.mark.parametrize(
    ("model_type", "said"), [("llamma", "did you mean 'llama'"), ("vit", "has no causal language model for this type")]
)
def test_a_model_type_without_a_decoder_is_refused_in_one_line(model_type: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"model_type='{model_type}': .*{said}") as caught:
        check_architecture(config_of(model__config={**INLINE, "model_type": model_type}))
    assert len(str(caught.value)) < 300, "the error lists all model types"


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_weights_in_an_unknown_quantized_format_are_refused_before_they_are_read(tmp_path: Path, init: str) -> None:
    quantized = {**INLINE, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    config = pretrained(tmp_path, model__init=init)
    for load in (check_architecture, build_model, lambda config: describe(config, "model")):
        with pytest.raises(UserError, match=r"model\.path='.*': the weights are quantized \(.* gptq\).* dequantize"):
            load(config)


def test_code_of_a_models_repository_is_refused_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_: str = "") -> str:
        raise AssertionError("a worker has nobody to ask")

    monkeypatch.setattr("builtins.input", ask)
    code = tmp_path / "configuration_own.py"
    code.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    classes = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "configuration_own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**INLINE, "model_type": "own", "auto_map": classes}))
    for load in (check_architecture, build_model):
        with pytest.raises(UserError, match=r"model\.path=.*: model_type 'own' is defined by Python code .*never"):
            load(pretrained(tmp_path))
    assert not (tmp_path / "ran").exists()
    # For a type that Transformers supports, the repository's code is ignored.
    (tmp_path / "config.json").write_text(json.dumps({**INLINE, "auto_map": classes}))
    check_architecture(pretrained(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("tied", "adapter"), [(False, None), (True, {"rank": 4})], ids=["untied", "tied-adapter"])
def test_a_stored_state_of_another_model_is_found(tied: bool, adapter: dict[str, int] | None) -> None:
    inline = {**INLINE, "tie_word_embeddings": tied}
    config = config_of(model__config=inline, model__adapter=adapter)
    model = build_model(config)
    kinds = {name: "fp32" if one.requires_grad else "frozen" for name, one in model.named_parameters()}
    tensors = {
        f"{kinds[name]}/{name}": TensorSpec(shape=tuple(one.shape), dtype="F32")
        for name, one in model.named_parameters()
    }
    state = StateDescription(tensors=tensors, tied={"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert differs_from_stored(config, state) is None
    for change, text in (
        ({"intermediate_size": 256}, "is [256, 96], stored [128, 96]"),
        ({"num_hidden_layers": 3}, "is not in the checkpoint"),
        ({"num_hidden_layers": 1}, "is in the checkpoint only"),
    ):
        found = differs_from_stored(config_of(model__config=inline | change, model__adapter=adapter), state)
        assert found is not None and text in found


def test_layers_are_compiled_under_their_own_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    names, compiled = list(model.state_dict()), []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    compile_layers(model)
    assert compiled == list(model.model.layers) and list(model.state_dict()) == names
    with pytest.raises(UserError, match=r"^model\.compile=true: Linear has no layer of class"):
        compile_layers(torch.nn.Linear(2, 2))
