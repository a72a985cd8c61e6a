"""Tiny checkpoints in each quantized format, and the weights that Transformers dequantizes from them.

FP8 blocks are made by Transformers' ``Fp8Quantize``, and FP8 with scales per channel, tensor or block by the compressor
of compressed-tensors, both on the CPU. MXFP4's writer needs a GPU kernel, so its bytes are random, in the layout of the
published gpt-oss checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

from tests.unit.attention.models import tiny_model
from tests.unit.attention.multimodal import multimodal_model

BLOCK = 16
_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 16, "intermediate_size": 96},
    "glm4_moe": {
        "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "head_dim": 16,
    },
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
}  # fmt: skip
QUANTIZED: dict[str, tuple[str, str]] = {
    "qwen3-fp8": ("qwen3", "fp8"),
    "qwen3_moe-fp8": ("qwen3_moe", "fp8"),
    "deepseek_v3-fp8": ("deepseek_v3", "fp8"),
    "glm4_moe-fp8-static": ("glm4_moe", "fp8-static"),
    "deepseek_v3-fp8-ue8m0": ("deepseek_v3", "fp8-ue8m0"),
    "gpt_oss-mxfp4": ("gpt_oss", "mxfp4"),
    "qwen3-channel": ("qwen3", "channel"),
    "qwen3-tensor": ("qwen3", "tensor"),
    "qwen3-block": ("qwen3", "block"),
    "qwen3_moe-channel": ("qwen3_moe", "channel"),
    "glm4_moe-tensor": ("glm4_moe", "tensor"),
    "qwen3_vl-fp8": ("qwen3_vl", "fp8"),
}
"""Architecture and format of each checkpoint."""


def write_checkpoint(directory: Path, name: str, **sizes: Any) -> None:
    """Write a checkpoint of `QUANTIZED`, with other sizes if given: ``config.json`` and ``model.safetensors``."""
    kind, how = QUANTIZED[name]
    model: Any = tiny_model(kind, **(_MODELS[kind] | sizes)) if kind in _MODELS else multimodal_model(kind)
    with torch.no_grad():
        for tensor_name, buffer in model.named_buffers():
            if tensor_name.endswith("e_score_correction_bias"):
                # Close to one another relative to their size, as in GLM-5.2: bf16 would merge them.
                buffer.copy_(5 + 0.001 * torch.arange(buffer.numel()))
    model.to(torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors |= {one: buffer.float() for one, buffer in model.named_buffers() if one in tensors}
    quantize = {"fp8": _fp8, "mxfp4": _mxfp4}.get(how.partition("-")[0], _compressed)
    written, quantization = quantize(tensors, how)
    save_file(written, directory / "model.safetensors", {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))


def dequantized_by_transformers(directory: Path, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state that Transformers loads from a checkpoint of `QUANTIZED`, dequantized."""
    kind, how = QUANTIZED[name]
    plain: Any = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}.get(how.partition("-")[0], CompressedTensorsConfig)
    auto: Any = AutoModelForCausalLM if kind in _MODELS else AutoModelForMultimodalLM
    model, info = auto.from_pretrained(
        directory, quantization_config=plain(dequantize=True), dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    return dict(model.state_dict())


def _is_quantized(name: str, tensor: torch.Tensor) -> bool:
    skipped = ("embed", "lm_head", "norm", "gate.weight", "visual", "router")
    return name.endswith(".weight") and tensor.dim() == 2 and not any(one in name for one in skipped)


def _fp8(tensors: dict[str, torch.Tensor], how: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.quantizers.auto import AutoHfQuantizer

    scales: dict[str, Any] = {"scale_fmt": "ue8m0"} if how == "fp8-ue8m0" else {}
    settings = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), **scales)
    writer: Any = Fp8Quantize(AutoHfQuantizer.from_config(settings, pre_quantized=True))
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found = writer.convert({name: tensor}) if _is_quantized(name, tensor) else {name: tensor}
        assert len(found) == 2 or not _is_quantized(name, tensor), name
        written |= found
        if how == "fp8-static" and len(found) == 2:
            written[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
    activations = "static" if how == "fp8-static" else "dynamic"
    block = {"weight_block_size": [BLOCK, BLOCK]}
    return written, {"quant_method": "fp8", "activation_scheme": activations, "fmt": "e4m3", **block, **scales}


def _mxfp4(tensors: dict[str, torch.Tensor], _: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    written = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            written[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        written[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        written[f"{name}_scales"] = torch.randint(118, 125, shape, dtype=torch.uint8, generator=generator)
    return written, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def _compressed(tensors: dict[str, torch.Tensor], strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not _is_quantized(name, tensor):
            written[name] = tensor
            continue
        rows, columns = tensor.shape
        if strategy == "block":
            blocks = tensor.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            largest = blocks.abs().amax((1, 3))
        else:
            largest = tensor.abs().amax(1, keepdim=True) if strategy == "channel" else tensor.abs().max()[None]
        found = compressor.compress({"weight": tensor, "weight_scale": (largest.float() / 448).bfloat16()}, scheme)
        written |= {f"{name.removesuffix('weight')}{key}": one for key, one in found.items()}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    common = {"format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return written, {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **common}
