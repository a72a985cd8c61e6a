"""Refuses models that can't be trained exactly with Ulysses attention, before their weights are loaded.

``refuse_config`` checks a configuration. ``refuse_inexact`` checks a model: its configuration, its modules, and the
forward of a small copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ray_ulysses.attention.mixers import find_mixers, read_linears, shared_sizes
from ray_ulysses.attention.probe import ProbeResult, probe_model
from ray_ulysses.attention.trunk import trunk_of
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import HYBRID_LAYER_TYPES
from ray_ulysses.parallel.mesh import SequenceMesh

# "attention" is an older name for "full_attention"; "mlp" and "moe" layers have no attention.
_EXACT_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"})
# Substrings of CamelCase class names, matched case-sensitively: "ssm" would match GptOssModel.
_RECURRENT_MARKS = (
    "SSM",
    "Mamba",
    "Rwkv",
    "Recurrent",
    "LinearAttention",
    "LightningAttention",
    "DeltaNet",
    "Retention",
)
_MIXING_MODULES = (nn.Conv1d, nn.RNNBase)
_RANDOM_WORDS = ("dropout", "pdrop", "layerdrop", "drop_path", "jitter")
# Prefixes of settings for classification and summary heads, which causal language models lack.
_OTHER_HEADS = ("classifier_", "summary_")
_CROSS_ATTENTION = "an encoder and a decoder; only models with self-attention alone can be trained exactly"
_UNSUPPORTED_SETTINGS = {
    "alibi": "ALiBi position biases",
    "index_topk": "attention to tokens selected by an indexer",
    "add_cross_attention": "cross attention",
    "cross_attention_layers": "cross attention",
}


def refuse_config(config: Any) -> None:
    """Raise if a configuration shows that its model can't be trained exactly. No model is built.

    Args:
        config: A ``PreTrainedConfig``. For a multimodal model, the text configuration is checked.

    Raises:
        UserError: The configuration is not supported. The message contains the setting, the reason and a solution.
    """
    config = config.get_text_config(decoder=True)
    kind = str(config.model_type)
    values: dict[str, Any] = config.to_dict()
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind} has {_CROSS_ATTENTION}")
    exact = _EXACT_LAYER_TYPES | HYBRID_LAYER_TYPES.get(kind, frozenset())
    _refuse_layers(kind, sorted(set(getattr(config, "layer_types", None) or ()) - exact))
    _refuse_noise(values)
    _refuse_unsupported(kind, values)


def refuse_direction(result: ProbeResult, kind: str, *, is_causal: bool) -> None:
    """Raise if a model's attention is bidirectional in a causal language model, or causal in a masked one.

    Raises:
        UserError: The message contains a module with the other kind of attention.
    """
    if is_causal and (name := result.bidirectional()) is not None:
        raise UserError(
            f"{kind} has bidirectional attention at {name}, with which it would see the tokens that it predicts; use a "
            "decoder (for BERT, set is_decoder: true in its config.json), or train a masked language model"
        )
    if not is_causal and (name := next((at for at, layer in result.layers.items() if layer.causal), None)) is not None:
        raise UserError(
            f"{kind} has causal attention at {name}, but a masked language model needs bidirectional attention; use an "
            "encoder such as modernbert, or train a causal language model"
        )


def refuse_inexact(model: nn.Module, config: Any, mesh: SequenceMesh | None) -> ProbeResult:
    """Raise if training the model on this mesh would not be equivalent to training in one process.

    The model may be on any device, including meta, and is not changed. If ``mesh`` is None, the mesh is not checked.

    Returns:
        The result of probing the model's forward.

    Raises:
        UserError: The model is not supported. The message contains the module or setting, the reason and a solution.
    """
    kind = str(getattr(config, "model_type", type(model).__name__))
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    # An encoder appears only in the complete configuration, not in the text configuration.
    if getattr(base.config, "is_encoder_decoder", False):
        raise UserError(f"{kind} has {_CROSS_ATTENTION}")
    # Transformers does not set this flag for hybrids; their attention is checked by the probe.
    if not getattr(base, "_supports_attention_backend", False) and not any(find_mixers(base)):
        raise UserError(
            f"{kind} does not use Transformers' attention interface, so its attention can't be replaced; use an "
            "architecture that supports attention backends, such as Llama, Qwen or Mistral"
        )
    refuse_config(config)
    _refuse_empty(model, kind)
    _refuse_adapters(model)
    _refuse_modules(model, base, kind)
    result = probe_model(trunk_of(base))
    if result.problems:
        raise UserError(f"{kind} can't be trained exactly on slices of a row: {'; '.join(result.problems)}")
    if mesh is not None:
        _refuse_shares(kind, base, result, mesh)
        _refuse_heads(kind, result, mesh)
    return result


def _refuse_empty(model: nn.Module, kind: str) -> None:
    # Under ZeRO-3 every parameter is an empty placeholder whose ds_numel is the full size.
    empty = [name for name, one in model.named_parameters() if getattr(one, "ds_numel", one.numel()) == 0]
    if empty:
        raise UserError(
            f"{kind}: parameter {empty[0]} is empty, and ZeRO can't partition empty parameters; correct the sizes in "
            "the model's configuration, or remove the parameter"
        )


def refuse_mixed_devices(model: nn.Module) -> None:
    """Raise if the model's parameters are on several devices.

    Raises:
        UserError: The parameters are on several devices. The message contains a parameter for each device.
    """
    first: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(str(parameter.device), name)
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in sorted(first.items()))
        raise UserError(
            f"the model's parameters are on several devices ({places}), but each rank needs them on one device; load "
            "the model without device_map, and use ZeRO and parallel.sp_size to shard it"
        )


def _refuse_layers(kind: str, found: list[str]) -> None:
    if found:
        raise UserError(
            f"{kind} has unsupported recurrent or attention layers ({', '.join(found)}); sharding the sequence would "
            "silently produce wrong gradients. Use a model with full or sliding-window attention only"
        )


def noise_settings(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings of a configuration that enable dropout or other noise, with their values."""
    return {
        name: value
        for name, value in values.items()
        if any(word in name for word in _RANDOM_WORDS)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
    }


