"""Measures one side's training step on one GPU in a process of its own, and prints one line of JSON.

The rank of a larger Ulysses group is emulated: torch's fake process group stands for the others, and each all-to-all is
a copy of the same bytes on the device. So its times hold what a rank computes and copies, and nothing of the wire.
On a CPU a tiny case shows that the script works; its times mean nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import clocks
from benchmarks.gpu.kernel_classes import profiled
from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine import model as engine_model
from ray_ulysses.engine.fused_norms import fuse_norms
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import ZeroSettings, build_engine, partition_config, prepare_process
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import peak_bf16_flops, step_flops
from tests.planned import estimate

GIB = 2**30
PEER_ATTENTION = "benchmark_peer"

Step = Callable[[], torch.Tensor]


def copied(output: torch.Tensor, *others: Any, **named: Any) -> None:
    """Stand in for ``all_to_all_single``: as many bytes, read and written on this device."""
    sent = others[0] if others else named["input"]
    assert output.numel() == sent.numel() and output.is_contiguous() and sent.is_contiguous()
    output.view(-1).copy_(sent.view(-1))


def delivered(operations: list[dist.P2POp]) -> list[Any]:
    """Stand in for ``batch_isend_irecv``: each block that is received is a copy of one that is sent."""
    sent = [one.tensor for one in operations if one.op is dist.isend]
    for one in operations:
        if one.op is not dist.isend:
            one.tensor.view(-1).copy_(next(block for block in sent if block.numel() == one.tensor.numel()).view(-1))
    return []


def gathered(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """Stand in for ``all_gather``."""
    for part in tensor_list:
        part.copy_(tensor)


def start_group(sp: int, device: str) -> None:
    """Make the default process group: a real one for one rank, torch's fake group for one of several."""
    if sp == 1:
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=store, rank=0, world_size=1)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=sp, store=FakeStore())
    dist.all_to_all_single, dist.all_gather = copied, gathered  # type: ignore[assignment]
    dist.batch_isend_irecv = delivered


def config_of(case: dict[str, Any]) -> Any:
    """Return the configuration of a run with this model and these settings of memory."""
    kept = case["side"].partition(":")[2] or "none"
    return parse_config(
        {
            "run": {"name": "step", "storage": "/nowhere", "stop_step": 1},
            "model": {"init": "random", "dtype": "bf16", "config": case["model"], **case.get("changes", {})},
            "data": {"path": "none", "context_tokens": case["context"], "rows_per_step": case["sp"]},
            "parallel": {"sp_size": case["sp"]},
            "optimizer": {"lr": 1e-4},
            "schedule": {"horizon_steps": 10, "warmup_steps": 1},
            "memory": {"zero_stage": 3, "gradient_checkpointing": True, "attention_output": kept},
            "cluster": {"workers": case["sp"]},
        }
    )


def peer_model(case: dict[str, Any], config: Any) -> Any:
    """Return Transformers' model: alone, or with DeepSpeed's Ulysses attention around torch's."""
    model = build_model(config)
    if case["side"] == "transformers":
        model.set_attn_implementation("sdpa")
        return model
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    deepspeed.comm.init_distributed(dist_backend="nccl" if case["device"] == "cuda" else "gloo", verbose=False)
    sizes = case["model"]
    attention = UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=1,
        attn_head_count=sizes["num_attention_heads"],
        attn_head_size=sizes["head_dim"],
        kv_head_count=sizes["num_key_value_heads"],
        num_hidden_layers=sizes["num_hidden_layers"],
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    AttentionInterface.register(PEER_ATTENTION, attention)
    model.set_attn_implementation(PEER_ATTENTION)
    return model


def wait_for_turn(path: str | None) -> None:
    """Wait until no other process has the GPU, so that one is measured while the next imports; for life."""
    if path is not None:
        fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)


