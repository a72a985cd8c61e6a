"""Shards rows of packed documents over the ranks of ``sp``.

Legend: B rows, S tokens per row, L = S / sp_size tokens per row on this rank (with a ring, two ranges of the row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_ulysses.attention.documents import PackedDocuments, pack_documents
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.collectives import gather_sequence
from ray_ulysses.parallel.layout import held_ranges, row_multiple
from ray_ulysses.parallel.mesh import SequenceMesh

IGNORE_INDEX = -100
"""Label of a position that does not contribute to the loss."""

MODEL_INPUT = "ulysses"
"""Name of the keyword argument that passes the batch to the model's forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedBatch:
    """This rank's slice of ``B`` rows, the input of a model prepared by ``apply_ulysses``."""

    input_ids_BL: torch.Tensor
    labels_BL: torch.Tensor
    """int64 labels: the label at position ``t`` is the token to predict from position ``t``, or ``IGNORE_INDEX``."""
    position_ids_BL: torch.Tensor
    """int64 zero-based position of each token within its document; 0 for padding."""
    document_lengths_BL: torch.Tensor
    """int32 length in tokens of the complete document that contains each token; 0 for padding."""
    documents: PackedDocuments
    """Document tables for this ring rank's share of the rows."""
    mesh: SequenceMesh
    token_ids: tuple[int, int] | None = None
    """Smallest and largest token id of the unsharded rows, or None if the rows are on a GPU."""
    label_weights_BL: torch.Tensor | None = None
    """fp32 weight of each label's loss, or None if all weights are 1."""
    largest_label: int | None = None
    """Largest label of the unsharded rows, 0 if no token has a label, or None if the rows are on a GPU."""
    has_shifted_labels: bool = True
    """Whether each label is the document's next token."""

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for the model's forward. Labels are omitted: the loss is computed separately."""
        return {
            "input_ids": self.input_ids_BL,
            "position_ids": self.position_ids_BL,
            "use_cache": False,
            MODEL_INPUT: self,
        }


def shard_batch(
    input_ids: torch.Tensor,
    labels: torch.Tensor | None,
    document_lengths: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | None,
    mesh: SequenceMesh,
    *,
    label_weights: torch.Tensor | None = None,
    shift_labels: bool = True,
) -> ShardedBatch:
    """Return this rank's slice of a batch, without communication.

    Every rank of ``sp`` must pass the same rows.

    Args:
        input_ids: Token ids of complete rows, int ``[B, S]`` or ``[S]``.
        labels: int ``[B, S]`` or ``[S]``, not shifted (the Hugging Face convention): each label is the token id at the
            same position, or ``IGNORE_INDEX``. If None, every token of every document is trained on.
        document_lengths: Lengths in tokens of each row's packed documents, in order: a flat sequence for a single row,
            otherwise one sequence per row. The remainder of a row is padding. If None, each row is a single document.
        mesh: The mesh to shard over. Rows are padded to a multiple of ``mesh.sp_size``, or ``2 * mesh.sp_size`` with a
            ring.
        label_weights: Loss weight of each token when it is a label, ``[B, S]`` or ``[S]``. None means 1 for all tokens.
        shift_labels: Whether position ``t`` predicts the label at ``t + 1``, as in a causal language model, so that a
            document's last token has no target. If false, position ``t`` predicts the label at ``t``, as in a masked
            language model: set ``labels`` to ``IGNORE_INDEX`` at all tokens that are not masked.

    Returns:
        This rank's slice.

    Raises:
        UserError: Shapes or devices differ, a row has no document, the documents are longer than their row, or a label
            is neither a token id nor ``IGNORE_INDEX``.
    """
    input_ids_BS = _rows(input_ids, "input_ids")
    labels_BS = input_ids_BS if labels is None else _rows(labels, "labels")
    _check_alike("labels", labels_BS, input_ids_BS)
    num_rows, num_tokens = input_ids_BS.shape
    lengths = _lengths(document_lengths, num_rows, num_tokens)
    padding = -num_tokens % row_multiple(mesh.sp_size, mesh.ring_size)
    documents = pack_documents(
        lengths, num_tokens + padding, input_ids_BS.device, ring_size=mesh.ring_size, ring_rank=mesh.ring_rank
    )

    # [B, S] -> [B, S + padding]
    input_ids_BS = torch.nn.functional.pad(input_ids_BS, (0, padding), value=0)
    labels_BS = torch.nn.functional.pad(labels_BS, (0, padding), value=IGNORE_INDEX)
    shift = 1 if shift_labels else 0
    weights_BS = _shifted_weights(label_weights, input_ids_BS, padding, shift)
    shifted_BS, position_ids_BS = _inside_documents(labels_BS, lengths, shift)
    return ShardedBatch(
        input_ids_BL=held_tokens(input_ids_BS, mesh),
        labels_BL=held_tokens(shifted_BS, mesh),
        position_ids_BL=held_tokens(position_ids_BS, mesh),
        document_lengths_BL=held_document_lengths(documents, mesh).to(input_ids_BS.device),
        documents=documents,
        mesh=mesh,
        token_ids=_bounds(input_ids_BS),
        label_weights_BL=None if weights_BS is None else held_tokens(weights_BS, mesh),
        largest_label=_largest_label(shifted_BS),
        has_shifted_labels=shift_labels,
    )


