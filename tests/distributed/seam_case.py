"""One training step through the library seam on many ranks, held against one process: law 1's measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch, unshard
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.parallel.layout import ParallelLayout

VOCAB = 61
ARCHITECTURES = ("llama", "qwen3", "mistral")
ROWS: tuple[tuple[int, tuple[int, ...]], ...] = (
    # (tokens of the row, lengths of its documents; the rest is padding)
    (32, (17, 1, 9, 5)),
    (30, (8, 8, 14)),
    (33, (20, 4)),
    (32, (32,)),
    (24, (5, 6, 13)),
    (40, (1, 1, 30)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeamCase:
    """A point of law 1's matrix."""

    architecture: str
    sp_size: int
    dp_size: int
    zero_stage: int
    accumulation: int

    @property
    def world_size(self) -> int:
        """Ranks that the case takes."""
        return self.sp_size * self.dp_size

    @property
    def label(self) -> str:
        """A readable id."""
        return f"{self.architecture}-sp{self.sp_size}-dp{self.dp_size}-zero{self.zero_stage}-acc{self.accumulation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeamResult:
    """What one case measured.

    Attributes:
        case: The case.
        loss_error: Relative error of the loss.
        logits_error: Relative error of the unsharded logits, the worst row.
        gradient_error: Worst tensor's relative error, divided by what law 1 allows it: at most 1 passes.
        worst_tensor: That tensor's name.
        norm_ratio: The engine's global gradient norm over the single process's.
        gathers: All-gathers of the step as the profiler counted them.
        parameters: Number of parameter tensors.
    """

    case: SeamCase
    loss_error: float
    logits_error: float
    gradient_error: float
    worst_tensor: str
    norm_ratio: float
    gathers: int
    parameters: int


def build_model(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny decoder, the same on every rank: tied in Qwen3, 2 KV heads for 4 query heads in all."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    configs = {
        "llama": lambda: LlamaConfig(**sizes),
        "qwen3": lambda: Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True),
        "mistral": lambda: MistralConfig(**sizes, sliding_window=6),
    }
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(configs[architecture](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.to(dtype)


def make_row(index: int, sp_size: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return token ids, labels and document lengths of a row; row 0 masks all labels of one rank's slice."""
    tokens, lengths = ROWS[index % len(ROWS)]
    generator = torch.Generator().manual_seed(100 + index)
    input_ids = torch.randint(0, VOCAB, (1, tokens), generator=generator)
    labels = input_ids.clone()
    labels[:, sum(lengths) :] = IGNORE_INDEX
    labels[:, 2:5] = IGNORE_INDEX
    if index == 0:
        labels[:, : -(-tokens // sp_size) + 1 if sp_size > 1 else 1] = IGNORE_INDEX
    return input_ids, labels, lengths


def reference_step(
    architecture: str, num_rows: int, sp_size: int, dtype: torch.dtype
) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train one step on one process: every document alone, loss = sum / count. Returns loss, logits, gradients."""
    model = build_model(architecture, dtype)
    sums, count, logits_of_rows = [], 0, []
    for index in range(num_rows):
        input_ids, labels, lengths = make_row(index, sp_size)
        parts, start = [], 0
        for length in lengths:
            logits = model(input_ids=input_ids[:, start : start + length], use_cache=False).logits
            targets = labels[0, start + 1 : start + length]
            sums.append(torch.nn.functional.cross_entropy(logits[0, :-1], targets, reduction="sum"))
            count += int((targets != IGNORE_INDEX).sum())
            parts.append(logits.detach())
            start += length
        logits_of_rows.append(torch.cat(parts, dim=1))
    loss = torch.stack(sums).sum() / count
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), logits_of_rows, gradients


def run_cases(rank: int, world_size: int, cases: list[SeamCase], device: str = "cpu") -> list[SeamResult]:
    """Run every case of one (sp, dp) shape on this rank."""
    return [result for case in cases for result in _run_case(rank, case)]


def _run_case(rank: int, case: SeamCase) -> Iterator[SeamResult]:
    import deepspeed
    from torch.profiler import ProfilerActivity, profile

    layout = ParallelLayout(world_size=case.world_size, sp_size=case.sp_size)
    groups = [dist.new_group(list(ranks)) for ranks in layout.sp_groups()]
    mesh = SequenceMesh.from_group(groups[layout.dp_rank(rank)])
    engine = build_engine(
        apply_ulysses(build_model(case.architecture), mesh),
        ZeroSettings(
            stage=case.zero_stage,  # type: ignore[arg-type]
            dtype="fp32",
            accumulation=case.accumulation,
            max_grad_norm=0.5,
            learning_rate=1e-3,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            partition_everything=True,
        ),
    )
    num_rows = case.dp_size * case.accumulation
    mine = [m * case.dp_size + layout.dp_rank(rank) for m in range(case.accumulation)]
    batches = [shard_batch(*make_row(index, case.sp_size), mesh) for index in mine]
    tokens = torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()
    dist.all_reduce(tokens)
    scale = loss_scale(int(tokens), mesh, zero_stage=case.zero_stage, accumulation=case.accumulation)
    loss = torch.zeros(())
    logits: dict[int, torch.Tensor] = {}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for index, batch in zip(mine, batches, strict=True):
            loss_sum, num_tokens = causal_lm_loss(engine, batch)
            assert int(num_tokens) == int((batch.labels_BL != IGNORE_INDEX).sum())
            loss += loss_sum.detach()
            engine.backward(loss_sum * scale)
            # An engine steps on the boundary only; before it, step() advances the micro-step.
            if index != mine[-1]:
                engine.step()
    gathers = sum(event.count for event in profiler.key_averages() if "allgather" in event.key.replace("_", ""))
    gradients = {
        name: deepspeed.utils.safe_get_full_grad(parameter).clone()
        for name, parameter in engine.module.named_parameters()
    }
    engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    dist.all_reduce(loss)
    fresh = apply_ulysses(build_model(case.architecture), mesh)
    with torch.no_grad():
        for index, batch in zip(mine, batches, strict=True):
            logits[index] = unshard(fresh(**batch.model_inputs()).logits, batch)
    _, wanted_logits, wanted = reference_step(case.architecture, num_rows, case.sp_size, torch.float64)
    wanted_loss, _, own = reference_step(case.architecture, num_rows, case.sp_size, torch.float32)
    error, worst = _gradient_error(gradients, own, wanted)
    whole_norm = torch.stack([gradient.norm() for gradient in own.values()]).norm()
    logits_error = max(_relative(logits[index].double(), wanted_logits[index]) for index in mine)
    yield SeamResult(
        case=case,
        loss_error=abs(float(loss) / int(tokens) - wanted_loss) / abs(wanted_loss),
        logits_error=logits_error,
        gradient_error=error,
        worst_tensor=worst,
        norm_ratio=norm / float(whole_norm),
        gathers=gathers,
        parameters=len(gradients),
    )


def _gradient_error(
    ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the worst ratio of a tensor's error to law 1's bound, and the tensor."""
    assert ours.keys() == wanted.keys()
    whole = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    worst = (0.0, "")
    for name, truth in wanted.items():
        scale = float(truth.norm())
        if scale < 1e-7 * whole:
            scale = whole
        bound = max(1e-5, 2 * float((own[name].double() - truth).norm()) / scale)
        # The law compares with one process in fp32.
        error = float((ours[name].double() - own[name].double()).norm()) / scale
        worst = max(worst, (error / bound, name))
    return worst


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).norm() / b.norm())
