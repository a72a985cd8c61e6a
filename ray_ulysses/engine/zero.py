"""Configures DeepSpeed's ZeRO engine for exact gradients with sequence parallelism."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ray_ulysses.attention.mixer_layouts import layout_of
from ray_ulysses.config.optimizer import OptimizerKind, ParameterGroup
from ray_ulysses.engine.adapter import reads_others
from ray_ulysses.engine.base_fingerprint import base_fingerprint
from ray_ulysses.engine.bf16_moments import AdamWBf16Moments
from ray_ulysses.engine.model_parts import NoTilesError, find_parts, inner_model
from ray_ulysses.engine.muon import MuonAdamW
from ray_ulysses.engine.optimizer import muon_matrices, parameter_groups
from ray_ulysses.engine.partition_view import partition_view, shape_of
from ray_ulysses.engine.zero_state import named_tensors
from ray_ulysses.planner.state_memory import NVME_BUFFERS, NVME_SUB_GROUP, REDUCE_BUCKET
from ray_ulysses.storage.lock import lock, lock_file
from ray_ulysses.storage.regular import NotAPlainFileError, open_inside

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's mallopt constants M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (malloc.h)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """Settings of the ZeRO engine."""

    stage: Literal[1, 2, 3] = 3
    dtype: Literal["bf16", "fp32"]
    """Precision of weights and activations. bf16 weights have fp32 master weights."""
    accumulation: int
    max_grad_norm: float | None
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Weight decay for the weights of projections and embeddings."""
    kind: OptimizerKind = "adamw"
    groups: tuple[ParameterGroup, ...] = ()
    """Settings of parameters by name pattern, which take precedence over ``weight_decay``."""
    seed: int = 0
    """Seed of the stochastic rounding of bf16 moments."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    offload_param: Literal["none", "cpu"] = "none"
    """Device that stores each rank's shard of the weights in stage 3."""
    secondary_size: int = 1
    """Number of contiguous ranks of a node that share a secondary copy of the weights in stage 3; 1 for no copy."""
    nvme_path: str | None = None
    """Swap directory for ``offload_optimizer="nvme"``."""
    sub_group_elements: int | None = None
    """Number of elements that each rank updates at a time in stage 3. None selects DeepSpeed's default or, with NVMe
    offload, a value that requires only small buffers."""
    partition_everything: bool = False
    """Whether even small parameters are repartitioned after each use; intended for tiny models."""


def prepare_process(local_rank: int, device_type: str) -> None:
    """Set the environment that DeepSpeed 0.19.8 reads on import and initialization.

    On CPU, all DeepSpeed ops are marked incompatible. Otherwise, DeepSpeed would compile a C++ communication op at
    startup, which takes 30 s and requires a compiler. On CPU, the C library is also configured to reuse freed memory
    for later activations.
    """
    os.environ["LOCAL_RANK"] = str(local_rank)
    if device_type == "cpu":
        _keep_freed_memory()
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Otherwise ZeRO-3 runs `numactl` in every backward pass to count devices.
        os.environ.setdefault("LOCAL_SIZE", "1")
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}


def _keep_freed_memory() -> None:
    """Make glibc keep up to 128 MiB of freed memory, instead of returning it to the system after each layer.

    The kernel zeroes each new page: in a small model with 8,192 tokens per step, 10,000 to 17,000 page faults per step
    took 3 to 5% of the CPU time. Tensors above 32 MiB, glibc's maximum for the mmap threshold, are still mapped and
    unmapped.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 128 << 20)


def zero_config(settings: ZeroSettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Neither ``mesh_param`` nor ``sequence_parallel_size`` is set: with either of them, DeepSpeed 0.19.8 saves only half
    of the shards and scales gradients differently in each stage. Gradients are reduced and accumulated in fp32 for
    every dtype.
    """
    zero: dict[str, Any] = {
        "stage": settings.stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": REDUCE_BUCKET,
    }
    pin_memory = torch.cuda.is_available()
    if settings.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": settings.offload_optimizer, "pin_memory": pin_memory}
    if settings.offload_optimizer == "nvme":
        zero["offload_optimizer"] |= {"nvme_path": settings.nvme_path, "buffer_count": NVME_BUFFERS}
    if settings.offload_param != "none":
        zero["offload_param"] = {"device": settings.offload_param, "pin_memory": pin_memory}
    if settings.stage == 3 and (settings.sub_group_elements or settings.offload_optimizer == "nvme"):
        zero["sub_group_size"] = settings.sub_group_elements or NVME_SUB_GROUP
    if settings.stage == 3 and settings.secondary_size > 1:
        zero["zero_hpz_partition_size"] = settings.secondary_size
    if settings.stage == 3 and settings.partition_everything:
        zero |= {
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
    }
    if settings.dtype == "bf16":
        # Stage 1 then frees each bf16 gradient after adding it in fp32, instead of at the end of the step.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    return config


def partition_config(settings: ZeroSettings) -> dict[str, Any] | None:
    """Return the configuration for partitioning parameters while a model is loaded, or None for stages 1 and 2."""
    return zero_config(settings) if settings.stage == 3 else None


