"""Quantized checkpoints are dequantized while they are loaded, bitwise as Transformers does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.model_config import source_format
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.unit.config.trees import small_tree
from tests.unit.engine.quantized_checkpoints import QUANTIZED, dequantized_by_transformers, write_checkpoint


def config_of(directory: Path, name: str, dtype: str = "bf16", **changes: Any) -> Config:
    part = "text" if QUANTIZED[name][0] == "qwen3_vl" else "whole"
    model = {"init": "pretrained", "path": str(directory), "dtype": dtype, "part": part}
    return parse_config({**small_tree(**changes), "model": model})


@pytest.mark.parametrize("dtype", fast_only(["bf16", "fp32"], "bf16"))
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_equal_bitwise_those_that_transformers_dequantizes(tmp_path: Path, name: str, dtype: str) -> None:
    write_checkpoint(tmp_path, name)
    model = build_model(config_of(tmp_path, name, dtype))
    wanted = dequantized_by_transformers(tmp_path, name, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    state = model.state_dict()
    assert state.keys() == wanted.keys() or (QUANTIZED[name][0] == "qwen3_vl" and state.keys() < wanted.keys())
    for key, tensor in state.items():
        # Transformers 5.23 does not cast the unquantized tensors of an FP8 checkpoint to fp32.
        is_cast = dtype == "fp32" and wanted[key].dtype == torch.bfloat16
        assert tensor.dtype == (torch.float32 if is_cast else wanted[key].dtype), key
        assert torch.equal(tensor, wanted[key].to(tensor.dtype)), key
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("qwen3-fp8", "FP8, a scale per block of 16 x 16"),
        ("gpt_oss-mxfp4", "MXFP4"),
        ("qwen3-channel", "FP8 from compressed-tensors, a scale per channel"),
    ],
)
def test_the_format_of_the_files_is_named(tmp_path: Path, name: str, wanted: str) -> None:
    write_checkpoint(tmp_path, name)
    config = config_of(tmp_path, name)
    assert source_format(config) == wanted
    # A plan does not read the hub if the configuration is inline.
    described = json.loads((tmp_path / "config.json").read_text())
    model = config.model.model_copy(update={"path": "org/model", "config": described})
    assert source_format(config.model_copy(update={"model": model})) == wanted
    random = config.model.model_copy(update={"init": "random"})
    assert source_format(config.model_copy(update={"model": random})) is None


DOWN = "model.layers.0.mlp.down_proj.weight"


def test_the_last_blocks_of_a_matrix_may_be_partial(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3-fp8")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"]["weight_block_size"] = [24, 40]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        rows, columns = tensors[name.removesuffix("_scale_inv")].shape
        tensors[name] = torch.rand(-(-rows // 24), -(-columns // 40))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    state = build_model(config_of(tmp_path, "qwen3-fp8")).state_dict()
    rows, columns = tensors[DOWN].shape
    assert rows % 24 and columns % 40
    scale = tensors[f"{DOWN}_scale_inv"].repeat_interleave(24, 0)[:rows].repeat_interleave(40, 1)[:, :columns]
    assert torch.equal(state[DOWN], (tensors[DOWN].float() * scale).bfloat16())


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("qwen3-fp8", f"{DOWN}_scale_inv"),
        ("qwen3_moe-fp8", "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"),
        ("gpt_oss-mxfp4", "model.layers.1.mlp.experts.down_proj_scales"),
        ("qwen3-channel", f"{DOWN}_scale"),
        ("qwen3_moe-channel", "model.layers.1.mlp.experts.3.gate_proj.weight_scale"),
    ],
)
def test_a_quantized_tensor_without_its_scale_is_refused(tmp_path: Path, name: str, scale: str) -> None:
    write_checkpoint(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[scale]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"^model\.path=.* is quantized, but its scale is missing"):
        build_model(config_of(tmp_path, name))


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "nvfp4"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}},
        },
    ],
    ids=["awq", "nvfp4", "compressed-int4"],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, "qwen3-fp8")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    with pytest.raises(UserError, match=rf"quantization_config: {quantization['quant_method']}.*dequantize the model"):
        build_model(config_of(tmp_path, "qwen3-fp8"))
