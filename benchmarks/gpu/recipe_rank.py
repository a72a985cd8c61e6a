"""Trains steps of a whole model as one of eight ranks does, on one GPU, in a process of its own; prints JSON.

Everything that a rank holds and computes is real: its share of weights, gradients and optimizer under ZeRO-3, the whole
model over its slice of the row, its heads over the whole row, tiles, and activations in host memory. The other ranks
are emulated: what a collective would bring is copied on the device (see ``one_step.py``), so times hold no wire, and
the loss means nothing. On a CPU a tiny case shows that the script works.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import clocks
from benchmarks.gpu.floor import floor_of
from benchmarks.gpu.kernel_classes import profiled
from benchmarks.gpu.one_step import GIB, Step, mfu_of, peer_model, start_group, timed
from ray_ulysses import SequenceMesh, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine import model as engine_model
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.prepare import prepare_model
from ray_ulysses.engine.zero import ZeroSettings, build_engine, prepare_process
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import configured_memory


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """Return at once."""


def gathered_into(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> Done:
    """Stand in for ``all_gather_into_tensor``: every rank's part is this rank's."""
    sent = input_tensor.view(-1)
    for part in output_tensor.view(-1, len(sent)):
        # What is sent may be a part of what is received.
        if part.data_ptr() != sent.data_ptr():
            part.copy_(sent)
    return Done()


def scattered(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> Done:
    """Stand in for ``reduce_scatter_tensor``: this rank's part alone."""
    own = input.view(-1)[: output.numel()]
    if own.data_ptr() != output.data_ptr():
        output.view(-1).copy_(own)
    return Done()


def make_config(case: dict[str, Any]) -> Config:
    """Return the configuration of the run that this rank belongs to."""
    return parse_config(
        {
            "run": {"name": "recipe", "storage": "/nowhere", "stop_step": 1},
            "model": {"init": "random", "dtype": "bf16", "config": case["model"], **case.get("changes", {})},
            "data": {"path": "none", "context_tokens": case["context"], "rows_per_step": 1},
            "parallel": {"sp_size": case["sp"]},
            "optimizer": {"lr": 1e-5},
            "schedule": {"horizon_steps": 10, "warmup_steps": 1},
            "memory": {"zero_stage": 3, **case["memory"]},
            "cluster": {"workers": case["sp"], "gpus_per_worker": 1},
        }
    )


def tiled_peer(case: dict[str, Any], config: Config) -> Any:
    """Return Transformers' model with DeepSpeed's Ulysses and tiled MLP, and its own offload."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    model = peer_model(case, config)
    model.activation_checkpointing_enable(offload=case["device"] == "cuda")

    def product(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

    def tiled(self: Any, x: torch.Tensor) -> torch.Tensor:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(product, self, x, math.ceil(x.shape[1] / x.shape[2]), weights)  # type: ignore[no-any-return]

    for layer in model.model.layers:
        type(layer.mlp).forward = tiled
    return model


def peer_loss(model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """Return the loss by DeepSpeed's tiled head, in as many tiles as its authors choose by default."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    inner = model.module
    hidden = inner.model(**inputs).last_hidden_state

    def loss_of(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.lm_head(x).float(), y)

    # A tile of 1 GiB of fp32 logits.
    shards = math.ceil(hidden.shape[1] * inner.config.vocab_size * 4 / GIB)
    return TiledFusedLogitsLoss.apply(  # type: ignore[no-any-return]
        loss_of, inner, hidden, labels, None, shards, [inner.lm_head.weight], "mean"
    )


def build(case: dict[str, Any]) -> tuple[Any, Any, dict[str, float]]:
    """Return the engine, a function that makes the step of a row, and what ``plan`` predicts in GiB."""
    device, config = torch.device(case["device"]), make_config(case)
    shape = ModelShape.from_config_dict(case["model"])
    settings = ZeroSettings(
        dtype="bf16",
        accumulation=1,
        max_grad_norm=1.0,
        learning_rate=1e-5,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        offload_optimizer=config.memory.offload_optimizer,
    )
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    is_ours = case["side"] == "ours"
    # Weights are drawn on the device, since the host takes minutes for them; the probe needs the host.
    with device, mock.patch.object(engine_model, "refuse_architecture"):
        model: Any = build_model(config) if is_ours else tiled_peer(case, config)
    if is_ours:
        prepare_model(model, config, shape, mesh, device)
    engine = build_engine(model, settings)
    del model
    engine.train()

    def step_of(tokens: int, documents: tuple[int, ...]) -> Step:
        row = torch.randint(0, case["model"]["vocab_size"], (1, tokens), device=device)
        batch = shard_batch(row, None, documents, mesh)
        inputs = {"input_ids": batch.input_ids_BL, "position_ids": batch.position_ids_BL, "use_cache": False}

        def step() -> torch.Tensor:
            if is_ours:
                loss_sum, _ = causal_lm_loss(engine, batch, tile=config.memory.loss_tile)
                loss = loss_sum * loss_scale(tokens, mesh, zero_stage=3, accumulation=1)
            else:
                loss = peer_loss(engine, inputs, batch.labels_BL.clamp_min(0))
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    memory = configured_memory(config, shape)
    planned = {f"term {term.name}": term.bytes / GIB for term in memory.device}
    planned |= {"device_gib": memory.device_bytes / GIB, "host_gib": memory.host_bytes / GIB}
    return engine, step_of, planned


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step after one to warm up, and memory."""
    began = time.time()
    torch.manual_seed(0)
    # Before DeepSpeed keeps references to them.
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = gathered_into, scattered  # type: ignore[assignment]
    prepare_process(0, case["device"])
    start_group(case["sp"], case["device"])
    _, step_of, planned = build(case)
    built = time.time()
    # Over a row of the same length: it allocates and pins what the timed steps use.
    warm_up_s, _ = timed(step_of(case["context"], tuple(case["warm_up"])), 1, case["device"])
    step = step_of(case["context"], tuple(case["documents"]))
    with clocks.logged() as logged:
        seconds, memory = timed(step, case["steps"], case["device"])
    times = profiled(step, torch.device(case["device"]), case["profile"]) if case.get("profile") else {}
    if case["side"] == "ours":
        torch.cuda.empty_cache()
        times |= floor_of(case)
    return {
        "seconds": seconds,
        "build_s": built - began,
        "warm_up_s": warm_up_s[0],
        "mfu": mfu_of(case, statistics.median(seconds)),
        "clocks": logged,
        **times,
        **memory,
        "host_gib": host_gib(),
        "planned": planned,
    }


def host_gib() -> float:
    """Return this process's peak of resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 2**20


def main() -> None:
    """Measure the case that the first argument describes."""
    case = json.loads(sys.argv[1])
    try:
        found = measure(case)
    except torch.OutOfMemoryError as error:
        found = {"failure": "out of memory: " + str(error).partition(". ")[0]}
    except Exception as error:
        if case.get("raises"):
            raise
        found = {"failure": f"{type(error).__name__}: {error}"[:800]}
    sys.stdout.write(json.dumps({**case, **found}) + "\n")


if __name__ == "__main__":
    main()
