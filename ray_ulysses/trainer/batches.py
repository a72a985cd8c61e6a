"""Turns row slices of the data plan into batches of the attention engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ray_ulysses.attention.batch import ShardedBatch, held_document_lengths
from ray_ulysses.attention.documents import on_device, pack_documents
from ray_ulysses.data.read.digest import ranges_checksum
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.layout import held_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ray_ulysses.data.read.reader import RowSlice
    from ray_ulysses.parallel.mesh import SequenceMesh


class Given(NamedTuple):
    """What the model was given of one row.

    Attributes:
        place: The row's place in the step.
        num_supervised: Supervised tokens of the batch.
        checksum: Returns the checksum of the batch; see `read_back`.
    """

    place: int
    num_supervised: int
    checksum: Callable[[], int]


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
        input_ids_BL=_row_on(row.input_ids, device),
        labels_BL=_row_on(row.labels, device),
        position_ids_BL=_row_on(row.position_ids, device),
        document_lengths_BL=on_device(held_document_lengths(documents, mesh), device),
        documents=documents,
        mesh=mesh,
        label_weights_BL=None if row.label_weights is None else _row_on(row.label_weights, device),
    )


def _row_on(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    return on_device(torch.from_numpy(values).unsqueeze(0), device)


def read_back(batch: ShardedBatch) -> Callable[[], int]:
    """Begin to read back what the model was given, and return what returns its checksum.

    On a GPU the copies come after all that it has to do already, for which the host does not wait here: the result may
    be called once that is done.
    """
    given = (batch.input_ids_BL, batch.labels_BL, batch.position_ids_BL, batch.label_weights_BL)
    copies = [None if tensor is None else tensor[0].to("cpu", non_blocking=True) for tensor in given]
    mesh = batch.mesh
    ranges = held_ranges(batch.documents.row_tokens, mesh.sp_rank, mesh.sp_size, mesh.ring_size)

    def checksum() -> int:
        arrays: list[Any] = [None if copy is None else copy.numpy() for copy in copies]
        return ranges_checksum(ranges, *arrays)

    return checksum


def received_of(given: Sequence[Given], num_rows: int, device: torch.device) -> tuple[list[int], int]:
    """Return the sum of the checksums of each of a step's rows, and the supervised tokens of all batches.

    On a GPU it waits until all that was asked of it is done.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    checksums = [0] * num_rows
    for one in given:
        checksums[one.place] += one.checksum()
    return checksums, sum(one.num_supervised for one in given)
