"""Draws the documents of an epoch in a seeded order and splits them into pieces, in one pass and in constant memory.

A permutation maps each position of an epoch to a document of the sources in use. Documents that are not selected for
the epoch, are held out for evaluation, or have no target are skipped. Fragments (parts of documents left untrained by a
change of the run's data) are numbered after the documents.

The compiled loops at the end use integers and arrays only. They share this file because Numba's cache is keyed by the
file of the outermost function: a function with code inlined from another file would not be recompiled after that other
file changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import mix_int
from ray_ulysses.data.plan.packing import compiled, inlined
from ray_ulysses.data.plan.rows import Fragments, Int64Array, Pieces
from ray_ulysses.data.plan.segment import Overlong, PlanSettings
from ray_ulysses.errors import UserError

SPLIT, TRUNCATE, DROP, ERROR, DROP_WHOLE = range(5)
"""Indices into `Overlong`."""
COUNTERS = ("split_documents", "truncated_documents", "dropped_documents", "lost_tokens", "refused")
SPLITS, TRUNCATED, DROPPED, LOST, REFUSED = range(5)
"""Indices into `COUNTERS`."""
BLOCK_PIECES = 1 << 17
NUM_ROUNDS = 6
CHUNK = 1024
"""Number of positions drawn at a time."""
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_SHIFT = np.uint64(29)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


class Permutation(NamedTuple):
    """A seeded permutation of ``size`` elements in constant memory: each element is computed from its position.

    A cycle-walking Feistel network on the smallest power of two that covers all positions (Black and Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002). Its six rounds of a 64-bit mixer are not meant for encryption. The
    compiled functions take the fields in this order.
    """

    size: np.uint64
    low_bits: np.uint64
    """Number of bits in the lower half of a value."""
    high_bits: np.uint64
    round_keys: NDArray[np.uint64]

    @classmethod
    def seeded(cls, size: int, *seeds: int) -> Permutation:
        """Return the permutation for the given seeds, identical on every machine."""
        bits = max(2, (size - 1).bit_length())
        key = 0
        for seed in seeds:
            key = mix_int(key ^ mix_int(seed))
        return cls(
            size=np.uint64(size),
            low_bits=np.uint64(bits // 2),
            high_bits=np.uint64(bits - bits // 2),
            round_keys=np.asarray([mix_int(key + number) for number in range(NUM_ROUNDS)], dtype=np.uint64),
        )

    def elements(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the elements at positions ``[first, stop)``."""
        out = np.empty(stop - first, dtype=np.int64)
        _permute_range(first, *self, out)
        return out


def evaluation_split(seed: int, eval_fraction: float) -> tuple[np.uint64, np.uint64]:
    """Return the document hash key, and the hash threshold below which a document is held out for evaluation."""
    return np.uint64(mix_int(seed)), np.uint64(round(eval_fraction * 2.0**53))