def build_engine(model: nn.Module, settings: ZeroSettings) -> Any:
    """Wrap a model in a ZeRO engine. All ranks of the world must call this function after ``init_process_group``.

    Returns:
        The ``deepspeed.DeepSpeedEngine``, whose ``backward`` divides the loss by ``accumulation``.
    """
    import deepspeed

    if settings.stage == 3:
        _gather_head_at_once(model)
        gather_experts_at_once(model)
    groups = parameter_groups(model, settings.weight_decay, kind=settings.kind, groups=settings.groups)
    optimizer = make_optimizer(groups, settings)
    config = zero_config(settings)
    swap_folder = None
    if settings.offload_optimizer == "nvme":
        swap_folder = SwapFolder(Path(str(settings.nvme_path)))
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(swap_folder.path)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    # The caller closes the folder when it destroys the engine; otherwise the folder stays locked until process exit.
    engine.swap_folder = swap_folder
    if settings.stage == 3:
        trace_parameters_only(engine)
    view = partition_view(engine)
    engine.base_fingerprint = base_fingerprint(engine, view)
    trained = named_tensors(model).trained
    if isinstance(optimizer, MuonAdamW):
        optimizer.locate(view, [one for _, one in trained], muon_matrices(model))
    elif isinstance(optimizer, AdamWBf16Moments):
        optimizer.locate(view, trained)
    return engine


def build_forward_engine(model: nn.Module, settings: ZeroSettings) -> Any:
    """Wrap a model whose parameters are partitioned in a ZeRO-3 engine without an optimizer, for forward passes only.

    All ranks of the world must call this function, with a model built for `partition_config` of the settings.
    """
    import deepspeed

    assert settings.stage == 3
    _gather_head_at_once(model)
    gather_experts_at_once(model)
    engine, *_ = deepspeed.initialize(model=model, config=zero_config(settings), dist_init_required=False)
    trace_parameters_only(engine)
    engine.eval()
    return engine


def _gather_head_at_once(model: nn.Module) -> None:
    """Make ZeRO-3 gather the weights of an output head with submodules, such as adapters, once for all loss tiles."""
    from deepspeed.utils import set_z3_leaf_module

    inner = inner_model(model)
    if inner is None:
        return
    with suppress(NoTilesError):
        for head in find_parts(inner).heads.values():
            if any(True for _ in head.children()):
                set_z3_leaf_module(head, True)


def gather_experts_at_once(model: nn.Module) -> None:
    """Make ZeRO-3 gather all of a layer's expert weights together, once per layer call.

    Call this function before building the engine. Some layers, such as DBRX's, call a separate module for each expert
    that receives tokens. Ranks have different tokens, so a gather on each of these calls would wait for ranks that do
    not make the call. PEFT's adapters on experts, and linear layers with DoRA, read the weights of their submodules.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in model.modules():
        shapes = (shape_of(one) for one in module.parameters(recurse=False))
        is_stacked = any(sum(size > 1 for size in shape) > 2 for shape in shapes)
        is_stacked = is_stacked and layout_of(module) is None  # Zamba's recurrent layers have stacked heads.
        is_experts = is_stacked or type(module).__name__.endswith("Experts")
        if (is_experts and next(module.children(), None) is not None) or reads_others(module):
            set_z3_leaf_module(module, True)


def trace_parameters_only(engine: Any) -> None:
    """Make ZeRO-3 trace only calls of modules with parameters.

    DeepSpeed 0.19.8 records a trace of all module calls on each rank. If the calls on one rank change between
    micro-batches, only that rank discards its trace, its next collectives differ from the other ranks' collectives, and
    all ranks hang. Whether a module without parameters is called may depend on a rank's data: for example, an expert's
    activation function is called only if the expert receives tokens.
    """
    # Without an optimizer, DeepSpeed puts the offload in its place.
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    hooks_without_use = {
        id(hooks)
        for module in engine.module.modules()
        if next(module.parameters(), None) is None
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    }
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooks_without_use:
            handle.remove()


def make_optimizer(groups: list[dict[str, Any]], settings: ZeroSettings) -> torch.optim.Optimizer:
    """Return the optimizer of ``parameter_groups``, which ZeRO will wrap."""
    from deepspeed.accelerator import get_accelerator

    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    # On a GPU, one kernel updates all elements without temporaries, and steps are counted on the device. On a CPU, the
    # fused update rounds a tensor's last elements differently, so results would depend on the world size.
    fused = (settings.offload_optimizer == "none" and get_accelerator().device_name() == "cuda") or None
    if settings.kind == "muon":
        dtype = torch.float32 if settings.dtype == "fp32" else torch.bfloat16
        return MuonAdamW(groups, dtype=dtype, fused=fused, **options)
    if settings.kind == "adamw_bf16_moments":
        return AdamWBf16Moments(groups, seed=settings.seed, **options)
    if settings.offload_optimizer != "none" and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        offloaded: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return offloaded
    return torch.optim.AdamW(groups, fused=fused, **options)


LOCK_FILE = "in-use"
_PREFIX = "process-"


class SwapFolder:
    """A new folder under a root directory on a local disk, locked until it is closed or the process ends.

    Two attempts of a run may be alive on the same node for a while if the older attempt has not yet noticed that it was
    abandoned. If they shared files, the attempts would overwrite each other's state. Folders of dead processes are
    deleted when a new folder is created.

    Raises:
        OSError: The root directory is not writable.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        # Only one process may create a folder at a time, because a new folder is not locked yet.
        with os.fdopen(open_inside(root / LOCK_FILE, root, os.O_RDWR | os.O_CREAT)) as turn:
            lock(turn.fileno(), wait=True)
            for folder in root.glob(f"{_PREFIX}*"):
                # A folder is skipped if its owner is alive or has just deleted it, or if it is a link not created by
                # this class.
                with suppress(BlockingIOError, FileNotFoundError, NotAPlainFileError):
                    descriptor = lock_file(folder / LOCK_FILE, root)
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(descriptor)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._lock = lock_file(self.path / LOCK_FILE)

    def close(self) -> None:
        """Delete the folder. Call this method once, after the last swap."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
