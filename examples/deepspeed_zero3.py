"""Trains with ZeRO-3; ranks share each row.

Run it with `torchrun --nproc-per-node 4 examples/deepspeed_zero3.py --sp-size 2`.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from tiny import DOCUMENT_LENGTHS, ROWS_PER_STEP, STEPS, make_model, make_row

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.engine.zero import gather_experts_at_once, prepare_process, trace_parameters_only


def main(sp_size: int) -> None:
    """Train; every rank must call."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    # On a CPU, DeepSpeed would otherwise compile an operator at start.
    prepare_process(local_rank, device.type)
    import deepspeed

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()
    dp_rank, dp_size = dist.get_rank() // sp_size, dist.get_world_size() // sp_size
    # Neighboring ranks share a row.
    sp_group, _ = dist.new_subgroups(sp_size)
    mesh = SequenceMesh.from_group(sp_group)

    model = apply_ulysses(make_model().to(device), mesh)
    # For models with experts: ranks have tokens for different ones, and ZeRO-3 would wait forever.
    gather_experts_at_once(model)
    accumulation = ROWS_PER_STEP // dp_size
    # Neither an `mpu` nor `sequence_parallel_size`: the engine must average over all ranks.
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    trace_parameters_only(engine)
    for step in range(STEPS):
        rows = [make_row(step, number).to(device) for number in range(dp_rank, ROWS_PER_STEP, dp_size)]
        batches = [shard_batch(row, None, DOCUMENT_LENGTHS, mesh) for row in rows]
        # The loss is divided by the step's supervised tokens, over all ranks and micro-batches.
        tokens = sum((batch.labels_BL != -100).sum() for batch in batches)
        dist.all_reduce(tokens)
        # DeepSpeed averages over ranks, and divides by the number of micro-batches.
        scale = loss_scale(tokens, mesh, zero_stage=3, accumulation=accumulation)
        loss = torch.zeros((), device=device)
        for batch in batches:
            loss_sum, _ = causal_lm_loss(engine, batch)
            engine.backward(loss_sum * scale)
            engine.step()
            loss += loss_sum.detach()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step={step + 1} loss={loss / tokens:.8f} grad_norm={engine.get_global_grad_norm():.8f}")
    # Wait for all ranks, which may still be in a collective.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sp-size", type=int, default=2, help="number of ranks that share a row")
    main(parser.parse_args().sp_size)
