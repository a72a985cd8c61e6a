"""One training step through the library seam on many ranks, held against one process: law 1's measurement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch, unshard
from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.engine.text_part import keep_text_part
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.parallel.layout import ParallelLayout
from tests.apart import worst
from tests.unit.attention.models import HYBRIDS, VOCAB, zoo_model
from tests.unit.attention.multimodal import MULTIMODAL, multimodal_model

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SeamCase:
    """A point of law 1's matrix."""

    architecture: str
    ulysses_size: int = 1
    ring_size: int = 1
    dp_size: int = 1
    zero_stage: int = 0
    accumulation: int = len(ROWS)
    kept: KeptOutput | None = None
    head_groups: int = 1

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def world_size(self) -> int:
        return self.sp_size * self.dp_size

    @property
    def label(self) -> str:
        sizes = f"u{self.ulysses_size}-r{self.ring_size}-dp{self.dp_size}"
        policy = "" if self.kept is None else f"-checkpointed-{self.kept}"
        policy += "" if self.head_groups == 1 else f"-head_groups{self.head_groups}"
        return f"{self.architecture}-{sizes}-zero{self.zero_stage}-acc{self.accumulation}{policy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeamResult:
    """What one case measured."""

    case: SeamCase
    loss_error: float
    logits_error: float
    gradient_error: float
    worst_tensor: str
    norm_ratio: float
    fewest_gathers: int
    attention: str