def build(case: dict[str, Any]) -> tuple[Any, Step]:
    """Return the model, or the engine around it, and a function that takes one step."""
    model: Any
    device, config, is_ours = torch.device(case["device"]), config_of(case), case["side"].startswith("ours")
    settings = ZeroSettings(
        dtype="bf16",
        accumulation=1,
        max_grad_norm=1.0,
        learning_rate=1e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
    )
    partition = partition_config(settings) if case["engine"] else None
    wait_for_turn(case.get("turn"))
    case["began"] = time.time()
    # Weights are drawn on the device, since the host takes most of a minute for them; the probe needs the host.
    with device, mock.patch.object(engine_model, "refuse_architecture"):
        model = build_model(config, partition) if is_ours else peer_model(case, config)
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    if is_ours:
        apply_ulysses(model, mesh, attention=case.get("kernel", "auto"))
        if config.model.fused_norms:
            fuse_norms(model)
    model = build_engine(model, settings) if case["engine"] else model.to(device)
    model.train()
    row = torch.randint(0, case["model"]["vocab_size"], (1, case["context"]), device=device)
    batch = shard_batch(row, None, case["documents"], mesh)
    inputs = {"input_ids": batch.input_ids_BL, "position_ids": batch.position_ids_BL, "use_cache": False}

    def step() -> torch.Tensor:
        if is_ours:
            inputs.update(batch.model_inputs())
        logits = model(**inputs).logits
        loss = (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.labels_BL.flatten(), reduction="sum")
            / batch.labels_BL.numel()
        )
        del logits
        if case["engine"]:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
        return loss.detach()

    return model, step


def predicted(case: dict[str, Any], shape: ModelShape) -> dict[str, float]:
    """Return what ``plan`` predicts, in GiB: of the whole device, and of everything but the training state."""
    found = estimate(
        shape,
        world_size=case["sp"],
        sp_size=case["sp"],
        context_tokens=case["context"],
        attention_output=case["side"].partition(":")[2] or "none",
        init="random",
        accelerator=False,
    )
    terms = {term.name: term.bytes / GIB for term in found.device}
    return {"device_gib": found.device_bytes / GIB, **{f"term {name}": gib for name, gib in terms.items()}}


def timed(step: Step, steps: int, device: str = "cuda") -> tuple[list[float], dict[str, float]]:
    """Return the seconds of each step, by events on a GPU, and its memory in GiB."""
    if device != "cuda":
        began = [time.perf_counter()]
        for _ in range(steps):
            step()
            began.append(time.perf_counter())
        return [after - before for before, after in pairwise(began)], {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return seconds, {
        "between_steps_gib": before / GIB,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def mfu_of(case: dict[str, Any], seconds: float) -> float | None:
    """Return the share of the device's peak that a step of these seconds reaches; None without a known GPU."""
    name = torch.cuda.get_device_name() if case["device"] == "cuda" else None
    peak = peak_bf16_flops(name)
    if peak is None:
        return None
    shape = ModelShape.from_config_dict(case["model"])
    squares = sum(length**2 for length in case["documents"])
    flops = step_flops(shape, tokens=case["context"] // case["sp"], sum_squared_lengths=0)
    flops += step_flops(shape, tokens=0, sum_squared_lengths=1) * squares / case["sp"]
    return flops / seconds / peak


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step after two to warm up, the loss of the first, and memory."""
    torch.manual_seed(0)
    prepare_process(0, case["device"])
    start_group(case["sp"], case["device"])
    _, step = build(case)
    losses = [float(step()) for _ in range(2)]
    times = profiled(step, torch.device(case["device"]), case["profile"]) if case.get("profile") else {}
    with clocks.logged() as logged:
        seconds, memory = timed(step, case["steps"], case["device"])
    middle = statistics.median(seconds)
    return {
        "seconds": seconds,
        "loss": losses[0],
        "seconds_in_turn": time.time() - case["began"],
        "mfu": mfu_of(case, middle),
        "tokens_per_s": case["context"] // case["sp"] / middle,
        "clocks": logged,
        **times,
        **memory,
        "predicted": predicted(case, ModelShape.from_config_dict(case["model"])),
    }


def main() -> None:
    """Measure the case that the first argument describes."""
    case = json.loads(sys.argv[1])
    try:
        found = measure(case)
    except torch.OutOfMemoryError as error:
        found = {"failure": "out of memory: " + str(error).partition(". ")[0]}
    except Exception as error:
        found = {"failure": f"{type(error).__name__}: {error}"[:500]}
    sys.stdout.write(json.dumps({**case, **found}) + "\n")


if __name__ == "__main__":
    main()