class Drawing:
    """Documents that can be drawn, and the settings for splitting them.

    ``lengths`` [documents] is concatenated over all sources, ``first_documents`` [sources + 1] contains the number of
    each source's first document, and ``taken`` [documents] marks documents to skip.
    """

    def __init__(
        self,
        lengths: NDArray[np.uint32],
        first_documents: Int64Array,
        settings: PlanSettings,
        taken: NDArray[np.bool_] | None = None,
    ) -> None:
        self._lengths = lengths
        self._bases = first_documents
        self._settings = settings
        self._capacity = settings.capacity
        self._taken = np.empty(0, dtype=np.bool_) if taken is None else taken
        self._overlong = get_args(Overlong).index(settings.overlong)
        self._split_key, self._threshold = evaluation_split(settings.seed, settings.eval_fraction)
        self._orders = [
            Permutation.seeded(int(size), settings.seed, number, 0x0C19C1E)
            for number, size in enumerate(np.diff(first_documents))
        ]

    @property
    def _skipped(self) -> tuple[NDArray[np.bool_], np.uint64, np.uint64]:
        return self._taken, self._split_key, self._threshold

    def count_documents(self) -> tuple[int, int, int]:
        """Return how many documents are held out, have no target, and are held out with a target, respectively."""
        held, without, usable_held = _count_documents(self._lengths, self._split_key, self._threshold)
        return int(held), int(without), int(usable_held)

    def available_tokens(self, source: int) -> int:
        """Return the number of tokens that a source can contribute to an epoch."""
        first, last = int(self._bases[source]), int(self._bases[source + 1])
        return int(_available_tokens(self._lengths, first, last, self._skipped, self._capacity, self._overlong))

    def fragment_tokens(self, fragments: Fragments) -> list[int]:
        """Return the number of fragment tokens that each source contributes to an epoch."""
        length = fragments.length
        has_next = fragments.start + length < self._lengths[fragments.document]
        is_long = length - 1 + has_next + (self._overlong == DROP_WHOLE) > self._capacity
        if self._overlong in (TRUNCATE, DROP, DROP_WHOLE):
            length = np.where(is_long, self._capacity if self._overlong == TRUNCATE else 0, length)
        source = np.searchsorted(self._bases, fragments.document, side="right") - 1
        tokens = np.zeros(self._bases.size - 1, dtype=np.int64)
        np.add.at(tokens, source, length)
        return tokens.tolist()

    def among(self, documents: NDArray[np.bool_]) -> Drawing:
        """Return a copy that draws only the documents marked in ``documents``; bool [documents]."""
        other = copy(self)
        other._taken = ~documents
        return other

    def choose(self, source: int, tokens: int, uses: NDArray[np.uint32], chosen: NDArray[np.bool_]) -> None:
        """Mark a source's least used documents until the marked ones contribute ``tokens`` tokens to an epoch.

        Args:
            source: Number of the source.
            tokens: Number of tokens to choose. If the source has fewer, every available document is chosen.
            uses: [documents], number of times that each document has been used. Ties are broken in a seeded order.
            chosen: [documents], set to true for each chosen document.
        """
        documents = slice(int(self._bases[source]), int(self._bases[source + 1]))
        if tokens >= self.available_tokens(source):
            chosen[documents] = ~self._taken[documents] if self._taken.size else True
            return
        order = (self._bases[source], *self._orders[source])
        _choose_least_used(tokens, order, uses, self._lengths, self._skipped, self._capacity, self._overlong, chosen)

    def pieces(
        self,
        counts: Sequence[int],
        seeds: Sequence[int],
        fragments: Fragments,
        counters: Int64Array,
        *,
        held_out: bool = False,
        block_pieces: int = BLOCK_PIECES,
    ) -> Iterator[Pieces]:
        """Yield the pieces of an epoch in drawing order, block by block.

        Args:
            counts: Number of documents in each source; 0 for a source that is not used.
            seeds: Seeds of the order.
            fragments: Fragments to draw together with the documents.
            counters: int64, one per entry of ``COUNTERS``, incremented in place.
            held_out: Whether to draw the documents held out for evaluation instead of the training documents.
            block_pieces: Maximum pieces per block. This must not vary, since packing depends on the block boundaries.

        Raises:
            UserError: A document is too long for a row, and ``overlong`` is ``error``.
        """
        cumulative = np.cumsum([0, *counts], dtype=np.int64)
        num_places = int(cumulative[-1]) + fragments.size
        order = Permutation.seeded(num_places, *seeds)
        longest = int(self._lengths.max()) if self._lengths.size else 0
        room = max(block_pieces, longest // self._capacity + 2)
        place = 0
        while place < num_places:
            block = Pieces.empty(room)
            place, count = _draw_block(
                place,
                num_places,
                tuple(order),
                (cumulative, self._bases),
                self._lengths,
                (*self._skipped, held_out),
                fragments.columns,
                self._capacity,
                self._overlong,
                self._settings.packing != "concat",
                block.columns,
                counters,
            )
            if counters[REFUSED]:
                document = int(counters[REFUSED]) - 1
                raise UserError(
                    f"data.overlong=error: document {document} has {int(self._lengths[document])} tokens, but a row "
                    f"has only {self._capacity}; use split, truncate or drop, or increase data.context_tokens"
                )
            yield block.take(slice(0, count))


@inlined
def _mixed(value, low_bits, high_bits, round_keys):  # type: ignore[no-untyped-def]
    """Return the Feistel network's output. Outputs beyond the permutation's range are mixed again by the caller."""
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << high_bits) - _ONE
    low = value & low_mask
    high = value >> low_bits
    for number in range(0, NUM_ROUNDS, 2):
        word = (low ^ round_keys[number]) * _FIRST
        word = (word ^ (word >> _HALF)) * _SECOND
        high = (high ^ (word >> _SHIFT)) & high_mask
        word = (high ^ round_keys[number + 1]) * _FIRST
        word = (word ^ (word >> _HALF)) * _SECOND
        low = (low ^ (word >> _SHIFT)) & low_mask
    return (high << low_bits) | low


