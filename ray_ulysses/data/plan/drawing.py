"""Draws the documents of an epoch in a seeded order and splits them into pieces, in one pass and constant memory.

A permutation maps place ``u`` of an epoch to a document of the sources in use. Documents that the epoch does not take,
those held out for evaluation, and those without a target are skipped. Fragments, the parts of documents that a change
of the run's data left untrained, are numbered after the documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan import packing_kernels
from ray_ulysses.data.plan.columns import Columns
from ray_ulysses.data.plan.mixing import mix_int
from ray_ulysses.data.plan.packing import Pieces
from ray_ulysses.data.plan.permutation import Permutation
from ray_ulysses.errors import UserError

Int64Array = NDArray[np.int64]
Overlong = Literal["split", "truncate", "drop", "error"]
BLOCK_PIECES = 1 << 17
COUNTERS = ("split", "truncated", "dropped", "lost_tokens", "refused")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fragments(Columns):
    """Untrained ranges of documents, drawn instead of the whole documents.

    Attributes:
        document: int64, numbers of the documents.
        start: int64, first token.
        length: int64, tokens; a range that stops before the document's end has the next token as its last label.
    """

    MEMORY = STORED = np.dtype([("document", "<i8"), ("start", "<i8"), ("length", "<i8")])
    document: Int64Array
    start: Int64Array
    length: Int64Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochDraw:
    """The sources that an epoch draws from, and its order.

    Attributes:
        counts: The documents of each source; 0 for one that is not used.
        seeds: Seeds of the order.
        held_out: Whether it takes the documents held out for evaluation instead of the others.
    """

    counts: tuple[int, ...]
    seeds: tuple[int, ...]
    held_out: bool


def evaluation_split(seed: int, eval_fraction: float) -> tuple[np.uint64, np.uint64]:
    """Return the key of the hash of documents, and the value below which one is held out for evaluation."""
    return np.uint64(mix_int(seed)), np.uint64(round(eval_fraction * 2.0**53))


class Drawing:
    """The documents that can be drawn, and how they are split.

    Args:
        lengths: uint32 [documents], of all sources, one after another.
        first_documents: int64 [sources + 1], number of each source's first document.
        seed: Determines each source's own order and the evaluation split.
        eval_fraction: Share of the documents that is held out.
        capacity: Tokens per row.
        overlong: What to do with documents that have more targets than a row holds.
        split: Whether overlong documents are split into pieces here.
        taken: bool [documents], documents to skip; None for none.
    """

    def __init__(
        self,
        lengths: NDArray[np.uint32],
        first_documents: Int64Array,
        *,
        seed: int,
        eval_fraction: float,
        capacity: int,
        overlong: Overlong,
        split: bool,
        taken: NDArray[np.bool_] | None = None,
    ) -> None:
        self._lengths = lengths
        self._bases = first_documents
        self._capacity = capacity
        self._split = split
        self._taken = np.empty(0, dtype=np.bool_) if taken is None else taken
        self._overlong = get_args(Overlong).index(overlong)
        self._split_key, self._threshold = evaluation_split(seed, eval_fraction)
        self._orders = [
            Permutation.seeded(int(size), seed, number, 0x0C19C1E)
            for number, size in enumerate(np.diff(first_documents))
        ]

    def count_documents(self) -> tuple[int, int, int]:
        """Return the number of documents held out, of those without a target, and of those held out that have one."""
        held, without, usable_held = packing_kernels.count_documents(self._lengths, self._split_key, self._threshold)
        return int(held), int(without), int(usable_held)

    def available_tokens(self, source: int) -> int:
        """Return the tokens of a source that an epoch can take."""
        first, last = int(self._bases[source]), int(self._bases[source + 1])
        skipped = (self._taken, self._split_key, self._threshold)
        return int(
            packing_kernels.available_tokens(self._lengths, first, last, skipped, self._capacity, self._overlong)
        )

    def fragment_tokens(self, fragments: Fragments) -> list[int]:
        """Return the tokens of each source that an epoch takes of fragments."""
        length = fragments.length
        has_next = fragments.start + length < self._lengths[fragments.document]
        is_long = length - 1 + has_next > self._capacity
        overlong = get_args(Overlong)[self._overlong]
        if overlong in ("truncate", "drop"):
            length = np.where(is_long, self._capacity if overlong == "truncate" else 0, length)
        source = np.searchsorted(self._bases, fragments.document, side="right") - 1
        tokens = np.zeros(self._bases.size - 1, dtype=np.int64)
        np.add.at(tokens, source, length)
        return tokens.tolist()

    def among(self, documents: NDArray[np.bool_]) -> Drawing:
        """Return a drawing of the given documents alone."""
        other = copy(self)
        other._taken = ~documents
        return other

    def choose(self, source: int, tokens: int, uses: NDArray[np.uint32], chosen: NDArray[np.bool_]) -> None:
        """Mark the least used documents of a source until they hold ``tokens`` tokens that an epoch can take.

        Args:
            source: Number of the source.
            tokens: Tokens to choose; if there are fewer, all documents that can be taken are chosen.
            uses: [documents], how often each was taken so far; ties are broken by a seeded order.
            chosen: [documents], set to true where a document is chosen.
        """
        documents = slice(int(self._bases[source]), int(self._bases[source + 1]))
        if tokens >= self.available_tokens(source):
            chosen[documents] = ~self._taken[documents] if self._taken.size else True
            return
        skipped = (self._taken, self._split_key, self._threshold)
        order = (self._bases[source], *self._orders[source].arguments)
        packing_kernels.choose_least_used(
            tokens, order, uses, self._lengths, skipped, self._capacity, self._overlong, chosen
        )

    def pieces(
        self, draw: EpochDraw, fragments: Fragments, counters: Int64Array, block_pieces: int = BLOCK_PIECES
    ) -> Iterator[Pieces]:
        """Yield the pieces of an epoch in their order, in blocks.

        Args:
            draw: The epoch.
            fragments: Ranges to draw beside the documents.
            counters: int64, one per name of ``COUNTERS``, incremented in place.
            block_pieces: Most pieces per block; a constant, since the blocks of packed rows depend on it.

        Raises:
            UserError: ``overlong: error``, and a document is too long.
        """
        cumulative = np.cumsum([0, *draw.counts], dtype=np.int64)
        num_places = int(cumulative[-1]) + fragments.size
        order = Permutation.seeded(num_places, *draw.seeds)
        longest = int(self._lengths.max()) if self._lengths.size else 0
        room = max(block_pieces, longest // self._capacity + 2)
        place = 0
        while place < num_places:
            block = Pieces.empty(room)
            place, count = packing_kernels.draw_block(
                place,
                num_places,
                order.arguments,
                (cumulative, self._bases),
                self._lengths,
                (self._taken, self._split_key, self._threshold, draw.held_out),
                fragments.columns,
                self._capacity,
                self._overlong,
                self._split,
                block.columns,
                counters,
            )
            if counters[packing_kernels.REFUSED]:
                self._refuse(int(counters[packing_kernels.REFUSED]) - 1)
            yield block.take(slice(0, count))

    def _refuse(self, document: int) -> None:
        raise UserError(
            f"data.overlong=error: document {document} has {int(self._lengths[document])} tokens, more than the "
            f"{self._capacity} of a row; use split, truncate or drop, or a longer data.context_tokens"
        )
