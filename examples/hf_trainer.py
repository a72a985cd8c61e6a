"""Trains with Transformers' Trainer; groups of ranks share each row.

Run it with `torchrun --nproc-per-node 4 examples/hf_trainer.py --sp-size 2`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from tiny import DOCUMENT_LENGTHS, ROWS_PER_STEP, STEPS, make_model, make_row
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch


class UlyssesTrainer(Trainer):
    """Trains on rows of flattened documents. For TRL, derive it from `SFTTrainer` and set `SFTConfig(packing=True)`."""

    mesh: SequenceMesh

    def _get_dataloader(self, *arguments: Any, **options: Any) -> Any:
        loader = super()._get_dataloader(*arguments, **options)
        # The ranks of a mesh need the same batch. Accelerate would give each rank its own.
        loader.batch_sampler.num_processes = self.mesh.world_size // self.mesh.sp_size
        loader.batch_sampler.process_index = dist.get_rank() // self.mesh.sp_size
        return loader

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *, num_items_in_batch: Any) -> Any:
        """Return this rank's share of the loss, of which the Trainer takes the mean over ranks."""
        ids, starts = inputs["input_ids"], torch.nonzero(inputs["position_ids"][0] == 0).flatten()
        lengths = torch.diff(starts, append=starts.new_tensor([ids.shape[1]])).tolist()
        loss_sum, _ = causal_lm_loss(model, shard_batch(ids, inputs["labels"], lengths, self.mesh))
        # The Trainer counts the labels of all ranks, so each row's labels are counted sp_size times.
        loss = loss_sum * loss_scale(num_items_in_batch / self.mesh.sp_size, self.mesh, zero_stage=0)
        return (loss, {"loss": loss}) if return_outputs else loss


def main(sp_size: int) -> None:
    """Train; every rank must call."""
    schedule = {"max_steps": STEPS, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    sizes = {"per_device_train_batch_size": len(DOCUMENT_LENGTHS), "gradient_accumulation_steps": 2, "logging_steps": 1}
    options = TrainingArguments(**schedule, **sizes, save_strategy="no", use_cpu=not torch.cuda.is_available())
    model, mesh = make_model(), SequenceMesh.from_group(dist.new_subgroups(sp_size)[0])
    rows = [make_row(step, row).split(DOCUMENT_LENGTHS) for step in range(STEPS) for row in range(ROWS_PER_STEP)]
    data = [{"input_ids": document.tolist()} for row in rows for document in row]
    adamw = (torch.optim.AdamW(model.parameters()), None)
    trainer = UlyssesTrainer(apply_ulysses(model, mesh), options, DataCollatorWithFlattening(), data, optimizers=adamw)
    trainer.mesh = mesh
    trainer.train()
    for logged in trainer.state.log_history[:STEPS] if dist.get_rank() == 0 else ():
        print(f"step={logged['step']} loss={logged['loss']:.8f} grad_norm={logged['grad_norm']:.8f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sp-size", type=int, default=2, help="number of ranks that share a row")
    main(parser.parse_args().sp_size)
