"""Runs the self-test in local processes, without a cluster or configuration, for ``ray-ulysses doctor``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ray_ulysses.engine.self_test import run_self_test
from ray_ulysses.engine.self_test_attention import AttentionSettings
from ray_ulysses.engine.zero import ZeroSettings, prepare_process
from ray_ulysses.errors import RunError, UlyssesError
from ray_ulysses.parallel.gpu_environment import keep_nccl_log
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.local_ranks import RankDiedError, run_local_ranks
from ray_ulysses.parallel.mesh import SequenceMesh

_LIMIT_S = 90.0
"""Time after which the processes are killed, in seconds. On an idle machine, they run for 5 to 15 s, mostly imports."""
_MOST_PROCESSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSelfTest:
    """Result of a self-test on local ranks."""

    ok: bool
    text: str
    """Measurements, or a description of the problem."""
    hint: str = ""
    """Remedy; empty if the test passed."""


def run_local_self_test() -> LocalSelfTest:
    """Run the self-test in two processes, on NCCL or, without GPUs, on gloo. A single GPU runs one process."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world_size = min(gpus or _MOST_PROCESSES, _MOST_PROCESSES)
    place = f"{world_size} process{'es' if world_size > 1 else ''} on {'NCCL' if gpus else 'gloo'}"
    result = self_test_on(self_test_rank, world_size, _LIMIT_S)
    return LocalSelfTest(ok=result.ok, text=f"{result.text}; {place}", hint=result.hint)


def self_test_on(work: Callable[..., str], world_size: int, limit_s: float) -> LocalSelfTest:
    """Run a self-test on local ranks, and return the result.

    ``work`` runs on each rank and returns the measurements as text. If ``work`` raises an error, the error's arguments
    are the problem and the remedy.
    """
    try:
        return LocalSelfTest(ok=True, text=run_local_ranks(work, world_size, limit_s=limit_s))
    except UlyssesError as error:
        text, hint = error.args
        return LocalSelfTest(ok=False, text=text, hint=hint)
    except RankDiedError as error:
        text = f"process {error.rank} ended with {error.how}: {error.last_line}"
        return LocalSelfTest(ok=False, text=text, hint="fix the cause: every run starts its processes in the same way")
    except TimeoutError:
        return LocalSelfTest(
            ok=False,
            text=f"not finished after {limit_s:.0f} s: local processes can't reach each other, or the machine is busy",
            hint="check the machine's load, its firewall, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
        )


def _settings(device: torch.device) -> tuple[AttentionSettings, ZeroSettings]:
    """Return attention and engine settings for the test, in bf16 on a GPU and otherwise in fp32."""
    is_gpu = device.type == "cuda"
    attention = AttentionSettings(
        num_heads=8,
        num_kv_heads=2,
        head_size=128 if is_gpu else 64,
        value_size=128 if is_gpu else 64,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
    )
    zero = ZeroSettings(
        dtype="bf16" if is_gpu else "fp32",
        accumulation=2,
        max_grad_norm=1.0,
        learning_rate=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
    )
    return attention, zero


def self_test_rank(device: torch.device, say: Callable[[str], object]) -> str:
    """Run the self-test on this rank, and return the measurements as text."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        keep_nccl_log(os.environ)
    world_size = dist.get_world_size()
    try:
        prepare_process(dist.get_rank(), device.type)
        # Import first, so that the reported time excludes these imports.
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("transformers.models.llama.modeling_llama")
        mesh = SequenceMesh.from_layout(ParallelLayout(world_size=world_size, sp_size=world_size))
        return run_self_test(mesh, device, *_settings(device)).in_words().removeprefix("self-test ")
    except UlyssesError as error:
        raise RunError(str(error), "training on this machine would give wrong results; see above") from error
    except RuntimeError as error:
        text = f"a kernel or a collective failed: {str(error).strip().splitlines()[0]}"
        raise RunError(text, "check the driver and the builds of torch, NCCL and flash-attn") from error