def _inside_documents(
    labels_BS: torch.Tensor, lengths: Sequence[Sequence[int]], shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shifted_BS, position_ids_BS = torch.full_like(labels_BS, IGNORE_INDEX), torch.zeros_like(labels_BS)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            end = start + length
            shifted_BS[row, start : end - shift] = labels_BS[row, start + shift : end]
            position_ids_BS[row, start:end] = torch.arange(length, device=labels_BS.device)
            start = end
    return shifted_BS, position_ids_BS


def _check_alike(name: str, tensor: torch.Tensor, input_ids_BS: torch.Tensor) -> None:
    if tensor.shape != input_ids_BS.shape:
        raise UserError(
            f"{name} have shape {tuple(tensor.shape)} but input_ids have shape {tuple(input_ids_BS.shape)}; pass "
            "tensors of the same shape"
        )
    if tensor.device != input_ids_BS.device:
        raise UserError(f"{name} are on {tensor.device}, but input_ids on {input_ids_BS.device}; use the same device")


def _shifted_weights(
    weights: torch.Tensor | None, padded_BS: torch.Tensor, padding: int, shift: int
) -> torch.Tensor | None:
    if weights is None:
        return None
    weights_BS = weights.reshape(-1, weights.shape[-1]).float()
    _check_alike("label_weights", weights_BS, padded_BS[:, : padded_BS.shape[1] - padding])
    return torch.nn.functional.pad(weights_BS[:, shift:], (0, padding + shift))


def _bounds(input_ids_BS: torch.Tensor) -> tuple[int, int] | None:
    """Return the smallest and largest id, or None for a GPU tensor, because reading its values would block the host."""
    if input_ids_BS.device.type != "cpu":
        return None
    smallest, largest = torch.aminmax(input_ids_BS)
    return int(smallest), int(largest)


def _largest_label(shifted_BS: torch.Tensor) -> int | None:
    bounds = _bounds(torch.where(shifted_BS == IGNORE_INDEX, 0, shifted_BS))
    if bounds is None:
        return None
    smallest, largest = bounds
    if smallest < 0:
        raise UserError(
            f"labels (by default input_ids) contain {smallest}; use token ids of at least 0, or {IGNORE_INDEX} for "
            "tokens to exclude from the loss"
        )
    return largest


def held_tokens(rows_BS: torch.Tensor, mesh: SequenceMesh) -> torch.Tensor:
    """Return this rank's tokens of complete rows, contiguous ``[B, L]``. With a ring, each row has two ranges."""
    ranges = held_ranges(rows_BS.shape[1], mesh.sp_rank, mesh.sp_size, mesh.ring_size)
    return torch.cat([rows_BS[:, start:stop] for start, stop in ranges], dim=1)


def held_document_lengths(documents: PackedDocuments, mesh: SequenceMesh) -> torch.Tensor:
    """Return the document length of each of this rank's tokens, int32 ``[B, L]`` on the host."""
    lengths_BS = torch.zeros(documents.num_rows, documents.row_tokens, dtype=torch.int32, device="cpu")
    for row, lengths in enumerate(documents.lengths):
        each = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        lengths_BS[row, : sum(lengths)] = each.repeat_interleave(each)
    return held_tokens(lengths_BS, mesh)


def held_document_numbers(documents: PackedDocuments, mesh: SequenceMesh) -> torch.Tensor:
    """Return the number of each of this rank's tokens' document through all rows, int64 ``[B, L]`` on the host.

    Padding has the number of documents.
    """
    num_documents = sum(map(len, documents.lengths))
    numbers_BS = torch.full((documents.num_rows, documents.row_tokens), num_documents, device="cpu")
    first = 0
    for row, lengths in enumerate(documents.lengths):
        each = torch.arange(first, first + len(lengths), device="cpu")
        # With a dtype: a row of padding has no lengths.
        numbers_BS[row, : sum(lengths)] = each.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device="cpu"))
        first += len(lengths)
    return held_tokens(numbers_BS, mesh)


