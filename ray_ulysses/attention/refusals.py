"""Refuses models that Ulysses attention can't train exactly, before weights are read.

``refuse_config`` reads a configuration. ``refuse_inexact`` also inspects the modules and probes the forward of a small
copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ray_ulysses.attention.mixers import find_mixers, read_linears, shared_sizes
from ray_ulysses.attention.probe import ProbeResult, probe_model
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import HYBRID_LAYER_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ray_ulysses.parallel.mesh import SequenceMesh

# "attention" is an older name for full attention; "mlp" and "moe" layers have no attention.
_EXACT_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"})
# Parts of CamelCase class names; in lower case, "ssm" would match GptOssModel.
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
# Prefixes of settings for heads that a causal language model does not have.
_OTHER_HEADS = ("classifier_", "summary_")
_UNSUPPORTED_SETTINGS = {
    "alibi": "ALiBi position biases",
    "index_topk": "attention to tokens chosen by an indexer",
    "add_cross_attention": "cross attention",
    "cross_attention_layers": "cross attention",
}


def refuse_config(config: Any) -> None:
    """Raise if a configuration alone shows that its decoder can't be trained exactly; build no model.

    Args:
        config: A ``PreTrainedConfig``; for a multimodal model, its text configuration is checked.

    Raises:
        UserError: Names the architecture or setting, the reason, and a solution.
    """
    config = config.get_text_config(decoder=True)
    kind = str(config.model_type)
    values: dict[str, Any] = config.to_dict()
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind} has an encoder; only decoders with causal self-attention can be trained exactly")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        raise UserError(f"{kind} is set to attend in both directions; only causal attention is supported")
    exact = _EXACT_LAYER_TYPES | HYBRID_LAYER_TYPES.get(kind, frozenset())
    _refuse_layers(kind, sorted(set(getattr(config, "layer_types", None) or ()) - exact))
    _refuse_noise(values)
    _refuse_unsupported(kind, values)


def refuse_inexact(model: nn.Module, config: Any, mesh: SequenceMesh | None) -> ProbeResult:
    """Raise if the model would not train on this mesh exactly as in one process.

    The model may be on any device, initialized or not, and is not changed; ``mesh`` is ``None`` if it is not known yet.

    Returns:
        The result of probing the model's forward.

    Raises:
        UserError: Names the architecture or setting, the reason, and a solution.
    """
    kind = str(getattr(config, "model_type", type(model).__name__))
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    # The text configuration does not show that there is an encoder.
    if getattr(base.config, "is_encoder_decoder", False):
        raise UserError(f"{kind} has an encoder; only decoders with causal self-attention can be trained exactly")
    # Transformers does not set this for hybrids; the probe finds attention that bypasses the interface.
    if not getattr(base, "_supports_attention_backend", False) and not any(find_mixers(base)):
        raise UserError(
            f"{kind} does not take its attention from Transformers' attention interface, so its attention can't be "
            "replaced; use an architecture that supports attention backends (Llama, Qwen, Mistral and most others do)"
        )
    refuse_config(config)
    _refuse_empty(model, kind)
    _refuse_adapters(model)
    _refuse_modules(model, kind)
    result = probe_model(base)
    if result.problems:
        raise UserError(f"{kind} can't be trained exactly over slices of a row: {'; '.join(result.problems)}")
    if mesh is not None:
        _refuse_shares(kind, base, result, mesh)
        _refuse_heads(kind, result, mesh)
    return result


def _refuse_empty(model: nn.Module, kind: str) -> None:
    """Refuse parameters without elements, which ZeRO can't partition."""
    # ZeRO-3 leaves an empty placeholder that stores the size.
    empty = [name for name, one in model.named_parameters() if getattr(one, "ds_numel", one.numel()) == 0]
    if empty:
        raise UserError(
            f"{kind}: the parameter {empty[0]} has no elements, so it can't be partitioned; correct the sizes in the "
            "model's configuration, or remove the parameter from the model"
        )


def refuse_mixed_devices(model: nn.Module) -> None:
    """Raise if the model's parameters are on several devices.

    Raises:
        UserError: Names one parameter per device.
    """
    first: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(str(parameter.device), name)
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in sorted(first.items()))
        raise UserError(
            f"the model's parameters are on several devices ({places}); a rank needs the whole model on one device: "
            "load it without device_map, and shard it with parallel.sp_size and ZeRO instead"
        )


def _refuse_layers(kind: str, found: list[str]) -> None:
    if found:
        raise UserError(
            f"{kind} has layers that carry state along the sequence or use another kind of attention "
            f"({', '.join(found)}); sharding the sequence would give wrong gradients that the loss does not show. "
            "Use a decoder with full or sliding-window attention only"
        )


