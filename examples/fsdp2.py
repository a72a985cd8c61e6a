"""Trains with FSDP2; groups of ranks share each row.

Run it with `torchrun --nproc-per-node 4 examples/fsdp2.py --sp-size 2`.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from tiny import DOCUMENT_LENGTHS, ROWS_PER_STEP, STEPS, make_model, make_row
from torch.distributed.fsdp import fully_shard

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch


def main(sp_size: int) -> None:
    """Train; every rank must call."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()
    dp_rank, dp_size = dist.get_rank() // sp_size, dist.get_world_size() // sp_size
    # Neighboring ranks share a row.
    sp_group, _ = dist.new_subgroups(sp_size)
    mesh = SequenceMesh.from_group(sp_group)

    model = apply_ulysses(make_model().to(device), mesh)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        rows = [make_row(step, number).to(device) for number in range(dp_rank, ROWS_PER_STEP, dp_size)]
        batches = [shard_batch(row, None, DOCUMENT_LENGTHS, mesh) for row in rows]
        # The loss is divided by the step's supervised tokens, over all ranks and micro-batches.
        tokens = sum((batch.labels_BL != -100).sum() for batch in batches)
        dist.all_reduce(tokens)
        # FSDP2 averages over ranks, and does not divide by the number of micro-batches.
        scale = loss_scale(tokens, mesh, zero_stage=0, accumulation=1)
        loss = torch.zeros((), device=device)
        for batch in batches:
            loss_sum, _ = causal_lm_loss(model, batch)
            (loss_sum * scale).backward()
            loss += loss_sum.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step={step + 1} loss={loss / tokens:.8f} grad_norm={grad_norm:.8f}")
    # Wait for all ranks, which may still be in a collective.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sp-size", type=int, default=2, help="number of ranks that share a row")
    main(parser.parse_args().sp_size)
