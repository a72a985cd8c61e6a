"""Law 1 for every causal and masked model type of Transformers, each built tiny from one set of settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch, unshard
from ray_ulysses.config.objective import Task
from ray_ulysses.engine.model import refuse_architecture
from ray_ulysses.engine.text_part import auto_class
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import ParallelLayout
from tests.apart import worst
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, SIZES

LENGTHS = (17, 1, 9, 6)
BOUND = 1e-5
MOST_PARAMETERS = 40_000_000
# What families call the same sizes; a name that a family doesn't know changes nothing.
TINY: dict[str, Any] = {
    **SIZES,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "d_model": 32, "n_layer": 2,
    "n_head": 4, "n_embd": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 48, "num_layers": 2, "num_heads": 4,
    "max_seq_len": 256, "n_positions": 256, "attention_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0,
    "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0,
}  # fmt: skip
# Where that set is not one that a family takes.
_LATENT: dict[str, Any] = {
    "head_dim": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), _LATENT
    ),
    "longcat_flash": {**_LATENT, "head_dim": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": SIZES["vocab_size"],
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4, "laurel_rank": 4, "hidden_size_per_layer_input": 8,
    },
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "opt": {"word_embed_proj_dim": 32},
    "dots3_note_text": {"num_key_value_heads": 4},
    "xlnet": {"max_position_embeddings": None},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "cohere_compass_text": {"layer_types": ["full_attention", "full_attention"]},
    "prophetnet": {
        "num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    },
    "gemma4_text": {"vocab_size_per_layer_input": SIZES["vocab_size"]},
}  # fmt: skip
WINDOW, STRETCH = 6, 7
WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "attention_chunk_size": STRETCH,
    "window_size": WINDOW, "local_attention": WINDOW,
}  # fmt: skip


MASKED = "masked"
"""Variant of a type as a masked language model."""
_MASKED_OWN: dict[str, dict[str, Any]] = {"esmc": {"num_key_value_heads": 4}}


def _task_of(variant: str) -> Task:
    return "masked_lm" if variant == MASKED else "causal_lm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    model_type: str
    variant: str
    kind: str
    note: str = ""


def types_of(task: Task) -> list[str]:
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING if task == "causal_lm" else MODEL_FOR_MASKED_LM_MAPPING
    # Without those that a plugin has registered.
    known = (kind for kind in mapping if kind.__module__.startswith("transformers."))
    return sorted({kind.model_type for kind in known})


def run_sweep(rank: int, world_size: int, names: list[str], task: Task = "causal_lm") -> list[Outcome]:
    meshes = []
    for sp_size in (2, world_size):
        made = [
            dist.new_group(list(ranks)) for ranks in ParallelLayout(world_size=world_size, sp_size=sp_size).sp_groups()
        ]
        meshes.append(SequenceMesh.from_group(made[rank // sp_size]))
    if task == "masked_lm":
        return [_outcome(name, MASKED, {"is_decoder": False, **_MASKED_OWN.get(name, {})}, meshes) for name in names]
    return [outcome for name in names for outcome in _outcomes(name, meshes)]


def _outcomes(name: str, meshes: list[SequenceMesh]) -> list[Outcome]:
    default = _outcome(name, "default", {}, meshes)
    if default.kind in ("composite", "not built"):
        return [default]
    try:
        config = _tiny_config(name, {})
    except Exception:
        return [default]
    offered = {key: value for key, value in WINDOWS.items() if hasattr(config, key)}
    windows = _outcome(name, "windows", offered, meshes)
    return [default, windows] if offered and windows.variant == "windows" else [default]


def _outcome(name: str, variant: str, settings: dict[str, Any], meshes: list[SequenceMesh]) -> Outcome:
    def found(kind: str, note: object = "") -> Outcome:
        return Outcome(model_type=name, variant=variant, kind=kind, note=" ".join(str(note).split()))

    try:
        if not settings and (part := _text_part(name)):
            return found("composite", part)
        config = _tiny_config(name, settings)
        model = _model(config, _task_of(variant))
        reference = _Reference.of(model, is_masked=variant == MASKED)
    except Exception as error:
        return _of_default_sizes(name, variant) or found("not built", f"{type(error).__name__}: {error}"[:160])
    try:
        refuse_architecture(config, "whole", _task_of(variant))
    except UserError as error:
        noise = _noise_of(error)
        if noise.keys() <= settings.keys():
            return found("refused", error)
        again = _outcome(name, variant, settings | noise, meshes)
        return replace(again, note=f"with {', '.join(f'{key}: 0.0' for key in noise)}{again.note and '; '}{again.note}")
    try:
        errors = [reference.error_of(_model(config, _task_of(variant)), mesh) for mesh in meshes]
    except Exception as error:
        return found("failed", f"{type(error).__name__}: {error}"[:160])
    return found("exact") if worst(errors) <= BOUND else found("wrong", f"off by {worst(errors):.1e}")


def _of_default_sizes(name: str, variant: str) -> Outcome | None:
    variant = variant if variant == MASKED else "default"
    noise: dict[str, Any] = {}
    while True:
        try:
            refuse_architecture(AutoConfig.for_model(name, **noise), "whole", _task_of(variant))
        except UserError as error:
            more = _noise_of(error)
            if not more.keys() <= noise.keys():
                noise |= more
                continue
            return Outcome(model_type=name, variant=variant, kind="refused", note=" ".join(str(error).split()))
        except Exception:
            return None
        return None


def _noise_of(error: UserError) -> dict[str, float]:
    return dict.fromkeys(re.findall(r"model\.config\.(\w+)=[\d.e-]+: with dropout", str(error)), 0.0)


def _text_part(name: str) -> str:
    fields = AutoConfig.for_model(name)
    text = fields.get_text_config(decoder=True) if name not in _SEVERAL_TEXTS else fields
    return "" if text is fields or text.model_type == name else str(text.model_type)


# They have several texts, and can't be asked for one.
_SEVERAL_TEXTS = ("musicgen", "musicgen_melody")


def _tiny_config(name: str, settings: dict[str, Any]) -> PreTrainedConfig:
    zoo = {**ARCHITECTURES, **HYBRIDS}
    if name in zoo:
        return zoo[name](**settings)
    chosen = {**TINY, **OWN.get(name, {}), **settings}
    return AutoConfig.for_model(name, **{key: value for key, value in chosen.items() if value is not None})


def refuse_large(config: PreTrainedConfig, task: Task = "causal_lm") -> None:
    with torch.device("meta"):
        size = sum(one.numel() for one in auto_class("whole", task).from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are no tiny model")


def _model(config: PreTrainedConfig, task: Task) -> Any:
    refuse_large(config, task)
    torch.manual_seed(7)
    model: Any = auto_class("whole", task).from_config(config, attn_implementation="eager").double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Attention that is nearly uniform would hide a wrong window.
            parameter.data.mul_(3.0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reference:
    """What one process makes of each document alone."""

    ids: torch.Tensor
    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]
    is_masked: bool

    @classmethod
    def of(cls, model: Any, *, is_masked: bool) -> _Reference:
        vocab = model.get_input_embeddings().num_embeddings
        ids = torch.randint(3, min(vocab, 61), (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
        loss, parts = torch.zeros((), dtype=torch.float64), []
        for document in ids.split(LENGTHS, dim=1):
            logits = model(input_ids=document, **({} if is_masked else {"use_cache": False})).logits
            pairs = (logits[0], document[0]) if is_masked else (logits[0, :-1], document[0, 1:])
            loss = loss + torch.nn.functional.cross_entropy(*pairs, reduction="sum")
            parts.append(logits.detach())
        loss.backward()
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        logits = torch.cat(parts, dim=1)
        return cls(ids=ids, logits=logits, loss=float(loss.detach()), gradients=gradients, is_masked=is_masked)

    def error_of(self, model: Any, mesh: SequenceMesh) -> float:
        apply_ulysses(model, mesh)
        batch = shard_batch(self.ids, None, LENGTHS, mesh, shift_labels=not self.is_masked)
        with torch.no_grad():
            logits = unshard(model(**batch.model_inputs()).logits, batch)
        loss, _ = causal_lm_loss(model, batch)
        loss.backward()
        total = loss.detach().double()
        dist.all_reduce(total, group=mesh.group("sp"))
        errors = [
            float((logits - self.logits).norm() / self.logits.norm()),
            abs(float(total) - self.loss) / abs(self.loss),
        ]
        largest = max(float(one.norm()) for one in self.gradients.values())
        for name, parameter in model.named_parameters():
            wanted = self.gradients.get(name, torch.zeros_like(parameter))
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad, group=mesh.group("sp"))
            # Gradients that are zero but for rounding, as those of a bias under a softmax, have no error of their own.
            errors.append(float((grad - wanted).norm()) / max(float(wanted.norm()), 1e-3 * largest))
        return worst(errors)