def make_row(index: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    tokens, lengths = ROWS[index % len(ROWS)]
    generator = torch.Generator().manual_seed(100 + index)
    input_ids = torch.randint(0, VOCAB, (1, tokens), generator=generator)
    labels = input_ids.clone()
    labels[:, sum(lengths) :] = IGNORE_INDEX
    labels[:, 2:5] = IGNORE_INDEX
    if index == 0:
        labels[:, : tokens // 2 + 1] = IGNORE_INDEX
    return input_ids, labels, lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One process's step: every document alone with eager attention, loss = sum / count."""

    loss: float
    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def _whole_model(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    return multimodal_model(architecture).to(dtype) if architecture in MULTIMODAL else zoo_model(architecture, dtype)


def _trained_model(architecture: str, device: str) -> Any:
    model = _whole_model(architecture)
    if architecture in MULTIMODAL:
        keep_text_part(model)
    return model.to(device)


class Fp64Throughout(TorchFunctionMode):
    """Makes casts of fp64 tensors to fp32 keep fp64.

    Transformers' norms, softmax and gates compute in fp32 whatever the model's dtype. A reference that does so has
    errors of fp32 itself: 2e-5 in the gradients of Kimi Linear's forget gates, more than those that it should measure.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one function of torch."""
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@cache
def reference_step(architecture: str, num_rows: int, dtype: torch.dtype, attention: str = "eager") -> Reference:
    """Train one step on one process; of a multimodal model the whole, on text only."""
    mode: Any = Fp64Throughout() if dtype == torch.float64 else nullcontext()
    with mode:
        return _reference_step(architecture, num_rows, dtype, attention)


def _reference_step(architecture: str, num_rows: int, dtype: torch.dtype, attention: str) -> Reference:
    model = _whole_model(architecture, dtype)
    if attention != "eager":
        model.set_attn_implementation(attention)
    rotary = deepcopy(getattr(model.base_model, "rotary_emb", None))
    sums, count, logits_of_rows = [], 0, []
    for index in range(num_rows):
        input_ids, labels, lengths = make_row(index)
        parts, start = [], 0
        for length in lengths:
            if rotary is not None:
                # Dynamic scaling keeps the longest document's frequencies for later ones.
                model.base_model.rotary_emb = deepcopy(rotary)
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
    return Reference(loss=float(loss.detach()), logits=logits_of_rows, gradients=gradients)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What a step of ours gave: loss, whole gradients, their global norm, and the fewest gathers of a parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    fewest_gathers: int


def run_cases(rank: int, world_size: int, cases: list[SeamCase], device: str = "cpu") -> list[SeamResult]:
    """Run every case of one world on this rank; the first rank measures, against one process on the CPU."""
    groups: dict[tuple[int, int], SequenceMesh] = {}
    logits = _Logits()
    results = []
    for case in cases:
        layout = ParallelLayout(world_size=case.world_size, sp_size=case.sp_size)
        key = (case.sp_size, case.ring_size)
        if key not in groups:
            made = [dist.new_group(list(ranks)) for ranks in layout.sp_groups()]
            groups[key] = SequenceMesh.from_group(made[layout.dp_rank(rank)], ring_size=case.ring_size)
        place = (groups[key], layout.dp_rank(rank), device)
        results += list(_run_case(case, *place, logits, is_measuring=rank == 0))
    return results


class _Logits(dict[tuple[str, int, int, int], torch.Tensor]):
    """Unsharded logits of rows, which depend on a model and its layout alone: computed once per row."""

    def of(
        self, case: SeamCase, mesh: SequenceMesh, rows: dict[int, ShardedBatch], device: str
    ) -> dict[int, torch.Tensor]:
        wanted = {index: (case.architecture, case.ulysses_size, case.ring_size, index) for index in rows}
        if not self.keys() >= set(wanted.values()):
            model = apply_ulysses(_trained_model(case.architecture, device), mesh)
            with torch.no_grad():
                for index, batch in rows.items():
                    self[wanted[index]] = unshard(model(**batch.model_inputs()).logits, batch).cpu()
        return {index: self[key] for index, key in wanted.items()}


def _run_case(
    case: SeamCase, mesh: SequenceMesh, dp_rank: int, device: str, known_logits: _Logits, *, is_measuring: bool
) -> Iterator[SeamResult]:
    mine = [m * case.dp_size + dp_rank for m in range(case.accumulation)]
    rows = [make_row(index) for index in mine]
    batches = [shard_batch(ids.to(device), labels.to(device), lengths, mesh) for ids, labels, lengths in rows]
    tokens = torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()
    dist.all_reduce(tokens)
    model = apply_ulysses(_trained_model(case.architecture, device), mesh, head_groups=case.head_groups)
    if case.kept is not None:
        options: dict[str, Any] = {"use_reentrant": False, "context_fn": checkpoint_contexts(case.kept)}
        model.train().gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={name: value for name, value in options.items() if value is not None}
        )
    train = _step_with_an_engine if case.zero_stage else _step_by_hand
    step = train(case, model, mesh, batches, int(tokens))
    logits = known_logits.of(case, mesh, dict(zip(mine, batches, strict=True)), device)
    if not is_measuring:
        return
    num_rows = case.dp_size * case.accumulation
    wanted = reference_step(case.architecture, num_rows, torch.float64)
    own = reference_step(case.architecture, num_rows, torch.float32)
    error, worst_tensor = gradient_error(step.gradients, own.gradients, wanted.gradients)
    attention = "eager"
    if error > 1 and case.architecture in HYBRIDS:
        # Gradients of queries and keys that nearly cancel: torch's fused attention, ours and Transformers' default, has
        # up to four times the error of the eager one, since it takes the sum of P * dP from the rounded output.
        attention = "sdpa"
        default = reference_step(case.architecture, num_rows, torch.float32, attention)
        error, worst_tensor = gradient_error(step.gradients, default.gradients, wanted.gradients)
    whole_norm = torch.stack([gradient.norm() for gradient in own.gradients.values()]).norm()
    yield SeamResult(
        case=case,
        loss_error=abs(step.loss - wanted.loss) / abs(wanted.loss),
        logits_error=worst(relative_error(ours.double(), wanted.logits[index]) for index, ours in logits.items()),
        gradient_error=error,
        worst_tensor=worst_tensor,
        norm_ratio=step.norm / float(whole_norm),
        fewest_gathers=step.fewest_gathers,
        attention=attention,
    )


def _step_by_hand(case: SeamCase, model: Any, mesh: SequenceMesh, batches: list[ShardedBatch], tokens: int) -> _Step:
    """Add up what each rank's slices give: the definition that an engine's scale is held against."""
    loss = torch.zeros((), device=model.device)
    for batch in batches:
        loss_sum, _ = causal_lm_loss(model, batch)
        (loss_sum / tokens).backward()
        loss += loss_sum.detach()
    gradients = {}
    for name, parameter in model.named_parameters():
        whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(whole)
        gradients[name] = whole.cpu()
    dist.all_reduce(loss)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return _Step(loss=float(loss) / tokens, gradients=gradients, norm=norm, fewest_gathers=0)


def _step_with_an_engine(
    case: SeamCase, model: Any, mesh: SequenceMesh, batches: list[ShardedBatch], tokens: int
) -> _Step:
    import deepspeed

    engine = build_engine(
        model,
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
    if case.zero_stage == 3:
        # A rank that drops its trace of calls alone would leave the others waiting in the next micro-batch.
        engine.optimizer.parameter_offload.get_param_coordinator()._invalidate_trace = partial(_refuse_new_calls, case)
    scale = loss_scale(tokens, mesh, zero_stage=case.zero_stage, accumulation=case.accumulation)
    loss = torch.zeros((), device=engine.device)
    gathers = Counter[str]()
    with counted_gathers(engine, gathers):
        for number, batch in enumerate(batches):
            loss_sum, num_tokens = causal_lm_loss(engine, batch)
            assert int(num_tokens) == int((batch.labels_BL != IGNORE_INDEX).sum())
            loss += loss_sum.detach()
            engine.backward(loss_sum * scale)
            # An engine steps on the boundary only; before it, step() advances the micro-batch.
            if number + 1 < len(batches):
                engine.step()
    gradients = {
        name: deepspeed.utils.safe_get_full_grad(parameter).clone().cpu()
        for name, parameter in engine.module.named_parameters()
    }
    engine.step()
    norm = float(engine.get_global_grad_norm())
    # What a module reads of another is gathered by itself the first time, and from then on with that module.
    read = [one for module in engine.module.modules() for one in getattr(module, "_external_params", {}).values()]
    known = set(map(id, read))
    gathers.update(name for name, parameter in engine.module.named_parameters() if id(parameter) in known)
    fewest = min(gathers[name] for name in gradients)
    engine.destroy()
    dist.all_reduce(loss)
    return _Step(loss=float(loss) / tokens, gradients=gradients, norm=norm, fewest_gathers=fewest)


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
