"""One training state, saved at every layout and loaded at every other: what the ranks of one world do.

The decoder is tiny, tied, with a frozen matrix, a frozen norm and a buffer; its second group of parameters has
hyperparameters of its own. It is trained through the library seam, a row shared by ``sp`` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.checkpoint import (
    CheckpointMeta,
    Manifest,
    ShardedState,
    TensorPart,
    TorchRankMessenger,
    load_parts,
    read_manifest,
    save_checkpoint,
)
from ray_ulysses.checkpoint.intervals import check_cover
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.engine.adapter import add_adapter
from ray_ulysses.engine.quantized_base import quantize_layers
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.engine.zero_state import StateReader, import_state, named_tensors, partition_view, state_source
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.storage import LocalStore
from tests.distributed.seam_case import forget_secondary_group, zero_settings

ROWS, TOKENS, VOCAB = 24, 16, 61
SAVED_AT, LAST = 2, 4
FROZEN = ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.input_layernorm.weight")
SECOND_GROUP = {"lr": 3e-4, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.01}
SPOILED = 0.5

Stage = Literal[1, 2, 3]
Offload = Literal["none", "cpu", "nvme"]
Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    world_size: int
    sp_size: int = 1
    stage: Stage = 3
    offload: Offload = "none"
    dtype: Dtype = "fp32"
    offload_param: bool = False
    keeps_small: bool = False
    """Whether ZeRO-3 keeps small parameters, here all, whole between uses."""
    model: Literal["decoder", "adapters", "experts", "quantized", "trained"] = "decoder"
    """With frozen parts, frozen under adapters, of experts too, quantized under them, or with nothing frozen."""
    layers: int = 2
    width: int = 28
    sub_group_elements: int | None = None
    secondary_size: int = 1
    """Ranks of a node that share secondary shards of the weights; 1 is without."""

    @property
    def label(self) -> str:
        offload = "" if self.offload == "none" else f"-{self.offload}"
        offload += "-weights" if self.offload_param else "-small" if self.keeps_small else ""
        offload += f"-secondary{self.secondary_size}" if self.secondary_size > 1 else ""
        return f"{self.model}-{self.dtype}-w{self.world_size}-sp{self.sp_size}-zero{self.stage}{offload}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    loader: Layout
    saver: str
    wrong: tuple[str, ...]
    losses: tuple[float, ...] = field(default=())


def save_layouts(rank: int, world_size: int, layouts: Sequence[Layout], folder: str) -> dict[str, tuple[float, ...]]:
    """Train each layout from the beginning, save it once on the way, and return its losses by label."""
    losses = {}
    for layout, mesh in _with_meshes(rank, layouts):
        engine = _engine(layout, mesh, Path(folder))
        taken = [_train_step(engine, step, layout, mesh) for step in range(1, SAVED_AT + 1)]
        _save(engine, layout, Path(folder) / layout.label, SAVED_AT)
        taken += [_train_step(engine, step, layout, mesh) for step in range(SAVED_AT + 1, LAST + 1)]
        losses[layout.label] = tuple(taken)
        _dispose(engine)
    return losses


def load_layouts(
    rank: int, world_size: int, layouts: Sequence[Layout], savers: Sequence[str], trained: Sequence[str], folder: str
) -> list[LoadResult]:
    """Load each saved state into each layout, its own too; go on from its own and from those in `trained`.

    One engine takes all states one after the other, and is spoiled before each, so that what is not restored shows.
    """
    results = []
    for layout, mesh in _with_meshes(rank, layouts):
        engine = _engine(layout, mesh, Path(folder), is_spoiled=True)
        for saver in savers:
            manifest = _load(engine, Path(folder) / saver, SAVED_AT)
            wrong = _differences(engine, manifest, Path(folder) / saver)
            losses: tuple[float, ...] = ()
            if saver in (*trained, layout.label):
                losses = tuple(_train_step(engine, step, layout, mesh) for step in range(SAVED_AT + 1, LAST + 1))
            results.append(LoadResult(loader=layout, saver=saver, wrong=wrong, losses=losses))
        _dispose(engine)
    return results


def restore_every_step(rank: int, world_size: int, layouts: Sequence[Layout], folder: str) -> list[LoadResult]:
    """Save at every step of a run, load each, and go on to its end; the results' `wrong` name what differs."""
    results = []
    for layout, mesh in _with_meshes(rank, layouts):
        engine = _engine(layout, mesh, Path(folder))
        store = Path(folder) / f"every-step-{layout.label}"
        # As a run keeps it over all its steps.
        reader, unbroken = StateReader(engine), []
        for step in range(LAST + 1):
            if step:
                unbroken.append(_train_step(engine, step, layout, mesh))
            _save(engine, layout, store, step)
        for step in range(LAST + 1):
            manifest = _load(engine, store, step)
            wrong = list(_differences(engine, manifest, store))
            losses = tuple(_train_step(engine, later, layout, mesh) for later in range(step + 1, LAST + 1))
            if losses != tuple(unbroken[step:]):
                wrong.append(f"losses {losses} instead of {tuple(unbroken[step:])}")
            wrong += _differences(engine, read_manifest(LocalStore(store), LAST), store)
            results.append(LoadResult(loader=layout, saver=f"step {step}", wrong=tuple(wrong), losses=losses))
        kept, fresh = reader.source(), state_source(engine)
        assert isinstance(kept, ShardedState) and isinstance(fresh, ShardedState)
        assert kept.description == fresh.description and kept.intervals == fresh.intervals
        for one, other in zip(kept.parts, fresh.parts, strict=True):
            assert one.tensor.data_ptr() == other.tensor.data_ptr(), one.key
        _dispose(engine)
    return results