def _refuse_noise(values: Mapping[str, Any]) -> None:
    for name, value in noise_settings(values).items():
        if not name.startswith(_OTHER_HEADS):
            raise UserError(
                f"model.config.{name}={value}: with dropout or other noise, training would depend on the world size, "
                f"because random numbers differ between layouts; set {name}: 0.0 (for pretrained weights, in "
                "model.path's config.json)"
            )


def _refuse_unsupported(kind: str, values: Mapping[str, Any]) -> None:
    for name, what in _UNSUPPORTED_SETTINGS.items():
        if values.get(name):
            raise UserError(
                f"{kind} sets {name}={values[name]!r}: {what} can't be computed exactly on slices of a row; use a "
                "decoder with full or sliding-window attention"
            )


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse PEFT adapters that read or extend the row outside the decoder's forward, which the probe does not run."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        method = f"the adapter {name} ({type(config).__name__})"
        # PEFT's forward searches the row for these tokens, and under Ulysses would only see a slice.
        if getattr(config, "alora_invocation_tokens", None):
            raise UserError(
                f"{method} sets alora_invocation_tokens={config.alora_invocation_tokens}: Activated LoRA starts at the "
                "last occurrence of these tokens in the row, which is wrong for packed documents and slices; remove "
                "alora_invocation_tokens, so that the adapter applies to all tokens"
            )
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise UserError(
                f"{method} adds virtual tokens or prompts, which are not supported for slices of packed documents; use "
                "an adapter that modifies weights, such as LoRA"
            )


