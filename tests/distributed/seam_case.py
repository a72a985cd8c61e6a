"""Law 1's measurement: one training step on many ranks, held against one process that trains each document alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ray_ulysses import SequenceMesh, apply_ulysses, loss_scale, shard_batch, unshard
from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.activation_offload import offload_activations
from ray_ulysses.engine.fused_norms import fuse_norms
from ray_ulysses.engine.loss import training_loss
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.preferences import Preference, preference_loss
from ray_ulysses.engine.quantized_base import dequantize_layers
from ray_ulysses.engine.text_part import keep_text_part
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.engine.zero import ZeroSettings, build_engine, partition_config
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.parallel.layout import ParallelLayout, TileSetting
from ray_ulysses.planner.settings import kept_attention
from tests.apart import worst
from tests.unit.attention.models import (
    ARCHITECTURES,
    ENCODERS,
    HYBRIDS,
    VOCAB,
    encoder_model,
    magnified,
    plain_config,
    zoo_model,
)
from tests.unit.attention.multimodal import MULTIMODAL, multimodal_model
from tests.unit.config.trees import small_tree
from tests.unit.export.runs import fields_of

ROWS: tuple[tuple[int, tuple[int, ...]], ...] = (
    # (tokens of the row, lengths of its documents; the rest is padding)
    # One document crosses every border of slices, and every case has this row.
    (47, (1, 45, 1)),
    # A document ends on a border of slices at every sp_size of 1 to 8 (6 is the shortest slice, 16 and 24 are borders).
    (48, (16, 8, 24)),
    (32, (17, 1, 9, 5)),
    (40, (1, 1, 30)),
    (24, (1, 1, 1, 8, 13)),
    # One document.
    (30, (30,)),
)
PAIRS: tuple[tuple[int, tuple[int, ...]], ...] = (
    # Both answers cross borders of slices, or end on one.
    (47, (24, 20)),
    (48, (16, 8, 14, 10)),
    (40, (2, 17, 6, 11)),
    (24, (7, 16)),
)
PREFERENCES: dict[str, Preference] = {
    "dpo": Preference(kind="dpo", beta=0.3, label_smoothing=0.1, sft_weight=0.2),
    "ipo": Preference(kind="ipo", beta=0.4),
    "orpo": Preference(kind="orpo", beta=0.5),
    "simpo": Preference(kind="simpo", beta=2.0, margin=0.5),
}
Z_LOSS, ROUTER_LOSS = 0.1, 0.5
Rows = Literal["masked", "weighted", "padded", "pairs"]


def _with_bias() -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(plain_config("phi"), attn_implementation="eager")
    torch.nn.init.normal_(model.lm_head.bias)
    return magnified(model)


HEADS: dict[str, Callable[[], Any]] = {
    "softcap": lambda: zoo_model("gemma2", tie_word_embeddings=False),
    "scale": lambda: zoo_model("granite", tie_word_embeddings=False),
    "bias": _with_bias,
    "untied": lambda: zoo_model("qwen3", tie_word_embeddings=False),
}
"""Models beside the zoo's, by what is special about their output head."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {"rank": 4},
    "extension": {
        "rank": 4, "rslora": True, "targets": ["q_proj", "v_proj"], "train_embeddings": True, "train_norms": True,
    },
    "mlp": {"rank": 4, "targets": ["gate_proj", "up_proj", "down_proj"]},
    "head": {"rank": 4, "targets": ["lm_head", "down_proj"], "modules_to_save": ["up_proj"]},
    "experts": {"rank": 2, "targets": ["q_proj", "experts"], "ranks": {"down_proj": 3}, "alphas": {"q_proj": 5}},
    "router": {"rank": 2, "targets": ["gate", "experts"]},
    "continued": {"rank": 2, "targets": ["q_proj", "down_proj"], "train_norms": True},
    "dora": {"rank": 4, "dora": True, "ranks": {"q_proj": 2}},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SeamCase:
    architecture: str
    """Of the zoo, `ENCODERS` or `HEADS`; with an adapter, "tied" and "untied" stand for a small Llama."""
    ulysses_size: int = 1
    ring_size: int = 1
    dp_size: int = 1
    zero_stage: int = 0
    """0 uses no engine: the ranks' gradients are added up as they are."""
    accumulation: int = len(ROWS)
    kept: KeptOutput | None = None
    """None is without gradient checkpointing; with an adapter, any other value is the configuration's default."""
    head_groups: int = 1
    tile: TileSetting = "auto"
    mlp_tile: int | None = None
    has_fused_norms: bool = False
    has_compiled_mlps: bool = False
    rows: Rows = "masked"
    """Masked: the first half of the first row has no label. Weighted: labels have weights, in a span 0, and there is a
    z-loss. Padded: half of each row is padding."""
    adapter: str = ""
    base_dtype: str = "bf16"
    """Of the adapter's base; the one process has the same weights, dequantized."""
    base: str = ""
    """Directory of the adapter's base model; empty to draw it."""
    offloads: bool = False
    has_router_loss: bool = False
    preference: str = ""
    """Loss of the pairs, with rows of pairs."""
    secondary_size: int = 1
    """Ranks of a node that share secondary shards of the weights; 1 is without."""
    steps_before: int = 0
    """Steps, each after a forward pass without a backward one, before the one that is measured."""

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def is_masked(self) -> bool:
        """Whether labels are those of a masked language model."""
        return self.architecture in ENCODERS

    @property
    def world_size(self) -> int:
        return self.sp_size * self.dp_size

    @property
    def alone(self) -> SeamCase:
        """Return what one process has to know of the case."""
        return SeamCase(
            architecture=self.architecture, rows=self.rows, adapter=self.adapter, base=self.base,
            base_dtype=self.base_dtype, has_router_loss=self.has_router_loss, preference=self.preference,
        )  # fmt: skip

    @property
    def label(self) -> str:
        parts = [
            self.architecture,
            *([self.adapter, "pretrained" if self.base else "drawn"] if self.adapter else []),
            *([] if self.base_dtype == "bf16" else [self.base_dtype]),
            f"u{self.ulysses_size}-r{self.ring_size}-dp{self.dp_size}-zero{self.zero_stage}-acc{self.accumulation}",
            *([] if self.rows == "masked" else [self.rows]),
            *([] if self.kept is None else [f"checkpointed-{self.kept}"]),
            *([] if self.head_groups == 1 else [f"head_groups{self.head_groups}"]),
            *([] if self.tile == "auto" else [f"tile-{self.tile}"]),
            *([] if self.mlp_tile is None else ["mlp-tiles"]),
            *(["fused-norms"] if self.has_fused_norms else []),
            *(["compiled-mlps"] if self.has_compiled_mlps else []),
            *(["router-loss"] if self.has_router_loss else []),
            *([self.preference] if self.preference else []),
            *([] if self.secondary_size == 1 else [f"secondary{self.secondary_size}"]),
            *([] if self.steps_before == 0 else [f"after-{self.steps_before}-steps"]),
        ]
        return "-".join(parts)

    def config(self, *, is_checkpointed: bool) -> Config:
        """Return the configuration of a model with the adapter."""
        tree = small_tree(model__adapter=ADAPTERS[self.adapter], memory__gradient_checkpointing=is_checkpointed)
        tree["model"]["base_dtype"] = self.base_dtype
        if self.architecture in ("tied", "untied"):
            tree["model"]["config"]["tie_word_embeddings"] = self.architecture == "tied"
        else:
            tree["model"]["config"] = fields_of(ARCHITECTURES[self.architecture]())
        if self.base:
            tree["model"] |= {"init": "pretrained", "path": self.base}
        if self.adapter == "continued":
            tree["model"]["adapter"] = {**ADAPTERS["continued"], "from": f"{self.base}/adapter"}
        return parse_config(tree)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeamResult:
    case: SeamCase
    loss_error: float
    router_error: float
    logits_error: float
    """Of the unsharded logits, the worst row; 0 where they are those of another case or of other weights."""
    gradient_error: float
    """Worst tensor's relative error, divided by what law 1 allows it: at most 1 passes."""
    worst_tensor: str
    norm_ratio: float
    """The engine's global gradient norm over the single process's."""
    fewest_gathers: int
    """How often ZeRO-3 gathered the parameter tensor that it gathered least often in the step."""
    tiled_gathers: tuple[dict[str, int], dict[str, int]]
    """How often each weight that is used tile by tile was gathered in the forward and in the backward passes."""
    num_stepped: int
    """Elements of a moment of the optimizer, on all ranks."""
    num_trained: int
    gathers_across: tuple[int, int]
    """Elements that ZeRO-3 gathered over the world in the forward and the backward passes."""
    attention: str
    """Attention of the process that the gradients are held against: eager, or Transformers' default."""


