"""Turns row slices of the data plan into batches of the attention engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ray_ulysses.attention.batch import ShardedBatch, held_document_lengths
from ray_ulysses.attention.documents import pack_documents
from ray_ulysses.data.read.digest import ranges_checksum
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.layout import held_ranges

if TYPE_CHECKING:
    from ray_ulysses.data.read.reader import RowSlice
    from ray_ulysses.parallel.mesh import SequenceMesh


def batch_of(row: RowSlice, mesh: SequenceMesh, device: torch.device) -> ShardedBatch:
    """Return a row slice as a batch of one row on a device.

    Raises:
        RunError: The slice is not this rank's: the data stream is out of order.
    """
    if (row.sp_rank, row.sp_size, row.ring_size) != (mesh.sp_rank, mesh.sp_size, mesh.ring_size):
        raise RunError(
            f"row {row.row} arrived as slice {row.sp_rank} of {row.sp_size} (ring {row.ring_size}), but this rank "
            f"trains slice {mesh.sp_rank} of {mesh.sp_size} (ring {mesh.ring_size}); the data stream is out of order. "
            "Resume the run; if it happens again, use data.engine: local"
        )
    documents = pack_documents(
        [row.document_lengths], row.row_tokens, device, ring_size=mesh.ring_size, ring_rank=mesh.ring_rank
    )
    return ShardedBatch(
        input_ids_BL=torch.from_numpy(row.input_ids).unsqueeze(0).to(device),
        labels_BL=torch.from_numpy(row.labels).unsqueeze(0).to(device),
        position_ids_BL=torch.from_numpy(row.position_ids).unsqueeze(0).to(device),
        document_lengths_BL=held_document_lengths(documents, mesh).to(device),
        documents=documents,
        mesh=mesh,
        label_weights_BL=(
            None if row.label_weights is None else torch.from_numpy(row.label_weights).unsqueeze(0).to(device)
        ),
    )


def batch_checksum(batch: ShardedBatch) -> int:
    """Return the checksum of the model's input: the batch's own tensors, read back from their device."""
    input_ids, labels, position_ids = (
        tensor[0].cpu().numpy() for tensor in (batch.input_ids_BL, batch.labels_BL, batch.position_ids_BL)
    )
    mesh = batch.mesh
    ranges = held_ranges(batch.documents.row_tokens, mesh.sp_rank, mesh.sp_size, mesh.ring_size)
    weights = None if batch.label_weights_BL is None else batch.label_weights_BL[0].cpu().numpy()
    return ranges_checksum(ranges, input_ids, labels, position_ids, weights)