def _refuse_noise(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        is_random = any(word in name for word in _RANDOM_WORDS) and not name.startswith(_OTHER_HEADS)
        if is_random and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            raise UserError(
                f"model.config.{name}={value}: dropout above 0 draws different masks on different layouts, so "
                f"a run would depend on its world size (as with any other noise); set {name}: 0.0, for pretrained "
                "weights in the config.json of model.path"
            )


def _refuse_unsupported(kind: str, values: Mapping[str, Any]) -> None:
    for name, what in _UNSUPPORTED_SETTINGS.items():
        if values.get(name):
            raise UserError(
                f"{kind} sets {name}={values[name]!r}: {what} can't be computed exactly over slices of a row; use a "
                "decoder with full or sliding-window attention"
            )


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse PEFT adapters that read or extend the row outside the decoder's forward, where the probe can't see it."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        method = f"the adapter {name} ({type(config).__name__})"
        # PEFT's own forward searches the whole row for the tokens and passes each layer an offset.
        if getattr(config, "alora_invocation_tokens", None):
            raise UserError(
                f"{method} sets alora_invocation_tokens={config.alora_invocation_tokens}: Activated LoRA starts at the "
                "row's last occurrence of these tokens, regardless of documents and slices; leave them out, so that it "
                "acts on every token"
            )
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise UserError(
                f"{method} adds virtual tokens or prompts to the row, which is not supported for slices of packed "
                "documents; use an adapter of the weights, such as LoRA"
            )


def _refuse_modules(model: nn.Module, kind: str) -> None:
    # A convolution mixes neighbouring tokens; Transformers' Conv1D is a linear layer of GPT-2.
    known = _known_to_mix(model)
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    # The full attention of Kimi Linear is named KimiLinearAttention; the probe checks that it is attention.
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
        # PEFT's modules_to_save replaces the module with a copy that has its own weight.
        if type(module) is not nn.Linear and not hasattr(module, "original_module"):
            raise UserError(
                f"{kind} has a {type(module).__module__}.{type(module).__name__} at {name}: the layer around it reads "
                "its weight instead of calling it, so an adapter there would have no effect; leave it out of the "
                "adapter's target_modules, or train it whole with modules_to_save"
            )
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise UserError(
                f"{kind} attends in both directions at {name}; only causal attention is supported (train only the text "
                "decoder of a multimodal model; a BERT decoder needs is_decoder: true in its config.json)"
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UserError(
                f"{kind} counts positions from its padding token ({name}), so packed documents would get other "
                "positions than alone; use a decoder whose positions start at 0"
            )
        # Not all dropout is in the configuration: an adapter may have its own.
        rate = getattr(module, "p", 0.0) if "Dropout" in type(module).__name__ else 0.0
        if rate:
            raise UserError(
                f"{kind} has a dropout of {rate} at {name}: dropout above 0 draws different masks on different "
                "layouts, so a run would depend on its world size; build it with dropout 0.0"
            )


def _known_to_mix(model: nn.Module) -> set[str]:
    """Return the names of layers that carry state and can be trained exactly, and of the modules around them."""
    known: set[str] = set()
    for name, mixer, layout in find_mixers(model):
        parts = name.split(".")
        known.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
        # Not a convolution with an adapter, which would have no effect.
        if layout.convolution and type(getattr(mixer, layout.convolution)) is nn.Conv1d:
            known.add(f"{name}.{layout.convolution}")
    return known


def _refuse_shares(kind: str, model: nn.Module, result: ProbeResult, mesh: SequenceMesh) -> None:
    """Refuse a mesh whose ranks can't share the heads of the layers that carry state."""
    if not result.mixers:
        return
    most = min((layer.num_heads for layer in result.layers.values()), default=mesh.sp_size)
    valid = [size for size in shared_sizes(model) if size <= most]
    if mesh.ring_size > 1:
        raise UserError(
            f"parallel.ring_size={mesh.ring_size} passes keys and values around a ring, but {kind} has layers that "
            f"carry state along the sequence and need whole rows; set parallel.ring_size: 1 and parallel.sp_size to "
            f"one of {_listed(valid)}"
        )
    if mesh.ulysses_size not in valid:
        shared = sorted({f"{layout.num_units} {layout.unit}" for _, _, layout in find_mixers(model)})
        raise UserError(
            f"parallel.sp_size={mesh.sp_size} can't share the {' and '.join(shared)} of {kind} equally; set "
            f"parallel.sp_size to one of {_listed(valid)}"
        )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _refuse_heads(kind: str, result: ProbeResult, mesh: SequenceMesh) -> None:
    num_heads = min((layer.num_heads for layer in result.layers.values()), default=mesh.ulysses_size)
    if mesh.ulysses_size <= num_heads:
        return
    rings = (size for size in range(1, mesh.sp_size + 1) if mesh.sp_size % size == 0)
    ring = next(size for size in rings if mesh.sp_size // size <= num_heads)
    raise UserError(
        f"parallel.sp_size={mesh.sp_size} with ring_size={mesh.ring_size} spreads the {num_heads} attention heads of "
        f"{kind} over {mesh.ulysses_size} ranks, but each rank needs a head (sp_size / ring_size <= {num_heads}); set "
        f"parallel.ring_size: {ring}, or parallel.sp_size to at most {num_heads * mesh.ring_size}"
    )
