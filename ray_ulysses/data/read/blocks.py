"""Blocks of rows on their way to a rank: the request, the table that answers it, and its parts.

Only the tokens travel, in blocks of several rows, and what a corpus says of them as labels: everything else about a
slice follows from the plan, and is computed by the same code as in ``DirectSource``.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from ray_ulysses.data.plan.corpus_set import PlannedSource
    from ray_ulysses.data.read.reader import TokenStore

_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("token_bytes", pa.int64()),
        ("tokens", pa.large_binary()),
        # A bit per token; null if each may be a label.
        ("labels", pa.large_binary()),
        # Null for corpora without loss weights.
        ("weights", pa.large_binary()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """What a rank receives of a row."""

    row: int
    stretches: NDArray[np.int64]
    """[stretches, 3]: document, first token and number of tokens of each, in the order of the slice."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all stretches."""
        return int(self.stretches[:, 2].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The request for a block, which only the process that reads it opens."""

    num_rows: int
    num_bytes: int
    """Most bytes of tokens and loss weights that come back."""
    request: bytes
    """The corpora and the slots; see `opened`."""

    def opened(self) -> tuple[tuple[PlannedSource, ...], tuple[Slot, ...]]:
        """Return the corpora and the slots."""
        return pickle.loads(self.request)  # type: ignore[no-any-return]


def requested(sources: Sequence[PlannedSource], slots: Sequence[Slot]) -> Block:
    """Return the request for slots."""
    # At most 4 bytes for an id, and as many for a loss weight.
    bytes_per_token = 4 + 4 * any(source.has_weights for source in sources)
    return Block(
        num_rows=len(slots),
        num_bytes=bytes_per_token * sum(slot.num_tokens for slot in slots),
        request=pickle.dumps((tuple(sources), tuple(slots))),
    )


class Streams(Protocol):
    """Reads blocks of slots somewhere on the cluster."""

    def read(self, blocks: Sequence[Block], stopped: threading.Event) -> Generator[pa.Table, None, None]:
        """Yield the slots of the blocks in order, as ``pack`` makes them; closing it ends the stream.

        Args:
            blocks: The requests.
            stopped: Ends the stream, also while another thread waits for its next block.

        Raises:
            RunError: The stream failed.
        """
        ...


def pack(store: TokenStore, slots: Sequence[Slot]) -> pa.Table:
    """Read slots as a block; one that can't be read becomes the error in its place."""
    tokens, labels, weights, errors = zip(*(_packed(store, slot) for slot in slots), strict=True)
    # Copied once, into the block: each further copy would cost about as much as reading.
    joined = np.concatenate([part for parts in tokens for part in parts] or [np.empty(0, dtype="<u2")])
    joined = joined.astype(joined.dtype.newbyteorder("<"), copy=False)
    ends = joined.itemsize * np.cumsum([0, *(sum(part.size for part in parts) for parts in tokens)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(joined)]
    columns = [
        pa.array([slot.row for slot in slots]),
        pa.array([joined.itemsize] * len(slots)),
        pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(slots), buffers),
        pa.array(labels, pa.large_binary()),
        pa.array(weights, pa.large_binary()),
        pa.array(errors, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Received:
    """What came of a slot."""

    row: int
    tokens: NDArray[Any]
    """Those of all stretches."""
    labels: NDArray[np.bool_] | None
    """Which of them may be labels; None if all may."""
    weights: NDArray[np.float32] | None
    """Their loss weights as labels; None for corpora without."""
    error: str
    """Why it could not be read; empty if it was."""


def unpack(block: pa.Table) -> Iterator[Received]:
    """Yield what a block holds."""
    columns = [block.column(name) for name in _SCHEMA.names]
    for row, token_bytes, tokens, labels, weights, error in zip(*columns, strict=True):
        ids = np.frombuffer(tokens.as_buffer(), dtype=f"<u{token_bytes.as_py()}")
        bits = np.frombuffer(labels.as_buffer(), dtype=np.uint8) if labels.is_valid else None
        yield Received(
            row=row.as_py(),
            tokens=ids,
            labels=None if bits is None else np.unpackbits(bits, count=ids.size).astype(np.bool_),
            weights=np.frombuffer(weights.as_buffer(), dtype="<f4") if weights.is_valid else None,
            error=error.as_py(),
        )


def _packed(store: TokenStore, slot: Slot) -> tuple[list[NDArray[np.integer]], bytes | None, bytes | None, str]:
    """Return the tokens of each stretch and, of all, bits of labels and weights; or the error if they can't be read."""
    stretches = slot.stretches.tolist()
    tokens, masks, weights = [], [], []
    try:
        store.fetch([(document, start, length) for document, start, length in stretches])
        for document, start, length in stretches:
            tokens.append(store.read(document, start, length))
            masks.append(store.label_mask(document, start, start + length))
            if store.has_weights:
                found = store.label_weights(document, start, start + length)
                weights.append(np.ones(length, dtype=np.float32) if found is None else found)
    except UserError as error:
        return [], None, None, str(error)
    labels = []
    if any(mask is not None for mask in masks):
        pairs = zip(tokens, masks, strict=True)
        labels = [np.ones(part.size, dtype=np.bool_) if mask is None else mask for part, mask in pairs]
    return (
        tokens,
        np.packbits(np.concatenate(labels)).tobytes() if labels else None,
        np.concatenate(weights).astype("<f4").tobytes() if weights else None,
        "",
    )
