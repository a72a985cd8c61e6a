"""Documents of an epoch, in a seeded order, cut into pieces: one pass and constant memory.

Place ``u`` of an epoch is sent by one permutation to a place on a source's circle, and by the source's own permutation
to a document. What an earlier part of the epoch has trained on, what is held out for evaluation, and documents without
a target are passed over. Stretches that an edit of the run left of documents (fragments) follow the sources' places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.compiled import compiled, inlined
from ray_ulysses.data.mixing import mix_int
from ray_ulysses.data.packing import Pieces
from ray_ulysses.data.permutation import Permutation, permuted
from ray_ulysses.errors import UserError

Int64Array = NDArray[np.int64]
Overlong = Literal["split", "truncate", "drop", "error"]
BLOCK_PIECES = 1 << 17
_SPLIT, _TRUNCATE, _DROP, _ERROR = range(len(get_args(Overlong)))
COUNTERS = ("split", "truncated", "dropped", "lost_tokens", "refused")
_SPLITS, _TRUNCATED, _DROPPED, _LOST, _REFUSED = range(len(COUNTERS))


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


NO_FRAGMENTS = Fragments(
    document=np.empty(0, dtype=np.int64), start=np.empty(0, dtype=np.int64), length=np.empty(0, dtype=np.int64)
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochDraw:
    """Which places of each source an epoch takes, and in which order.

    Attributes:
        firsts: int64 [sources], first place on each source's circle.
        counts: int64 [sources], places taken.
        seeds: What the order is drawn with.
        held_out: Whether it takes the documents held out for evaluation, and not the others.
    """

    firsts: Int64Array
    counts: Int64Array
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
        held, without, usable_held = _count_documents(self._lengths, self._split_key, self._threshold)
        return int(held), int(without), int(usable_held)

    def available_tokens(self, source: int) -> int:
        """Return the tokens of a source that an epoch can take."""
        first, last = int(self._bases[source]), int(self._bases[source + 1])
        return int(
            _available(self._lengths, first, last, self._taken, self._split_key, self._threshold, self._capacity,
                       self._overlong)
        )  # fmt: skip

    def places_for(self, source: int, first: int, tokens: int) -> int:
        """Return how many places of a source's circle, from ``first`` on, hold that many tokens."""
        return int(
            _places_for(first, tokens, source, self._bases, self._circles, self._lengths, self._taken, self._split_key,
                        self._threshold, self._capacity, self._overlong)
        )  # fmt: skip

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
            place, count = _draw_block(
                place,
                num_places,
                order.arguments,
                (cumulative, draw.firsts, self._bases),
                self._circles,
                self._lengths,
                (self._taken, self._split_key, self._threshold, draw.held_out),
                (fragments.document, fragments.start, fragments.length),
                self._capacity,
                self._overlong,
                self._cut,
                (block.document, block.start, block.length, block.has_next),
                counters,
            )
            if counters[_REFUSED]:
                self._refuse(int(counters[_REFUSED]) - 1)
            yield block.take(slice(0, count))

    def _refuse(self, document: int) -> None:
        raise UserError(
            f"data.overlong=error: document {document} has {int(self._lengths[document])} tokens, more than the "
            f"{self._capacity} of a row; use split, truncate or drop, or a longer data.context_tokens"
        )


@inlined
def _is_held_out(document, key, threshold):  # type: ignore[no-untyped-def]
    """Choose by a hash of the document's number: documents added later move none between the splits."""
    word = (np.uint64(document) ^ key) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((word ^ (word >> np.uint64(31))) >> np.uint64(11)) < threshold


@inlined
def _planned_length(length, capacity, overlong):  # type: ignore[no-untyped-def]
    """Return how many tokens of a document are planned; one more than a row holds is a label alone."""
    if length < 2:
        return 0
    if length <= capacity + 1 or overlong in (_SPLIT, _ERROR):
        return length
    return 0 if overlong == _DROP else capacity + 1


@compiled
def _count_documents(lengths, key, threshold):  # type: ignore[no-untyped-def]
    held, without, usable_held = 0, 0, 0
    for document in range(lengths.size):
        is_held = _is_held_out(document, key, threshold)
        held += is_held
        without += lengths[document] < 2
        usable_held += is_held and lengths[document] >= 2
    return held, without, usable_held


