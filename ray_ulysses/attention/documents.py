"""Where documents begin and end in packed rows: tables made once a step on the host and handed down.

A layer never derives them again, so attention needs no gather of positions and no host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedDocuments:
    """The documents of ``B`` rows of ``row_tokens`` tokens each.

    Attributes:
        row_tokens: Length of every row in tokens, padding included.
        lengths: Per row, the lengths of its documents in order, without padding.
        spans: ``(row, start, end)`` of everything attention runs over: each document, and each row's tail of
            padding as a span of its own, so that no token is outside a span and nothing attends to padding.
        cu_seqlens: int32 ``[len(spans) + 1]``: the spans' borders in the rows laid end to end.
        max_seqlen: Longest span in tokens.
        max_position: Largest position id of a document token; what length-dependent RoPE must see.
    """

    row_tokens: int
    lengths: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, int, int], ...]
    cu_seqlens: torch.Tensor
    max_seqlen: int
    max_position: int

    @property
    def num_rows(self) -> int:
        """Number of rows, the batch size."""
        return len(self.lengths)

    @property
    def num_document_tokens(self) -> int:
        """Tokens of the fullest row without its padding."""
        return max(sum(row) for row in self.lengths)


def pack_documents(
    lengths: Sequence[Sequence[int]], row_tokens: int, device: torch.device | str = "cpu"
) -> PackedDocuments:
    """Make the tables of a batch on the host.

    Args:
        lengths: Per row, its documents' lengths in tokens, in order; what is left of the row is padding.
        row_tokens: Length of every row in tokens.
        device: Where ``cu_seqlens`` goes.

    Raises:
        UserError: A length is not positive, or a row's documents are longer than the row.
    """
    spans: list[tuple[int, int, int]] = []
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            if length < 1:
                raise UserError(f"document_lengths[{row}] holds {length}; every document has at least 1 token")
            spans.append((row, start, start + length))
            start += length
        if start > row_tokens:
            raise UserError(
                f"document_lengths[{row}] sums to {start}, more than the row's {row_tokens} tokens; "
                "the lengths of a row's documents must sum to at most its length"
            )
        if start < row_tokens:
            spans.append((row, start, row_tokens))
    borders = [0, *accumulate(end - start for _, start, end in spans)]
    return PackedDocuments(
        row_tokens=row_tokens,
        lengths=tuple(tuple(row) for row in lengths),
        spans=tuple(spans),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=device),
        max_seqlen=max(end - start for _, start, end in spans),
        max_position=max((length - 1 for row in lengths for length in row), default=0),
    )
