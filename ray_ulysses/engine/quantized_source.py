"""Determines the quantization format of stored weights, and builds Transformers' quantizer to dequantize them.

Quantized formats are inputs only: training, checkpoints and exports use bf16 or fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ray_ulysses.errors import UserError

_DEQUANTIZE = (
    "dequantize the model (load it with Transformers and save it with save_pretrained(DIRECTORY, "
    "save_original_format=False)), and set model.path: DIRECTORY"
)


def take_quantization(hf_config: Any, setting: str) -> dict[str, Any] | None:
    """Remove the ``quantization_config`` from a model configuration, and return it; None if there is none.

    An exported config.json would otherwise mark the trained weights as quantized.

    Raises:
        UserError: The format can't be dequantized while weights are loaded.
    """
    found = None
    # Transformers reads quantization_config from both configurations.
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None:
            found = found or dict(quantization)
            del config.quantization_config
    if found is not None:
        _refuse_unsupported(found, setting)
    return found


def format_name(quantization: Mapping[str, Any]) -> str:
    """Return the display name of a ``quantization_config``'s format, which must be supported."""
    method = quantization["quant_method"]
    if method == "mxfp4":
        return "MXFP4"
    if method == "fp8":
        # 128 is the default of Transformers' FineGrainedFP8Config; null means one scale per tensor.
        block = quantization.get("weight_block_size", (128, 128))
        return "FP8, a scale per " + ("tensor" if block is None else f"block of {block[0]} x {block[1]}")
    strategies = sorted({one["strategy"] for one in _compressed_weights(quantization)})
    return f"FP8 from compressed-tensors, a scale per {' or '.join(strategies)}"


def quantizer_of(quantization: Mapping[str, Any]) -> Any:
    """Return Transformers' quantizer, configured to dequantize weights while they are loaded."""
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    settings = AutoQuantizationConfig.from_dict(dict(quantization))
    settings.dequantize = True
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    quantizer.validate_environment()
    if quantization.get("quant_method") == "fp8" and settings.weight_block_size is not None:
        operation = _by_rows_of_blocks(settings.weight_block_size)
        quantizer.get_load_operations = lambda: {"dequantize": operation}
    return quantizer


def _by_rows_of_blocks(block: Sequence[int]) -> type:
    """Return Transformers' FP8 dequantization, applied to one row of blocks at a time.

    Transformers 5.23 dequantizes a whole matrix at once, in temporary tensors of 9 bytes per weight. It also divides a
    matrix evenly by the shape of its scales, and therefore rejects matrices whose last blocks are partial, such as
    DeepSeek-V3's ``kv_a_proj_with_mqa`` (576 rows in blocks of 128), and would use a wrong scale for 192 rows.
    """
    from torch.nn.functional import pad
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    class ByRowsOfBlocks(Fp8Dequantize):
        def _dequantize_one(self, quantized: Any, scales: Any, output_dtype: Any = None) -> Any:
            rows, columns = quantized.shape[-2:]
            grid = [-(-size // length) for size, length in zip((rows, columns), block, strict=True)]
            if output_dtype is None or list(scales.shape[-2:]) != grid or not quantized.is_floating_point():
                return super()._dequantize_one(quantized, scales, output_dtype)
            result = quantized.new_empty(quantized.shape, dtype=output_dtype)
            for number in range(grid[0]):
                own = slice(number * block[0], (number + 1) * block[0])
                full = pad(quantized[..., own, :].float(), (0, -columns % block[1]))
                part = super()._dequantize_one(full, scales[..., number : number + 1, :], output_dtype)
                result[..., own, :] = part[..., :columns]
            return result

    return ByRowsOfBlocks


def _compressed_weights(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups") or {}
    return [group.get("weights") or {} for group in groups.values()]


def _refuse_unsupported(quantization: Mapping[str, Any], setting: str) -> None:
    method, name = quantization.get("quant_method"), ""
    if method in ("fp8", "mxfp4"):
        return
    if method == "compressed-tensors":
        weights = _compressed_weights(quantization)
        kinds = {f"{one.get('type')}-{one.get('num_bits')}-{one.get('strategy')}" for one in weights}
        if weights and kinds <= {"float-8-channel", "float-8-tensor", "float-8-block"}:
            if find_spec("compressed_tensors") is None:
                raise UserError(
                    f"{setting}: the weights are quantized (quantization_config: compressed-tensors), which requires "
                    "the package compressed-tensors; pip install compressed-tensors"
                )
            return
        name = f" with {', '.join(sorted(kinds)) or 'no config_groups'}"
    raise UserError(
        f"{setting}: the weights are quantized (quantization_config: {method}{name}), and only FP8 block scales (fp8), "
        f"MXFP4 (mxfp4) and FP8 from compressed-tensors can be loaded; {_DEQUANTIZE}"
    )