@compiled
def _permute_range(first, size, low_bits, high_bits, round_keys, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` with consecutive elements of the permutation, from position ``first``; see `Permutation`."""
    # The first loop has no branches, so a core computes several values at a time.
    for at in range(out.size):
        out[at] = _mixed(np.uint64(first + at), low_bits, high_bits, round_keys)
    for at in range(out.size):
        value = np.uint64(out[at])
        while value >= size:
            value = _mixed(value, low_bits, high_bits, round_keys)
        out[at] = value


@inlined
def _is_held_out(document, key, threshold):  # type: ignore[no-untyped-def]
    """Return whether the hash of a document's number is below the threshold, independent of all other documents."""
    word = (np.uint64(document) ^ key) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((word ^ (word >> np.uint64(31))) >> np.uint64(11)) < threshold


@compiled
def mark_held_out(marks, key, threshold):  # type: ignore[no-untyped-def]
    """Clear the marks of documents that are not held out for evaluation."""
    for document in range(marks.size):
        marks[document] &= _is_held_out(document, key, threshold)


@inlined
def _is_skipped(document, length, taken, key, threshold, want_held):  # type: ignore[no-untyped-def]
    is_taken = taken.size > 0 and taken[document]
    return is_taken or length < 2 or _is_held_out(document, key, threshold) != want_held


@inlined
def _planned_length(length, capacity, overlong):  # type: ignore[no-untyped-def]
    """Return the number of tokens planned for a document. The token after a full row is used only as a label."""
    if length < 2:
        return 0
    if length <= capacity + (overlong != DROP_WHOLE) or overlong in (SPLIT, ERROR):
        return length
    return capacity + 1 if overlong == TRUNCATE else 0


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
def _available_tokens(lengths, first, last, skipped, capacity, overlong):  # type: ignore[no-untyped-def]
    taken, key, threshold = skipped
    total = 0
    for document in range(first, last):
        if not _is_skipped(document, lengths[document], taken, key, threshold, False):
            total += _planned_length(np.int64(lengths[document]), capacity, overlong)
    return total


@compiled
def longest_planned(lengths, capacity, overlong):  # type: ignore[no-untyped-def]
    """Return the largest number of planned tokens of any document, or 0 if there are no documents."""
    longest = 0
    for document in range(lengths.size):
        longest = max(longest, _planned_length(np.int64(lengths[document]), capacity, overlong))
    return longest


@compiled
def _choose_least_used(  # type: ignore[no-untyped-def]
    tokens, order, uses, lengths, skipped, capacity, overlong, chosen
):
    """Mark a source's least used documents, in seeded order, until the marked ones total ``tokens`` tokens."""
    base, size, low_bits, high_bits, round_keys = order
    taken, key, threshold = skipped
    num_documents = np.int64(size)
    drawn = np.empty(CHUNK, dtype=np.int64)
    level = np.int64(-1)
    total = 0
    while total < tokens:
        following = np.int64(-1)
        for document in range(base, base + num_documents):
            found = np.int64(uses[document])
            is_next = found > level and (following < 0 or found < following)
            if is_next and not _is_skipped(document, lengths[document], taken, key, threshold, False):
                following = found
        if following < 0:
            return
        level = following
        for place in range(num_documents):
            if total >= tokens:
                return
            if place % CHUNK == 0:
                _permute_range(place, size, low_bits, high_bits, round_keys, drawn[: num_documents - place])
            document = base + drawn[place % CHUNK]
            is_next = uses[document] == level
            if is_next and not _is_skipped(document, lengths[document], taken, key, threshold, False):
                total += _planned_length(np.int64(lengths[document]), capacity, overlong)
                chosen[document] = True


@inlined
def _document_at(drawn, cumulative, bases):  # type: ignore[no-untyped-def]
    """Convert an element of the permutation over all used sources to the number of its document."""
    source = 0
    while drawn >= cumulative[source + 1]:
        source += 1
    return bases[source] + drawn - cumulative[source]


@compiled
def _draw_chunk(first, order, sources, lengths, fragment_document, drawn, documents, found):  # type: ignore[no-untyped-def]
    """Write the element, document and document length at each position, starting at position ``first``."""
    size, low_bits, high_bits, round_keys = order
    cumulative, bases = sources
    num_documents = cumulative[cumulative.size - 1]
    _permute_range(first, size, low_bits, high_bits, round_keys, drawn)
    for at in range(drawn.size):
        if drawn[at] < num_documents:
            documents[at] = _document_at(drawn[at], cumulative, bases)
        else:
            documents[at] = fragment_document[drawn[at] - num_documents]
    # In a loop of their own, these random memory reads overlap.
    for at in range(drawn.size):
        found[at] = lengths[documents[at]]


@compiled
def _draw_block(  # type: ignore[no-untyped-def]
    place, num_places, order, sources, lengths, skipped, fragments, capacity, overlong, split, out, counters
):
    """Draw pieces into ``out``, starting at position ``place``; return the next position and the number of pieces."""
    # Unpacked once: inside the loop, Numba would count references for each document.
    num_documents = sources[0][sources[0].size - 1]
    taken, key, threshold, want_held = skipped
    fragment_document, fragment_start, fragment_length = fragments
    out_document, out_start, out_length, out_next = out
    drawn, documents, found = np.empty((3, CHUNK), dtype=np.int64)
    first = stop = place
    count = 0
    while place < num_places:
        if place == stop:
            first, stop = place, min(place + CHUNK, num_places)
            _draw_chunk(first, order, sources, lengths, fragment_document, drawn[: stop - first], documents, found)
        document, length = documents[place - first], found[place - first]
        start, has_next = np.int64(0), False
        if drawn[place - first] >= num_documents:
            fragment = drawn[place - first] - num_documents
            start = fragment_start[fragment]
            has_next = start + fragment_length[fragment] < length
            length = fragment_length[fragment]
        elif _is_skipped(document, length, taken, key, threshold, want_held):
            place += 1
            continue
        targets = length - 1 + has_next + (overlong == DROP_WHOLE)
        num_pieces, lost = 1, 0
        if targets > capacity:
            if overlong == ERROR:
                counters[REFUSED] = document + 1
                return place, count
            if overlong in (DROP, DROP_WHOLE):
                counters[DROPPED] += 1
                counters[LOST] += length
                place += 1
                continue
            if overlong == TRUNCATE:
                lost = length - capacity - 1
                length, has_next = capacity, True
            elif split:
                num_pieces = (targets + capacity - 1) // capacity
        if count + num_pieces > out_document.size:
            return place, count
        counters[LOST] += lost
        counters[TRUNCATED] += targets > capacity and overlong == TRUNCATE
        counters[SPLITS] += targets > capacity and overlong == SPLIT
        for _ in range(num_pieces):
            piece = min(capacity, length) if split else length
            out_document[count] = document
            out_start[count] = start
            out_length[count] = piece
            out_next[count] = piece < length or has_next
            count += 1
            start += piece
            length -= piece
        place += 1
    return place, count