def make_row(index: int, rows: Rows = "masked") -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return token ids, labels and document lengths of a row; row 0 masks all labels of the first rank's slice."""
    kinds = PAIRS if rows == "pairs" else ROWS
    tokens, lengths = kinds[index % len(kinds)]
    tokens *= 2 if rows == "padded" else 1
    generator = torch.Generator().manual_seed(100 + index)
    input_ids = torch.randint(0, VOCAB, (1, tokens), generator=generator)
    labels = input_ids.clone()
    labels[:, sum(lengths) :] = IGNORE_INDEX
    labels[:, 2:5] = IGNORE_INDEX
    if index == 0 and rows == "masked":
        labels[:, : tokens // 2 + 1] = IGNORE_INDEX
    return input_ids, labels, lengths


def plain_preference(kind: str, sums: torch.Tensor, counts: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of pairs, as the papers write it."""
    loss = torch.zeros((), dtype=sums.dtype)
    for at in range(0, len(sums), 2):
        chosen, rejected = at, at + 1
        mean = sums / counts
        difference = mean - reference / counts
        if kind == "dpo":
            gain = 0.3 * (sums[chosen] - reference[chosen] - sums[rejected] + reference[rejected])
            loss = loss - 0.9 * torch.log(torch.sigmoid(gain)) - 0.1 * torch.log(1 - torch.sigmoid(gain))
            loss = loss - 0.2 * mean[chosen]
        elif kind == "ipo":
            loss = loss + (difference[chosen] - difference[rejected] - 1 / 0.8) ** 2
        elif kind == "simpo":
            loss = loss - torch.log(torch.sigmoid(2.0 * (mean[chosen] - mean[rejected]) - 0.5))
        else:
            odds = [torch.exp(mean[one]) / (1 - torch.exp(mean[one])) for one in (chosen, rejected)]
            loss = loss - mean[chosen] - 0.5 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    return loss


def reference_of(index: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return a log-probability for each document, as a reference model might give it."""
    noise = torch.rand(len(lengths), generator=torch.Generator().manual_seed(300 + index), dtype=torch.float64)
    return -(4.5 + noise) * torch.tensor(lengths)


def weights_of(index: int, labels: torch.Tensor) -> torch.Tensor:
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(200 + index)) * 2
    weights[:, 10:16] = 0
    return weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One process's step: every document alone with eager attention, loss = sum / count."""

    loss: float
    router_loss: float
    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def zero_settings(**settings: Any) -> ZeroSettings:
    """Return settings of an engine that keeps no parameter whole between uses."""
    plain: dict[str, Any] = {
        "dtype": "fp32", "accumulation": 1, "max_grad_norm": None, "learning_rate": 1e-3, "betas": (0.9, 0.95),
        "eps": 1e-8, "weight_decay": 0.0, "partition_everything": True,
    }  # fmt: skip
    return ZeroSettings(**{**plain, **settings})


def checkpointed(model: Any, kept: KeptOutput | None) -> Any:
    """Return the model in training mode, with gradient checkpointing unless ``kept`` is None."""
    if kept is not None:
        options = {"use_reentrant": False, "context_fn": checkpoint_contexts(kept)}
        options = {name: value for name, value in options.items() if value is not None}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model.train()


def _drawn(case: SeamCase, model: Any) -> Any:
    """Return a model whose adapters change something: at the start their product is zero."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and case.adapter != "continued":
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def _whole_model(case: SeamCase, dtype: torch.dtype = torch.float32) -> Any:
    if case.adapter:
        model = _drawn(case, build_model(case.config(is_checkpointed=False)))
        dequantize_layers(model)
        model = model.to(dtype)
        if hasattr(model, "set_experts_implementation"):
            # Grouped products of experts do not support fp64.
            model.set_experts_implementation("eager")
        return model
    if case.architecture in MULTIMODAL:
        return multimodal_model(case.architecture).to(dtype)
    if case.is_masked:
        return encoder_model(case.architecture, dtype)
    if case.architecture in HEADS:
        return HEADS[case.architecture]().to(dtype)
    routers = {"output_router_logits": True, "router_aux_loss_coef": ROUTER_LOSS} if case.has_router_loss else {}
    return zoo_model(case.architecture, dtype, **routers)


def _trained_model(case: SeamCase, mesh: SequenceMesh, device: torch.device, settings: ZeroSettings) -> Any:
    keep: Any = case.kept
    if case.adapter:
        config = case.config(is_checkpointed=case.kept is not None)
        # Under ZeRO-3 it is partitioned while it is built, as a run builds it.
        model = _drawn(case, build_model(config, partition_config(settings)))
        keep = kept_attention(config)
    else:
        model = _whole_model(case)
        if case.architecture in MULTIMODAL:
            keep_text_part(model)
        model = model.to(device)
    apply_ulysses(model, mesh, head_groups=case.head_groups)
    if not case.adapter:
        checkpointed(model, case.kept)
    if case.has_fused_norms:
        assert fuse_norms(model)
    if case.mlp_tile is not None:
        tile_mlps(model, case.mlp_tile, compiled=case.has_compiled_mlps)
    if case.offloads:
        kinds: Any = ("layer_inputs", "attention_outputs")
        offload_activations(model, kinds, keep=keep, budget_bytes=2**24, device=device)
    return model


class Fp64Throughout(TorchFunctionMode):
    """Makes casts of fp64 tensors to fp32 keep fp64.

    Transformers' norms, softmax and gates compute in fp32 whatever the model's dtype. A reference that does so has
    errors of fp32 itself: 2e-5 in the gradients of Kimi Linear's forget gates, more than those that it should measure.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def reference_step(architecture: str, num_rows: int, dtype: torch.dtype, attention: str = "eager") -> Reference:
    """Train one step on one process; of a multimodal model the whole, on text only."""
    return _reference(SeamCase(architecture=architecture), num_rows, dtype, attention)


@cache
def _reference(case: SeamCase, num_rows: int, dtype: torch.dtype, attention: str = "eager") -> Reference:
    return _reference_after(case, num_rows, dtype, attention, {})


def _reference_after(
    case: SeamCase, num_rows: int, dtype: torch.dtype, attention: str, weights: Mapping[str, torch.Tensor]
) -> Reference:
    """Train one step on one process, whose weights are replaced by those given."""
    mode: Any = Fp64Throughout() if dtype == torch.float64 else nullcontext()
    with mode:
        return _reference_step(case, num_rows, dtype, attention, weights)


def _reference_step(
    case: SeamCase, num_rows: int, dtype: torch.dtype, attention: str, changed: Mapping[str, torch.Tensor]
) -> Reference:
    model = _whole_model(case, dtype)
    model.load_state_dict(changed, strict=False)
    if attention != "eager":
        model.set_attn_implementation(attention)
    rotary = deepcopy(getattr(model.base_model, "rotary_emb", None))
    total, router_total, count, logits_of_rows = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype), 0, []
    for index in range(num_rows):
        input_ids, labels, lengths = make_row(index, case.rows)
        weights = weights_of(index, labels).to(dtype)
        outputs, start = [], 0
        sums, counts = [], []
        for length in lengths:
            part, start = slice(start, start + length), start + length
            if rotary is not None:
                # Dynamic scaling keeps the longest document's frequencies for later ones.
                model.base_model.rotary_emb = deepcopy(rotary)
            outputs.append(model(input_ids=input_ids[:, part], use_cache=False))
            logits, targets = outputs[-1].logits[0], labels[0, part]
            if not case.is_masked:
                logits, targets = logits[:-1], targets[1:]
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            if case.rows == "weighted":
                losses = losses + Z_LOSS * logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)
                losses = losses * weights[0, part][-len(losses) :]
            sums.append(-losses.sum())
            counts.append(int((targets != IGNORE_INDEX).sum()))
        of_row = sum(counts)
        if case.preference:
            reference = reference_of(index % len(PAIRS), lengths).to(dtype)
            total = total + plain_preference(case.preference, torch.stack(sums), torch.tensor(counts), reference)
            of_row = len(lengths) // 2
        else:
            total = total - torch.stack(sums).sum()
        if case.has_router_loss:
            scores = tuple(torch.cat(parts) for parts in zip(*(out.router_logits for out in outputs), strict=True))
            balance = load_balancing_loss_func(scores, model.num_experts, model.num_experts_per_tok)
            router_total = router_total + ROUTER_LOSS * of_row * balance
        count += of_row
        logits_of_rows.append(torch.cat([out.logits.detach() for out in outputs], dim=1))
    ((total + router_total) / count).backward()
    return Reference(
        loss=float(total.detach()) / count, router_loss=float(router_total.detach()) / count, logits=logits_of_rows,
        gradients={name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    loss: float
    router_loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    fewest_gathers: int = 0
    tiled_gathers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    num_stepped: int = 0
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Trained weights of the measured step, if others came before it."""
    gathers_across: tuple[int, int] = (0, 0)


def run_cases(rank: int, world_size: int, cases: list[SeamCase], device: str = "cpu") -> list[SeamResult]:
    """Run every case of one world on this rank; the first rank measures, against one process on the CPU."""
    meshes: dict[tuple[int, int], SequenceMesh] = {}
    logits = _Logits()
    results = []
    for case in cases:
        layout = ParallelLayout(world_size=case.world_size, sp_size=case.sp_size)
        key = (case.sp_size, case.ring_size)
        if key not in meshes:
            made = [dist.new_group(list(ranks)) for ranks in layout.sp_groups()]
            meshes[key] = SequenceMesh.from_group(made[layout.dp_rank(rank)], ring_size=case.ring_size)
        place = (meshes[key], layout.dp_rank(rank), torch.device(device))
        results += list(_run_case(case, *place, logits, is_measuring=rank == 0))
    return results


class _Logits(dict[tuple[str, int, int, int], torch.Tensor]):
    """Unsharded logits of rows, which depend on a model and its layout alone: computed once per row."""

    def of(
        self, case: SeamCase, mesh: SequenceMesh, rows: dict[int, ShardedBatch], device: torch.device
    ) -> dict[int, torch.Tensor]:
        """Return the logits of rows by their index. Every rank of the mesh must call."""
        if case.alone != SeamCase(architecture=case.architecture) or case.steps_before:
            return {}
        wanted = {index: (case.architecture, case.ulysses_size, case.ring_size, index) for index in rows}
        if not self.keys() >= set(wanted.values()):
            plain = replace(
                case, kept=None, head_groups=1, mlp_tile=None, has_fused_norms=False, has_compiled_mlps=False
            )
            model = _trained_model(plain, mesh, device, zero_settings())
            with torch.no_grad():
                for index, batch in rows.items():
                    self[wanted[index]] = unshard(model(**batch.model_inputs()).logits, batch).cpu()
        return {index: self[key] for index, key in wanted.items()}


def _run_case(
    case: SeamCase, mesh: SequenceMesh, dp_rank: int, device: torch.device, known_logits: _Logits, *, is_measuring: bool
) -> Iterator[SeamResult]:
    mine = [m * case.dp_size + dp_rank for m in range(case.accumulation)]
    batches = []
    for index in mine:
        ids, labels, lengths = make_row(index, case.rows)
        weights = weights_of(index, labels).to(device) if case.rows == "weighted" else None
        tensors = ids.to(device), labels.to(device)
        batches.append(shard_batch(*tensors, lengths, mesh, label_weights=weights, shift_labels=not case.is_masked))
    tokens = torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()
    if case.preference:
        pairs = sum(len(batch.documents.lengths[0]) // 2 for batch in batches)
        tokens = torch.tensor(pairs if mesh.sp_rank == 0 else 0, device=device)
    dist.all_reduce(tokens)
    settings = zero_settings(
        stage=case.zero_stage or 1, accumulation=case.accumulation, max_grad_norm=0.5, weight_decay=0.1,
        secondary_size=case.secondary_size, learning_rate=1e-2 if case.steps_before else 1e-3,
    )  # fmt: skip
    model = _trained_model(case, mesh, device, settings)
    if case.zero_stage:
        step = _step_with_an_engine(case, model, settings, mesh, batches, int(tokens))
    else:
        step = _step_by_hand(case, model, batches, int(tokens))
    logits = known_logits.of(case, mesh, dict(zip(mine, batches, strict=True)), device)
    if not is_measuring:
        return
    num_rows = case.dp_size * case.accumulation
    reference: Any = partial(_reference_after, weights=step.weights) if case.steps_before else _reference
    wanted, own = (reference(case.alone, num_rows, dtype, "eager") for dtype in (torch.float64, torch.float32))
    error, worst_tensor = gradient_error(step.gradients, own.gradients, wanted.gradients)
    attention = "eager"
    if error > 1 and case.architecture in HYBRIDS:
        # Gradients of queries and keys that nearly cancel: torch's fused attention, ours and Transformers' default, has
        # up to four times the error of the eager one, since it takes the sum of P * dP from the rounded output.
        attention = "sdpa"
        default = _reference(case.alone, num_rows, torch.float32, attention)
        error, worst_tensor = gradient_error(step.gradients, default.gradients, wanted.gradients)
    whole_norm = torch.stack([gradient.norm() for gradient in own.gradients.values()]).norm()
    router_error = abs(step.router_loss - wanted.router_loss) / wanted.router_loss if case.has_router_loss else 0.0
    yield SeamResult(
        case=case, router_error=router_error, gradient_error=error, worst_tensor=worst_tensor, attention=attention,
        loss_error=abs(step.loss - wanted.loss) / abs(wanted.loss),
        logits_error=worst([0.0, *(relative_error(one.double(), wanted.logits[at]) for at, one in logits.items())]),
        norm_ratio=step.norm / float(whole_norm), fewest_gathers=step.fewest_gathers, tiled_gathers=step.tiled_gathers,
        num_stepped=step.num_stepped, gathers_across=step.gathers_across,
        num_trained=sum(gradient.numel() for gradient in wanted.gradients.values()),
    )  # fmt: skip


def _losses(model: Any, case: SeamCase, batch: ShardedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is differentiated, and the sums of loss and router loss."""
    if case.preference:
        preference = PREFERENCES[case.preference]
        (lengths,) = batch.documents.lengths
        index = [row for _, row in PAIRS].index(lengths)
        reference = reference_of(index, lengths).to(batch.labels_BL.device) if preference.needs_reference else None
        pairs = preference_loss(model, batch, preference, reference, tile=case.tile)
        assert pairs.num_pairs == (len(lengths) // 2 if batch.mesh.sp_rank == 0 else 0)
        return pairs.objective_sum, torch.stack([pairs.loss_sum, torch.zeros_like(pairs.loss_sum)]).float()
    found = training_loss(model, batch, tile=case.tile, z_loss=Z_LOSS if case.rows == "weighted" else 0.0)
    assert int(found.num_tokens) == int((batch.labels_BL != IGNORE_INDEX).sum())
    assert found.objective_sum.dtype == torch.float32
    return found.objective_sum, torch.stack([found.loss_sum + found.z_loss_sum, found.router_loss_sum])


def _step_by_hand(case: SeamCase, model: Any, batches: list[ShardedBatch], tokens: int) -> _Step:
    """Add up what each rank's slices give: the definition that an engine's scale is held against."""
    losses = torch.zeros(2, device=model.device)
    for batch in batches:
        objective_sum, sums = _losses(model, case, batch)
        (objective_sum / tokens).backward()
        losses += sums
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(whole)
        gradients[name] = whole.cpu()
    dist.all_reduce(losses)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    loss, router_loss = (losses / tokens).tolist()
    return _Step(loss=loss, router_loss=router_loss, gradients=gradients, norm=norm)


def _step_with_an_engine(
    case: SeamCase, model: Any, settings: ZeroSettings, mesh: SequenceMesh, batches: list[ShardedBatch], tokens: int
) -> _Step:
    engine = build_engine(model, settings)
    for _ in range(case.steps_before):
        with torch.no_grad():
            _losses(engine, case, batches[0])
        for batch in batches:
            engine.backward(_losses(engine, case, batch)[0])
            engine.step()
    weights = weights_of_engine(engine) if case.steps_before else {}
    if case.zero_stage == 3:
        # A rank that drops its trace of calls alone would leave the others waiting in the next micro-batch.
        engine.optimizer.parameter_offload.get_param_coordinator()._invalidate_trace = partial(_refuse_new_calls, case)
    scale = loss_scale(tokens, mesh, zero_stage=case.zero_stage, accumulation=case.accumulation)
    losses = torch.zeros(2, device=engine.device)
    forward, backward = Counter[str](), Counter[str]()
    across: dict[str, int] = {"forward": 0, "backward": 0}
    for number, batch in enumerate(batches):
        with counted_gathers(engine, forward), counted_across(across, "forward"):
            objective_sum, sums = _losses(engine, case, batch)
        losses += sums
        with counted_gathers(engine, backward), counted_across(across, "backward"):
            engine.backward(objective_sum * scale)
        # An engine steps on the boundary only; before it, step() advances the micro-batch.
        if number + 1 < len(batches):
            engine.step()
    gradients = gradients_of(engine)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    # What a module reads of another is gathered by itself the first time, and from then on with that module.
    read = [one for module in engine.module.modules() for one in getattr(module, "_external_params", {}).values()]
    known = set(map(id, read))
    by_itself = Counter(name for name, parameter in engine.module.named_parameters() if id(parameter) in known)
    moments = [held for held in state_source(engine).intervals if held.key.startswith("exp_avg/")]
    stepped = torch.tensor(sum(held.num_elements for held in moments), device=engine.device)
    dist.all_reduce(stepped)
    weight = _tiled_weight(case, engine.module)
    engine.destroy()
    forget_secondary_group()
    dist.all_reduce(losses)
    loss, router_loss = (losses / tokens).tolist()
    return _Step(
        loss=loss, router_loss=router_loss, gradients=gradients, norm=norm, num_stepped=int(stepped),
        fewest_gathers=min((forward + backward + by_itself)[name] for name in gradients),
        tiled_gathers=(_of(forward, weight), _of(backward, weight)), weights=weights,
        gathers_across=(across["forward"], across["backward"]),
    )  # fmt: skip


def _of(gathers: Counter[str], weight: str) -> dict[str, int]:
    return {name: count for name, count in gathers.items() if weight in name}


def _tiled_weight(case: SeamCase, model: Any) -> str:
    """Return what stands in the names of the weights that are used tile by tile."""
    if case.mlp_tile is not None and not case.adapter:
        return "mlp"
    if case.is_masked:
        # Its decoder is the embedding.
        return {"bert": "transform.dense", "modernbert": "head.dense", "eurobert": "lm_head"}.get(
            case.architecture, "lm_head.dense"
        )
    return "embed_tokens" if model.config.tie_word_embeddings else "lm_head"


def forget_secondary_group() -> None:
    """Let the next engine of this process have groups of another size: DeepSpeed 0.19.8 makes them once."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def weights_of_engine(engine: Any) -> dict[str, torch.Tensor]:
    """Return the trained weights, whole. Every rank must call."""
    import deepspeed

    full = deepspeed.utils.safe_get_full_fp32_param
    return {name: full(p).clone().cpu() for name, p in engine.module.named_parameters() if p.requires_grad}


@contextmanager
def counted_across(into: dict[str, int], which: str) -> Iterator[None]:
    """Count the elements that ZeRO-3 gathers over the world."""
    from deepspeed.runtime.zero import partition_parameters

    gather = partition_parameters._dist_allgather_fn

    def counted(part: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
        into[which] += whole.numel() if dist.get_world_size(group) == dist.get_world_size() else 0
        return gather(part, whole, group)

    with mock.patch.object(partition_parameters, "_dist_allgather_fn", counted):
        yield


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    full = deepspeed.utils.safe_get_full_grad
    return {name: full(p).clone().cpu() for name, p in engine.module.named_parameters() if p.requires_grad}


@contextmanager
def counted_gathers(engine: Any, into: Counter[str]) -> Iterator[None]:
    """Count how often ZeRO-3 gathers each parameter; other stages gather none."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    names = {getattr(one, "ds_id", None): name for name, one in engine.module.named_parameters()}
    method = "_PartitionedParameterCoordinator__all_gather_params"
    gather = getattr(PartitionedParameterCoordinator, method)

    def counted(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        into.update(names[one.ds_id] for one in params if one.ds_status.name == "NOT_AVAILABLE")
        return gather(self, params, *args, **kwargs)

    with mock.patch.object(PartitionedParameterCoordinator, method, counted):
        yield


def _refuse_new_calls(case: SeamCase) -> None:
    raise AssertionError(f"{case.label}: rank {dist.get_rank()} calls other modules than in the first micro-batch")


def gradient_error(
    ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the worst ratio of a tensor's error to law 1's bound, and the tensor."""
    assert ours.keys() == wanted.keys()
    whole = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    ratios = {}
    for name, truth in wanted.items():
        scale = float(truth.norm())
        if scale < 1e-7 * whole:
            scale = whole
        bound = max(1e-5, 2 * float((own[name].double() - truth).norm()) / scale)
        # The law compares with one process in fp32.
        error = float((ours[name].double() - own[name].double()).norm()) / scale
        # NaN counts as infinite: `max` may leave it out.
        ratios[name] = error / bound if error == error else math.inf
    name = max(ratios, key=ratios.__getitem__)
    return ratios[name], name


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).norm() / b.norm())


def check(result: SeamResult) -> None:
    case, label = result.case, result.case.label
    assert result.loss_error <= 1e-5, f"{label}: loss off by {result.loss_error:.2e}"
    # No reduction of the router loss crosses ranks but a sum.
    assert result.router_error <= 1e-6, f"{label}: router loss off by {result.router_error:.2e}"
    assert result.logits_error <= 1e-5, f"{label}: logits off by {result.logits_error:.2e}"
    assert result.gradient_error <= 1.0, (
        f"{label}: gradient of {result.worst_tensor} is off by {result.gradient_error:.2f} x the bound"
    )
    bound = 1e-5 if case.adapter else 5e-4
    assert abs(result.norm_ratio - 1.0) <= bound, f"{label}: gradient norm ratio {result.norm_ratio}"
    if case.zero_stage:
        assert result.num_stepped == result.num_trained, f"{label}: the optimizer steps {result.num_stepped} elements"
    if case.secondary_size > 1:
        # Trained weights cross nodes once per step, with a little padding, whatever the micro-batches.
        forward, backward = result.gathers_across
        assert result.num_trained <= forward <= 1.05 * result.num_trained and backward == 0, f"{label}: {forward}"
    if case.zero_stage == 3 and case.world_size > 1 and not case.adapter:
        # Forward and backward each gather every parameter tensor: nothing stays whole between uses.
        assert result.fewest_gathers >= 2 * case.accumulation, f"{label}: {result.fewest_gathers} gathers of one"
        if isinstance(case.tile, int) and not case.has_router_loss:
            # However many tiles the rows of a rank have; a tied head is the embedding too.
            for gathers in result.tiled_gathers:
                each = case.accumulation * (2 if any("embed_tokens" in name for name in gathers) else 1)
                assert gathers and set(gathers.values()) == {each}, f"{label}: {gathers}"