def _refuse_modules(model: nn.Module, base: Any, kind: str) -> None:
    # Convolutions mix neighboring tokens. Transformers' Conv1D, in GPT-2, is a linear layer.
    known = _known_to_mix(model)
    # Kimi Linear's full attention is named KimiLinearAttention, so the class name alone does not show recurrence.
    plain = type(base).__name__.split("For")[0] + "Attention"
    recurrent = {
        type(module).__name__
        for name, module in model.named_modules()
        if (isinstance(module, _MIXING_MODULES) or any(mark in type(module).__name__ for mark in _RECURRENT_MARKS))
        and name not in known
        and type(module).__name__ != plain
    }
    _refuse_layers(kind, sorted(recurrent))
    for name, module in read_linears(model):
        # With modules_to_save, PEFT replaces the module by a trained copy, whose weight is read correctly.
        if type(module) is not nn.Linear and not hasattr(module, "original_module"):
            raise UserError(
                f"{kind} has a {type(module).__module__}.{type(module).__name__} at {name}: the enclosing layer reads "
                "this module's weight and does not call the module, so the adapter would have no effect; remove the "
                "module from the adapter's target_modules, or add it to modules_to_save to train its full weight"
            )
    for name, module in model.named_modules():
        # The configuration does not show all dropout: an adapter may add its own.
        rate = getattr(module, "p", 0.0) if "Dropout" in type(module).__name__ else 0.0
        if rate:
            raise UserError(
                f"{kind} has dropout {rate} at {name}: with dropout, training would depend on the world size, because "
                "random masks differ between layouts; build the model with dropout 0.0"
            )


def _known_to_mix(model: nn.Module) -> set[str]:
    """Return the names of supported recurrent layers, of their convolutions, and of the modules that contain them."""
    known: set[str] = set()
    for name, mixer, layout in find_mixers(model):
        parts = name.split(".")
        known.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
        # A convolution wrapped by an adapter is not supported: the adapter would have no effect.
        if layout.convolution and type(getattr(mixer, layout.convolution)) is nn.Conv1d:
            known.add(f"{name}.{layout.convolution}")
    return known


def _refuse_shares(kind: str, model: nn.Module, result: ProbeResult, mesh: SequenceMesh) -> None:
    if not result.mixers:
        return
    most = min((layer.num_heads for layer in result.layers.values()), default=mesh.sp_size)
    valid = [size for size in shared_sizes(model) if size <= most]
    listed = ", ".join(map(str, valid))
    if mesh.ring_size > 1:
        raise UserError(
            f"parallel.ring_size={mesh.ring_size} splits rows over a ring, but {kind} has recurrent layers that need "
            f"complete rows; set parallel.ring_size: 1, and parallel.sp_size to one of {listed}"
        )
    if mesh.ulysses_size not in valid:
        shared = sorted({f"{layout.num_units} {layout.unit}" for _, _, layout in find_mixers(model)})
        raise UserError(
            f"parallel.sp_size={mesh.sp_size} does not evenly divide the {' and the '.join(shared)} in {kind}; set "
            f"parallel.sp_size to one of {listed}"
        )


def _refuse_heads(kind: str, result: ProbeResult, mesh: SequenceMesh) -> None:
    num_heads = min((layer.num_heads for layer in result.layers.values()), default=mesh.ulysses_size)
    if mesh.ulysses_size <= num_heads:
        return
    rings = (size for size in range(1, mesh.sp_size + 1) if mesh.sp_size % size == 0)
    ring = next(size for size in rings if mesh.sp_size // size <= num_heads)
    raise UserError(
        f"parallel.sp_size={mesh.sp_size} with ring_size={mesh.ring_size} divides {kind}'s {num_heads} attention heads "
        f"among {mesh.ulysses_size} ranks, but each rank needs at least one head (sp_size / ring_size <= {num_heads}); "
        f"set parallel.ring_size: {ring}, or parallel.sp_size to at most {num_heads * mesh.ring_size}"
    )