def unshard(local: torch.Tensor, batch: ShardedBatch) -> torch.Tensor:
    """Gather the slices of all ranks into complete rows; differentiable.

    All ranks of ``sp`` must call this function.

    Args:
        local: This rank's slice of a result such as the logits, ``[B, L, ...]``.
        batch: The batch from which ``local`` was computed.

    Returns:
        The rows in token order, ``[B, T, ...]``, where ``T`` is the largest number of document tokens in a row.
    """
    if local.shape[:2] != batch.input_ids_BL.shape:
        raise UserError(
            f"unshard got a tensor of shape {tuple(local.shape)}; its first two dims must be "
            f"{tuple(batch.input_ids_BL.shape)}, the shape of the batch's slice on this rank"
        )
    mesh, row_tokens = batch.mesh, batch.documents.row_tokens
    whole = local if mesh.sp_size == 1 else gather_sequence(local, mesh.group("sp"))
    if mesh.ring_size > 1:
        whole = _in_row_order(whole, row_tokens, mesh)
    return whole[:, : batch.documents.num_document_tokens]


def _in_row_order(whole_BS: torch.Tensor, row_tokens: int, mesh: SequenceMesh) -> torch.Tensor:
    ranges, place = [], 0
    for rank in range(mesh.sp_size):
        for start, stop in held_ranges(row_tokens, rank, mesh.sp_size, mesh.ring_size):
            ranges.append((start, whole_BS[:, place : place + stop - start]))
            place += stop - start
    return torch.cat([part for _, part in sorted(ranges, key=lambda item: item[0])], dim=1)


def _rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.dim() == 1:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.numel() == 0:
        raise UserError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; pass a nonempty integer tensor [B, S]"
        )
    return tensor.long()


def _lengths(
    given: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | None, num_rows: int, num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    if given is None:
        return ((num_tokens,),) * num_rows
    values: Any = given.tolist() if hasattr(given, "tolist") else list(given)
    if values and isinstance(values[0], Sequence | torch.Tensor):
        # A tensor of lengths is rectangular, so shorter rows end with zeros.
        rows = tuple(_without_trailing_zeros(tuple(map(int, row))) for row in values)
    else:
        rows = (tuple(map(int, values)),)
    if () in rows:
        raise UserError(
            f"document_lengths[{rows.index(())}] is empty, so the row would consist of padding only; pass the length "
            "of at least one document, or drop the row"
        )
    if len(rows) != num_rows:
        raise UserError(
            f"document_lengths has {len(rows)} rows but input_ids has {num_rows}; pass one sequence of lengths per row"
        )
    return rows


def _without_trailing_zeros(lengths: tuple[int, ...]) -> tuple[int, ...]:
    while lengths and lengths[-1] == 0:
        lengths = lengths[:-1]
    return lengths
