"""Label spans: the tokens of each document that a model is trained to predict.

A token may be a label only if a span in the document contains the token. The label at input position ``j`` therefore
enters the loss if a span contains token ``j + 1``. Plain text has no spans and is fully supervised.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedDocument:
    """A tokenized document, or a tokenized prefix of a conversation."""

    ids: Int64Array
    starts: Int64Array
    """Index of the first token of each supervised span."""
    stops: Int64Array
    """Index after the last token of each supervised span."""
    turn_ends: frozenset[int] = frozenset()
    """Special tokens that end supervised spans; white space after them does not count. A model learns to emit them as
    stop tokens."""
    num_open: int = 0
    """Number of supervised turns that do not end with a special token."""
    ends_open: bool = False
    """Whether the document ends with a supervised turn that does not end with a special token."""
    weights: NDArray[np.float32] | None = None
    """Loss weight of each span; None if all weights are 1."""

    @property
    def is_whole(self) -> bool:
        """Whether a single span of weight 1 covers the entire document."""
        return self.weights is None and self.starts.size == 1 and self.starts[0] == 0 and self.stops[0] == self.ids.size

    @property
    def digest(self) -> bytes:
        """A 16-byte digest of the tokens and spans. Plain texts use ``text_digest`` instead."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"tokens and spans")
        for values in (self.ids, self.starts, self.stops):
            digest.update(values.size.to_bytes(8, "little") + values.astype("<i8", copy=False).tobytes())
        return digest.digest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelSpans:
    """Supervised spans of all documents, in CSR format.

    Raises:
        ValueError: The arrays are inconsistent, or a document's spans are empty, unordered or overlapping.
    """

    offsets: Int64Array
    """int64 [documents + 1]. Document ``d`` has the spans ``[offsets[d], offsets[d + 1])``."""
    starts: Int64Array
    """int64 [spans]. Index of each span's first token within its document."""
    stops: Int64Array
    """int64 [spans]. Index after each span's last token."""
    _before: Int64Array = field(init=False, repr=False)
    _most_spans: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()
        before = np.zeros(self.starts.size + 1, dtype=np.int64)
        np.cumsum(self.stops - self.starts, out=before[1:])
        object.__setattr__(self, "_before", before)
        object.__setattr__(self, "_most_spans", int(np.diff(self.offsets).max(initial=0)))

    def count(self, documents: Int64Array, first: Int64Array, last: Int64Array) -> Int64Array:
        """Count the supervised tokens in a range ``[first, last)`` of each document.

        Args:
            documents: int64 [n], document indices in any order, with repetitions.
            first: int64 [n] or a scalar, index of the first token of each range.
            last: int64 [n] or a scalar, index after the last token. A range with ``last <= first`` is empty.

        Returns:
            int64 [n].
        """
        documents, first, last = np.broadcast_arrays(np.asarray(documents, dtype=np.int64), first, last)
        found = self._supervised_before(documents, last) - self._supervised_before(documents, first)
        counts: Int64Array = np.maximum(found, 0)
        return counts

    def _supervised_before(self, documents: Int64Array, places: Int64Array) -> Int64Array:
        first = self.offsets[documents]
        low, high = first, self.offsets[documents + 1]
        # Binary search within each document's spans for the first span that begins at or after the index. A search over
        # the spans of all documents would miss the cache at every step.
        for _ in range(self._most_spans.bit_length()):
            middle = (low + high) >> 1
            is_open = low < high
            begins_before = is_open & (self.starts[np.where(is_open, middle, 0)] < places)
            low = np.where(begins_before, middle + 1, low)
            high = np.where(is_open & ~begins_before, middle, high)
        has_previous = low > first
        cut_off = np.zeros_like(low)
        cut_off[has_previous] = np.maximum(self.stops[low[has_previous] - 1] - places[has_previous], 0)
        found: Int64Array = self._before[low] - self._before[first] - cut_off
        return found

    def _check(self) -> None:
        if self.offsets.size < 1 or self.offsets[0] != 0 or self.offsets[-1] != self.starts.size:
            raise ValueError(f"offsets must go from 0 to the number of spans, {self.starts.size}")
        if self.starts.shape != self.stops.shape or (np.diff(self.offsets) < 0).any():
            raise ValueError("starts and stops must have the same length, and offsets must not decrease")
        if (self.starts < 0).any() or (self.stops <= self.starts).any():
            raise ValueError("a span must begin at 0 or later and contain at least one token")
        opens_document = np.zeros(self.starts.size + 1, dtype=np.bool_)
        opens_document[self.offsets] = True
        if ((self.starts[1:] < self.stops[:-1]) & ~opens_document[1:-1]).any():
            raise ValueError("the spans of a document must be in order and must not overlap")


def span_mask(starts: Int64Array, stops: Int64Array, first: int, last: int) -> NDArray[np.bool_]:
    """Return a bool mask [last - first] of the tokens in ``[first, last)`` that are inside a span."""
    last = max(first, last)
    edges = np.zeros(last - first + 1, dtype=np.int64)
    np.add.at(edges, np.clip(starts, first, last) - first, 1)
    np.add.at(edges, np.clip(stops, first, last) - first, -1)
    return np.cumsum(edges[:-1]) > 0


def mask_spans(mask: NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """Return the start and stop indices of each run of True values in a mask."""
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    return np.flatnonzero(edges == 1).astype(np.int64), np.flatnonzero(edges == -1).astype(np.int64)
