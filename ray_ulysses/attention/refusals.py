"""What Ulysses attention can't do exactly, found before a step is taken and refused by name.

Law 1: what can't be done exactly is refused. Everything here reads the model's config and modules; nothing runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import valid_sp_sizes

if TYPE_CHECKING:
    from ray_ulysses.parallel.mesh import SequenceMesh

_EXACT_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Parts of CamelCase class names: in lower case, "ssm" would be found in GptOssModel as well.
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
_RANDOM_WORDS = ("dropout", "pdrop", "layerdrop", "drop_path", "jitter")
# Of heads that a causal language model does not have.
_OTHER_HEADS = ("classifier_", "summary_")
_UNSUPPORTED_SETTINGS = {
    "attn_logit_softcapping": "soft-capping of attention scores",
    "attention_chunk_size": "chunked local attention",
    "alibi": "ALiBi position biases",
}


def refuse_inexact(model: nn.Module, config: Any, mesh: SequenceMesh) -> None:
    """Raise if the model, on this mesh, would not train exactly as on one process.

    Raises:
        UserError: Names the architecture or setting, why it can't be exact, and the way out.
    """
    kind = getattr(config, "model_type", type(model).__name__)
    _refuse_architecture(model, config, kind)
    _refuse_settings(config, kind)
    _refuse_dropout_modules(model, kind)
    num_heads = int(config.num_attention_heads)
    if num_heads % mesh.ulysses_size:
        allowed = ", ".join(str(size) for size in valid_sp_sizes(num_heads))
        raise UserError(
            f"parallel.sp_size={mesh.sp_size} does not divide the {num_heads} attention heads of {kind}; "
            f"the sizes that do are {allowed}"
        )


def _refuse_architecture(model: nn.Module, config: Any, kind: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind} has an encoder; only decoders with causal self-attention can be trained exactly")
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"{kind} does not take its attention from Transformers' attention interface, so its attention can't be "
            "replaced; use an architecture that supports attention backends (Llama, Qwen, Mistral and most others do)"
        )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _EXACT_LAYER_TYPES)
    recurrent = sorted(
        {
            type(module).__name__
            for module in model.modules()
            # A convolution mixes neighbouring tokens; Transformers' Conv1D is a linear layer of GPT-2.
            if isinstance(module, nn.Conv1d) or any(mark in type(module).__name__ for mark in _RECURRENT_MARKS)
        }
    )
    if odd or recurrent:
        found = ", ".join(odd + recurrent)
        raise UserError(
            f"{kind} has layers that carry state along the sequence or attend otherwise ({found}); sharding the "
            "sequence would give wrong gradients that the loss does not show. Use a decoder with full or "
            "sliding-window attention only"
        )
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        raise UserError(f"{kind} is set to attend in both directions; only causal attention is supported")


def _refuse_dropout_modules(model: nn.Module, kind: str) -> None:
    """Refuse what the configuration does not show, such as the dropout of an adapter."""
    for name, module in model.named_modules():
        rate = getattr(module, "p", 0.0) if "Dropout" in type(module).__name__ else 0.0
        if rate:
            raise UserError(
                f"{kind} has a dropout of {rate} at {name}: dropout above 0 draws other masks on other layouts, so a "
                "run would depend on its world size; build it with dropout 0.0"
            )


def _refuse_settings(config: Any, kind: str) -> None:
    values: dict[str, Any] = config.to_dict()
    for name, value in values.items():
        is_random = any(word in name for word in _RANDOM_WORDS) and not name.startswith(_OTHER_HEADS)
        if is_random and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            raise UserError(
                f"model.config.{name}={value}: dropout above 0 draws other masks on other layouts, so a run would "
                f"depend on its world size (and so does any other noise); set {name}: 0.0, for pretrained weights in "
                "the config.json of model.path"
            )
    for name, what in _UNSUPPORTED_SETTINGS.items():
        if values.get(name):
            raise UserError(
                f"{kind} sets {name}={values[name]!r}: {what} is not supported yet; no kernel here is exact for it"
            )
    if kind == "gpt_oss":
        raise UserError("gpt_oss uses attention sinks, which are not supported yet; no kernel here is exact for them")
    if values.get("output_router_logits"):
        raise UserError(
            f"{kind} sets output_router_logits=True: its auxiliary loss is not a sum over tokens, so it can't be "
            "added up exactly over slices of a row; set output_router_logits: false"
        )