def can_swap(rank: int, world_size: int) -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible())


def _with_meshes(rank: int, layouts: Sequence[Layout]) -> Iterator[tuple[Layout, SequenceMesh]]:
    meshes: dict[int, SequenceMesh] = {}
    for layout in layouts:
        if layout.sp_size not in meshes:
            parallel = ParallelLayout(world_size=layout.world_size, sp_size=layout.sp_size)
            made = [dist.new_group(list(ranks)) for ranks in parallel.sp_groups()]
            meshes[layout.sp_size] = SequenceMesh.from_group(made[parallel.dp_rank(rank)])
        yield layout, meshes[layout.sp_size]


def _engine(layout: Layout, mesh: SequenceMesh, folder: Path, *, is_spoiled: bool = False) -> Any:
    """Build an engine; if ``is_spoiled``, with frozen weights that no state has."""
    settings = zero_settings(
        stage=layout.stage, dtype=layout.dtype, max_grad_norm=1.0, weight_decay=0.1, offload_optimizer=layout.offload,
        offload_param="cpu" if layout.offload_param else "none",
        nvme_path=str(folder / "swap") if layout.offload == "nvme" else None,
        sub_group_elements=layout.sub_group_elements, partition_everything=not layout.keeps_small,
        secondary_size=layout.secondary_size,
    )  # fmt: skip
    model = _model(layout, mesh)
    for parameter in model.parameters():
        # A quantized base is not loaded.
        if is_spoiled and not parameter.requires_grad and layout.model != "quantized":
            parameter.data.fill_(SPOILED)
    engine = build_engine(model, settings)
    if layout.offload == "nvme":
        assert len(partition_view(engine).resident_groups) > 2, (
            "too little is swapped to show that it is done part by part"
        )
    for group in engine.optimizer.optimizer.param_groups[1:]:
        group.update(SECOND_GROUP)
    return engine


def _model(layout: Layout, mesh: SequenceMesh) -> torch.nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": layout.width, "intermediate_size": layout.width + 5,
        "num_attention_heads": 4, "num_hidden_layers": layout.layers, "num_key_value_heads": 2, "head_dim": 6,
        "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if layout.model == "experts":
        # Grouped matrix products need rows of a multiple of 16 bytes.
        model = MixtralForCausalLM(
            MixtralConfig(**sizes | {"intermediate_size": layout.width + 4}, num_local_experts=3)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    if layout.model != "trained":
        model.register_buffer("seen", torch.arange(3, dtype=torch.float32))
    if layout.model == "quantized":
        quantize_layers(model, "nf4", ("model.norm",), recomputes=True)
    if layout.model in ("adapters", "quantized"):
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
        model = get_peft_model(model, adapters)
    elif layout.model == "experts":
        section = AdapterSection(rank=3, alpha=6, targets=("q_proj", "experts", "gate"), modules_to_save=("norm",))
        model = add_adapter(model, section, seed=0)
    elif layout.model == "decoder":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in FROZEN)
    apply_ulysses(model, mesh)
    module: torch.nn.Module = model.to(torch.float32 if layout.dtype == "fp32" else torch.bfloat16)
    return module


def _dispose(engine: Any) -> None:
    """Let go of an engine, so that the next one can be made in this process."""
    engine.destroy()
    forget_secondary_group()
    if engine.swap_folder is not None:
        engine.swap_folder.close()
    dist.barrier()


