"""Compiled loops of the planner over documents, on integers and arrays only.

They share one file because Numba's cache is keyed by the file of the outermost function alone: a function that inlined
code from another file would keep running the old code after that file changed.
"""

from __future__ import annotations

import numpy as np

from ray_ulysses.data.plan.compiled import compiled, inlined

NUM_ROUNDS = 6
CHUNK = 1024
"""Places that are drawn at a time."""
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_SHIFT = np.uint64(29)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

SPLIT, TRUNCATE, DROP, ERROR = range(4)
"""Handling of overlong documents, in the order of `Overlong`."""

SPLITS, TRUNCATED, DROPPED, LOST, REFUSED = range(5)
"""Indexes of the counters."""


@inlined
def _mixed(value, low_bits, high_bits, round_keys):  # type: ignore[no-untyped-def]
    """Return the value of the Feistel network, which may lie past the last element."""
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
def permute_range(first, size, low_bits, high_bits, round_keys, out):  # type: ignore[no-untyped-def]
    """Write the elements at the places from ``first`` on; the arguments in between are ``Permutation.arguments``."""
    # Two loops: the first has no branches, so that a core computes several values at the same time.
    for at in range(out.size):
        out[at] = _mixed(np.uint64(first + at), low_bits, high_bits, round_keys)
    for at in range(out.size):
        value = np.uint64(out[at])
        while value >= size:
            value = _mixed(value, low_bits, high_bits, round_keys)
        out[at] = value


@inlined
def _is_held_out(document, key, threshold):  # type: ignore[no-untyped-def]
    """Decide by a hash of the document's number, so that adding documents moves none between the splits."""
    word = (np.uint64(document) ^ key) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((word ^ (word >> np.uint64(31))) >> np.uint64(11)) < threshold


@compiled
def mark_held_out(marks, key, threshold):  # type: ignore[no-untyped-def]
    """Clear the mark of every document that is not held out."""
    for document in range(marks.size):
        marks[document] &= _is_held_out(document, key, threshold)


@inlined
def _is_skipped(document, length, taken, key, threshold, want_held):  # type: ignore[no-untyped-def]
    is_taken = taken.size > 0 and taken[document]
    return is_taken or length < 2 or _is_held_out(document, key, threshold) != want_held


@inlined
def _planned_length(length, capacity, overlong):  # type: ignore[no-untyped-def]
    """Return how many tokens of a document are planned; one more than a row holds is only a label."""
    if length < 2:
        return 0
    if length <= capacity + 1 or overlong in (SPLIT, ERROR):
        return length
    return 0 if overlong == DROP else capacity + 1


@compiled
def count_documents(lengths, key, threshold):  # type: ignore[no-untyped-def]
    """Count the documents held out, those without a target, and those held out with one."""
    held, without, usable_held = 0, 0, 0
    for document in range(lengths.size):
        is_held = _is_held_out(document, key, threshold)
        held += is_held
        without += lengths[document] < 2
        usable_held += is_held and lengths[document] >= 2
    return held, without, usable_held


@compiled
def available_tokens(lengths, first, last, skipped, capacity, overlong):  # type: ignore[no-untyped-def]
    """Return the tokens of the documents ``[first, last)`` that can be taken."""
    taken, key, threshold = skipped
    total = 0
    for document in range(first, last):
        if not _is_skipped(document, lengths[document], taken, key, threshold, False):
            total += _planned_length(np.int64(lengths[document]), capacity, overlong)
    return total


@compiled
def longest_planned(lengths, capacity, overlong):  # type: ignore[no-untyped-def]
    """Return the most tokens that are planned of any document; 0 if there is none."""
    longest = 0
    for document in range(lengths.size):
        longest = max(longest, _planned_length(np.int64(lengths[document]), capacity, overlong))
    return longest


@compiled
def choose_least_used(  # type: ignore[no-untyped-def]
    tokens, order, uses, lengths, skipped, capacity, overlong, chosen
):
    """Mark the documents of a source with the fewest uses, in their seeded order, until they hold the tokens."""
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
                permute_range(place, size, low_bits, high_bits, round_keys, drawn[: num_documents - place])
            document = base + drawn[place % CHUNK]
            is_next = uses[document] == level
            if is_next and not _is_skipped(document, lengths[document], taken, key, threshold, False):
                total += _planned_length(np.int64(lengths[document]), capacity, overlong)
                chosen[document] = True


@inlined
def _document_at(drawn, cumulative, bases):  # type: ignore[no-untyped-def]
    """Return the document at a place of all sources that are used."""
    source = 0
    while drawn >= cumulative[source + 1]:
        source += 1
    return bases[source] + drawn - cumulative[source]


@compiled
def _draw_chunk(first, order, sources, lengths, fragment_document, drawn, documents, found):  # type: ignore[no-untyped-def]
    """Write what is drawn at the places from ``first`` on, the number of each one's document, and its length."""
    size, low_bits, high_bits, round_keys = order
    cumulative, bases = sources
    num_documents = cumulative[cumulative.size - 1]
    permute_range(first, size, low_bits, high_bits, round_keys, drawn)
    for at in range(drawn.size):
        if drawn[at] < num_documents:
            documents[at] = _document_at(drawn[at], cumulative, bases)
        else:
            documents[at] = fragment_document[drawn[at] - num_documents]
    # A loop of its own, whose reads of memory in random order wait for one another's no longer.
    for at in range(drawn.size):
        found[at] = lengths[documents[at]]


@compiled
def draw_block(  # type: ignore[no-untyped-def]
    place, num_places, order, sources, lengths, skipped, fragments, capacity, overlong, split, out, counters
):
    """Fill the outputs from ``place`` on; return the next place and how many pieces there are."""
    # Unpacked once: inside the loop it would count references for every document.
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
        targets = length - 1 + has_next
        num_pieces, lost = 1, 0
        if targets > capacity:
            if overlong == ERROR:
                counters[REFUSED] = document + 1
                return place, count
            if overlong == DROP:
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
