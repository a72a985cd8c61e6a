"""Memory of a training step: its peak and slope with and without tiles.

Each measurement is one forward and backward pass in a process of its own, beside plain Transformers and DeepSpeed's
tiles.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.runner import MIB, Benchmark, Record, columns, fresh, header, main, measured, met, say, spread

TOKENS = (4096, 8192)
MODEL: dict[str, int] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 32_000, "max_position_embeddings": 65_536,
}  # fmt: skip
SIDES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "deepspeed": {},
    "untiled": {"loss_tile": "off", "mlp_tile": "off", "kept": "both"},
    "tiled": {"loss_tile": "auto", "mlp_tile": "auto", "kept": "both"},
    "tiled, MLP too": {"loss_tile": "auto", "mlp_tile": 1024, "kept": "both"},
    "tiled, attention computed again": {"loss_tile": "auto", "mlp_tile": 1024, "kept": "none"},
}
GOAL_PEAK, GOAL_SLOPE_KB = 0.2, 15.0

RULES = (
    "**Peak** is how much the resident memory of a process grows in a step: activations, logits and gradients, "
    "without weights and optimizer. One row is one document; fp32, gradient checkpointing and SDPA's kernel for the "
    "CPU on every side, one step per process. Freed tensors go back to the system at once "
    "(`MALLOC_MMAP_THRESHOLD_=65536`)."
)


def take_step(side: str, sizes: dict[str, int], tokens: int) -> dict[str, float]:
    """Take one step of a side in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    llama = LlamaConfig(**sizes, use_cache=False)
    model: Any = LlamaForCausalLM._from_config(llama, attn_implementation="sdpa").train()
    ids = torch.randint(0, sizes["vocab_size"], (1, tokens))
    peers = {"transformers": _transformers_step, "deepspeed": _deepspeed_step}
    run = peers[side](model, ids) if side in peers else _our_step(model, ids, **SIDES[side])
    start = time.process_time()
    with measured() as used:
        run()
    return {"peak_bytes": used["grown_bytes"], "cpu_s": time.process_time() - start}


def _transformers_step(model: Any, ids: Any) -> Callable[[], None]:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def _our_step(model: Any, ids: Any, loss_tile: Any, mlp_tile: Any, kept: Any) -> Callable[[], None]:
    from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
    from ray_ulysses.attention.recompute import checkpoint_contexts
    from ray_ulysses.engine.tiled_mlp import tile_mlps

    mesh = SequenceMesh.from_group(None)
    contexts = checkpoint_contexts(kept)
    options = {"use_reentrant": False} | ({} if contexts is None else {"context_fn": contexts})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    apply_ulysses(model, mesh)
    tile_mlps(model, mlp_tile)
    batch = shard_batch(ids, None, None, mesh)

    def run() -> None:
        loss_sum, num_tokens = causal_lm_loss(model, batch, tile=loss_tile)
        (loss_sum / num_tokens).backward()

    return run


def _deepspeed_step(model: Any, ids: Any) -> Callable[[], None]:
    """Give Transformers' model DeepSpeed's TiledMLP and TiledFusedLogitsLoss, with tiles as large as ours."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    def product(self: Any, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled(self: Any, x: Any) -> Any:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(product, self, x, math.ceil(x.shape[1] / 1024), weights)

    def loss_of(self: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.lm_head(x).float(), y)

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        type(layer.mlp).forward = tiled

    def run() -> None:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
        shards, weights = math.ceil(ids.shape[1] / 512), [model.lm_head.weight]
        loss: Any = TiledFusedLogitsLoss.apply(loss_of, model, hidden, labels, None, shards, weights, "mean")
        loss.backward()

    return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every side at both lengths in turn."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    found: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        for tokens in TOKENS:
            for side in SIDES:
                found.append({"side": side, "tokens": tokens, **fresh(take_step, side, MODEL, tokens)})
                say(f"{side} {tokens}: {found[-1]['peak_bytes'] / MIB:.0f} MiB")
    return {"found": found}


def peaks(found: Sequence[Record], side: str, tokens: int) -> list[float]:
    """Return the peaks of a side at a length, in MiB."""
    return [one["peak_bytes"] / MIB for one in found if (one["side"], one["tokens"]) == (side, tokens)]


def slope_kb(found: Sequence[Record], side: str) -> float:
    """Return the growth of the peak per token, in units of 1,000 bytes."""
    short, long = (median(peaks(found, side, tokens)) for tokens in TOKENS)
    return (long - short) * MIB / (TOKENS[1] - TOKENS[0]) / 1000


def page(record: Record) -> str:
    """Return the page on peaks."""
    found, long = record["found"], TOKENS[1]
    peer = median(peaks(found, "transformers", long))
    ratio, slope = median(peaks(found, "tiled", long)) / peer, slope_kb(found, "tiled")

    text = (
        f"{RULES} Goals for `tiled`: at most {GOAL_PEAK} of Transformers' peak: {met(ratio <= GOAL_PEAK)}; at most "
        f"{GOAL_SLOPE_KB:.0f} KB per token: {met(slope <= GOAL_SLOPE_KB)}."
    )
    sides = columns(
        list(SIDES),
        side=lambda side: side,
        peak_at_4k_tokens=lambda side: f"{spread(peaks(found, side, TOKENS[0]), '{:.0f}')} MiB",
        peak_at_8k_tokens=lambda side: f"{spread(peaks(found, side, long), '{:.0f}')} MiB",
        of_Transformers=lambda side: f"{median(peaks(found, side, long)) / peer:.3f}",
        KB_per_token=lambda side: f"{slope_kb(found, side):.1f}",
    )
    return "\n\n".join([header("Memory of a step", record, text), sides])


BENCHMARK = Benchmark(
    name="memory",
    about="Memory of a training step, beside plain Transformers and DeepSpeed's tiles.",
    measure=measure,
    page=page,
    packages=("torch", "transformers", "deepspeed"),
    hardware="one thread per process, one process at a time",
    options={"repeats": (3, "processes per side and length")},
    quick={"repeats": 1},
)

if __name__ == "__main__":
    main(BENCHMARK)