def _train_step(engine: Any, step: int, layout: Layout, mesh: SequenceMesh) -> float:
    """Train this rank's slice of its rows; return the loss over all of them."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    dp_size = layout.world_size // layout.sp_size
    dp_rank = dist.get_rank() // layout.sp_size
    batch = shard_batch(rows[dp_rank::dp_size], None, [[10, 6]] * (ROWS // dp_size), mesh)
    num_tokens = ROWS * (TOKENS - 2)
    loss_sum, _ = causal_lm_loss(engine, batch)
    engine.backward(loss_sum * loss_scale(num_tokens, mesh, zero_stage=layout.stage))
    engine.step()
    total = loss_sum.detach().double()
    dist.all_reduce(total)
    return float(total / num_tokens)


def in_memory(engine: Any) -> ShardedState:
    source = state_source(engine)
    copies = [torch.full((held.num_elements,), -1.0).to(held.dtype) for held in source.intervals]
    source.copy_to(copies)
    parts = tuple(
        TensorPart(key=held.key, start=held.start, tensor=copy)
        for held, copy in zip(source.intervals, copies, strict=True)
    )
    return ShardedState(parts=parts, description=source.description)


def _save(engine: Any, layout: Layout, run_dir: Path, step: int) -> None:
    """Save a checkpoint, and beside it, by another way, what the ranks held: the truth for every load."""
    state = in_memory(engine)
    meta = CheckpointMeta(sp_size=layout.sp_size, cursor={"next_row": step * ROWS}, digest="0", tokens=step)
    save_checkpoint(
        LocalStore(run_dir), step=step, attempt=1, rank=dist.get_rank(), world_size=dist.get_world_size(), state=state,
        meta=meta, messenger=TorchRankMessenger(),
    )  # fmt: skip
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [(part.key, part.start, part.tensor) for part in state.parts])
    if dist.get_rank() == 0:
        by_key: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for key, start, tensor in (part for parts in gathered for part in parts):
            by_key.setdefault(key, []).append((start, tensor))
        truth = {
            key: torch.cat([tensor for _, tensor in sorted(held, key=lambda item: item[0])])
            for key, held in by_key.items()
        }
        torch.save((truth, _whole_weights(engine)), run_dir / f"truth-{step}.pt")
    else:
        _whole_weights(engine)
    dist.barrier()


def _load(engine: Any, run_dir: Path, step: int) -> Manifest:
    store = LocalStore(run_dir)
    manifest = read_manifest(store, step)
    groups = tuple({**one, "lr": 9.0, "betas": [0.1, 0.2], "weight_decay": 7.0} for one in manifest.state.groups)
    spoiled = replace(manifest.state, groups=groups, counters={"global_steps": 77}, optimizer_step=88)
    import_state(engine, spoiled, lambda parts: [part.tensor.fill_(SPOILED) for part in parts])
    # What training leaves alone too, so that what a load leaves alone is not right by chance.
    for _, parameter in named_tensors(engine.module).frozen:
        getattr(parameter, "ds_tensor", parameter).data.fill_(SPOILED)
    for buffer in _persistent_buffers(engine.module).values():
        buffer.fill_(SPOILED)
    messenger = TorchRankMessenger()
    import_state(engine, manifest.state, lambda parts: load_parts(store, manifest, parts, messenger))
    return manifest


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    stored = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def _differences(engine: Any, manifest: Manifest, run_dir: Path) -> tuple[str, ...]:
    """Return what of an engine's state is not bitwise what was saved, rounded in bf16; every rank must call."""
    truth, weights = torch.load(run_dir / f"truth-{manifest.step}.pt", weights_only=True)
    state, whole = in_memory(engine), _whole_weights(engine)
    is_same_precision = all(whole[name].dtype == weights[name].dtype for name in whole)
    wrong = []
    for part in state.parts:
        kind, _, name = part.key.partition("/")
        wanted = truth[part.key] if part.key in truth else truth[f"fp32/{name}"].bfloat16()
        assert part.key in truth or (kind, is_same_precision) == ("model", False), part.key
        if not torch.equal(part.tensor, wanted[part.start : part.start + part.tensor.numel()]):
            wrong.append(part.key)
    # As the forward pass sees them, on every rank: the weights, and the buffers.
    if is_same_precision:
        # The bytes, because packed bytes may be NaN as numbers.
        weights, whole = (
            {name: one.flatten().view(torch.uint8) for name, one in of.items()} for of in (weights, whole)
        )
        wrong += [f"whole {name}" for name in whole if not torch.equal(whole[name], weights[name])]
        wrong += ["the description"] if state.description != manifest.state else []
    wrong += [f"{name} is missing" for name in weights.keys() - whole.keys()]
    if engine.micro_steps != manifest.step:
        wrong.append(f"{engine.micro_steps} micro-steps")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [part.interval for part in state.parts])
    sizes = {key: spec.num_elements for key, spec in state.description.tensors.items()}
    check_cover(sizes, [interval for held in gathered for interval in held])
    return tuple(wrong)


def _whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    module = engine.module
    tensors = {name: buffer.detach().clone() for name, buffer in _persistent_buffers(module).items()}
    parameters = list(module.parameters())
    is_partitioned = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(parameters, enabled=is_partitioned):
        return tensors | {name: p.detach().clone() for name, p in module.named_parameters()}