@compiled
def _available(lengths, first, last, taken, key, threshold, capacity, overlong):  # type: ignore[no-untyped-def]
    total = 0
    for document in range(first, last):
        if (taken.size == 0 or not taken[document]) and not _is_held_out(document, key, threshold):
            total += _planned_length(np.int64(lengths[document]), capacity, overlong)
    return total


@compiled
def _places_for(  # type: ignore[no-untyped-def]
    first, tokens, source, bases, circles, lengths, taken, key, threshold, capacity, overlong
):
    sizes, low_bits, high_bits, round_keys = circles
    size = np.int64(sizes[source])
    total = 0
    for count in range(size):
        if total >= tokens:
            return count
        place = (first + count) % size
        document = bases[source] + permuted(
            place, sizes[source], low_bits[source], high_bits[source], round_keys[source]
        )
        if (taken.size == 0 or not taken[document]) and not _is_held_out(document, key, threshold):
            total += _planned_length(np.int64(lengths[document]), capacity, overlong)
    return size


@inlined
def _document_at(  # type: ignore[no-untyped-def]
    drawn, cumulative, firsts, bases, sizes, low_bits, high_bits, round_keys
):
    """Return the document at a place of the sources' windows."""
    source = 0
    while drawn >= cumulative[source + 1]:
        source += 1
    place = drawn - cumulative[source]
    size = np.int64(sizes[source])
    if cumulative[source + 1] - cumulative[source] == size:
        # All of the circle is taken: where it begins and how it runs changes nothing.
        return bases[source] + place
    place += firsts[source]
    if place >= size:
        place -= size
    return bases[source] + permuted(place, sizes[source], low_bits[source], high_bits[source], round_keys[source])


@inlined
def _is_passed_over(document, length, taken, key, threshold, want_held):  # type: ignore[no-untyped-def]
    is_taken = taken.size > 0 and taken[document]
    return is_taken or length < 2 or _is_held_out(document, key, threshold) != want_held


@compiled
def _draw_block(  # type: ignore[no-untyped-def]
    place, num_places, order, windows, circles, lengths, passed_over, fragments, capacity, overlong, cut, out, counters
):
    """Fill the outputs from ``place`` on; return the next place and how many pieces there are."""
    # Out of their tuples once: inside the loop that would count references for every document.
    size, order_low, order_high, order_keys = order
    cumulative, firsts, bases = windows
    sizes, low_bits, high_bits, round_keys = circles
    taken, key, threshold, want_held = passed_over
    fragment_document, fragment_start, fragment_length = fragments
    out_document, out_start, out_length, out_next = out
    num_windowed = cumulative[cumulative.size - 1]
    count = 0
    while place < num_places:
        drawn = permuted(place, size, order_low, order_high, order_keys)
        start, has_next = np.int64(0), False
        if drawn < num_windowed:
            document = _document_at(drawn, cumulative, firsts, bases, sizes, low_bits, high_bits, round_keys)
            length = np.int64(lengths[document])
            if _is_passed_over(document, length, taken, key, threshold, want_held):
                place += 1
                continue
        else:
            document = fragment_document[drawn - num_windowed]
            start = fragment_start[drawn - num_windowed]
            length = fragment_length[drawn - num_windowed]
            has_next = start + length < np.int64(lengths[document])
        targets = length - 1 + has_next
        num_pieces, lost = 1, 0
        if targets > capacity:
            if overlong == _ERROR:
                counters[_REFUSED] = document + 1
                return place, count
            if overlong == _DROP:
                counters[_DROPPED] += 1
                counters[_LOST] += length
                place += 1
                continue
            if overlong == _TRUNCATE:
                lost = length - capacity - 1
                length, has_next = capacity, True
            elif cut:
                num_pieces = (targets + capacity - 1) // capacity
        if count + num_pieces > out_document.size:
            return place, count
        counters[_LOST] += lost
        counters[_TRUNCATED] += targets > capacity and overlong == _TRUNCATE
        counters[_SPLITS] += targets > capacity and overlong == _SPLIT
        for _ in range(num_pieces):
            piece = min(capacity, length) if cut else length
            out_document[count] = document
            out_start[count] = start
            out_length[count] = piece
            out_next[count] = piece < length or has_next
            count += 1
            start += piece
            length -= piece
        place += 1
    return place, count
