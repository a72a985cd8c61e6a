"""Documents of an epoch, in a seeded order, cut into pieces: one pass and constant memory.

Place ``u`` of an epoch is sent by one permutation to a document of the sources that are used. Documents that the epoch
does not take, those held out for evaluation, and those without a target are passed over. Stretches that an edit of the
run left of documents (fragments) follow the documents' places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan import packing_kernels
from ray_ulysses.data.plan.mixing import mix_int
from ray_ulysses.data.plan.packing import Pieces
from ray_ulysses.data.plan.permutation import Permutation
from ray_ulysses.errors import UserError

Int64Array = NDArray[np.int64]
Overlong = Literal["split", "truncate", "drop", "error"]
BLOCK_PIECES = 1 << 17
COUNTERS = ("split", "truncated", "dropped", "lost_tokens", "refused")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fragments:
    """Stretches of documents that stand in for them.

    Attributes:
        document: int64, numbers of the documents.
        start: int64, first token.
        length: int64, tokens; a stretch that does not reach the document's end has the next token as its last label.
    """

    document: Int64Array
    start: Int64Array
    length: Int64Array

    @property
    def size(self) -> int:
        """Return how many there are."""
        return int(self.document.size)

    def take(self, places: NDArray[np.bool_]) -> Fragments:
        """Return some of the fragments."""
        return Fragments(document=self.document[places], start=self.start[places], length=self.length[places])


NO_FRAGMENTS = Fragments(
    document=np.empty(0, dtype=np.int64), start=np.empty(0, dtype=np.int64), length=np.empty(0, dtype=np.int64)
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochDraw:
    """Which sources an epoch draws from, and in which order.

    Attributes:
        counts: The documents of each source; 0 for one that is not used.
        seeds: What the order is drawn with.
        held_out: Whether it takes the documents held out for evaluation, and not the others.
    """

    counts: tuple[int, ...]
    seeds: tuple[int, ...]
    held_out: bool


class Drawing:
    """The documents that can be taken, and how they are cut.

    Args:
        lengths: uint32 [documents], of all sources, one after another.
        first_documents: int64 [sources + 1], number of each source's first document.
        seed: Decides the circles and the evaluation split.
        eval_fraction: Share of the documents that is held out.
        capacity: Tokens of a row.
        overlong: What becomes of documents with more targets than a row holds.
        cut: Whether overlong documents are cut into pieces here.
        taken: bool [documents], documents to pass over; empty for none.
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
        cut: bool,
        taken: NDArray[np.bool_] | None = None,
    ) -> None:
        self._lengths = lengths
        self._bases = first_documents
        self._capacity = capacity
        self._cut = cut
        self._taken = np.empty(0, dtype=np.bool_) if taken is None else taken
        self._overlong = get_args(Overlong).index(overlong)
        self._split_key = np.uint64(mix_int(seed))
        self._threshold = np.uint64(round(eval_fraction * 2.0**53))
        circles = [
            Permutation.seeded(int(size), seed, number, 0x0C19C1E)
            for number, size in enumerate(np.diff(first_documents))
        ]
        self._circles = (
            np.asarray([circle.size for circle in circles], dtype=np.uint64),
            np.asarray([circle.low_bits for circle in circles], dtype=np.uint64),
            np.asarray([circle.high_bits for circle in circles], dtype=np.uint64),
            np.stack([circle.round_keys for circle in circles]),
        )

    def count_documents(self) -> tuple[int, int, int]:
        """Return the documents that are held out, those without a target, and those held out that have one."""
        held, without, usable_held = packing_kernels.count_documents(self._lengths, self._split_key, self._threshold)
        return int(held), int(without), int(usable_held)

    def available_tokens(self, source: int) -> int:
        """Return the tokens of a source that an epoch can take."""
        first, last = int(self._bases[source]), int(self._bases[source + 1])
        passed_over = (self._taken, self._split_key, self._threshold)
        return int(
            packing_kernels.available_tokens(self._lengths, first, last, passed_over, self._capacity, self._overlong)
        )

    def choose(self, source: int, tokens: int, uses: NDArray[np.uint32], chosen: NDArray[np.bool_]) -> None:
        """Mark the least used documents of a source until they hold so many tokens that an epoch can take.

        Args:
            source: Number of the source.
            tokens: Tokens to choose; all that can be taken are chosen where there are no more.
            uses: [documents], how often each was taken so far; of those with as many, a seeded order decides.
            chosen: [documents], set to true where a document is chosen.
        """
        documents = slice(int(self._bases[source]), int(self._bases[source + 1]))
        if tokens >= self.available_tokens(source):
            chosen[documents] = ~self._taken[documents] if self._taken.size else True
            return
        passed_over = (self._taken, self._split_key, self._threshold)
        circle = (self._bases[source], *(values[source] for values in self._circles))
        packing_kernels.choose_least_used(
            tokens, circle, uses, self._lengths, passed_over, self._capacity, self._overlong, chosen
        )

    def pieces(
        self, draw: EpochDraw, fragments: Fragments, counters: Int64Array, block_pieces: int = BLOCK_PIECES
    ) -> Iterator[Pieces]:
        """Yield the pieces of an epoch in their order, in blocks.

        Args:
            draw: The epoch.
            fragments: Stretches to take beside the documents.
            counters: int64, one a name of ``COUNTERS``, added to.
            block_pieces: Most pieces of a block; fixed, since what packing hands out together follows it.

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
            block = Pieces(
                document=np.empty(room, dtype=np.int64),
                start=np.empty(room, dtype=np.int64),
                length=np.empty(room, dtype=np.int64),
                has_next=np.empty(room, dtype=np.bool_),
            )
            place, count = packing_kernels.draw_block(
                place,
                num_places,
                order.arguments,
                (cumulative, self._bases),
                self._lengths,
                (self._taken, self._split_key, self._threshold, draw.held_out),
                (fragments.document, fragments.start, fragments.length),
                self._capacity,
                self._overlong,
                self._cut,
                (block.document, block.start, block.length, block.has_next),
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
