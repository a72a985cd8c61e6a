"""Blocks of rows that are streamed to a rank: a request for each block, and the table that is returned.

Only tokens and label weights are sent, in blocks of several rows. All other fields of a slice are computed from the
plan by the same code as in ``DirectSource``.
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

from ray_ulysses.errors import RunError, UserError

if TYPE_CHECKING:
    from ray_ulysses.data.plan.corpus_set import PlannedSource
    from ray_ulysses.data.read.reader import TokenStore

_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("token_bytes", pa.int64()),
        ("tokens", pa.large_binary()),
        # For corpora without loss weights: one bit per token, or null if every token may be a label.
        ("labels", pa.large_binary()),
        # For corpora with loss weights: one fp32 value per token.
        ("weights", pa.large_binary()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """The part of a row that one rank receives."""

    row: int
    ranges: NDArray[np.int64]
    """[ranges, 3]: document, first token and number of tokens of each range, in slice order."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all ranges."""
        return int(self.ranges[:, 2].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A request for a block, pickled so that only the reading process decodes the ranges."""

    num_rows: int
    num_bytes: int
    """Maximum size of the tokens and loss weights in the returned table, in bytes."""
    request: bytes
    """Pickled corpora and slots; see `opened`."""

    def opened(self) -> tuple[tuple[PlannedSource, ...], tuple[Slot, ...]]:
        """Decode and return the corpora and the slots."""
        return pickle.loads(self.request)  # type: ignore[no-any-return]


def requested(sources: Sequence[PlannedSource], slots: Sequence[Slot]) -> Block:
    """Return a request for a block that contains ``slots``."""
    # At most 4 bytes per token id, and 4 bytes per loss weight.
    bytes_per_token = 4 + 4 * any(source.has_weights for source in sources)
    return Block(
        num_rows=len(slots),
        num_bytes=bytes_per_token * sum(slot.num_tokens for slot in slots),
        request=pickle.dumps((tuple(sources), tuple(slots))),
    )


class Streams(Protocol):
    """Reads blocks in other processes of the cluster."""

    def read(self, blocks: Sequence[Block], stopped: threading.Event) -> Generator[pa.Table, None, None]:
        """Yield the table that ``pack`` returns for each block, in order. Closing the generator ends the stream.

        Args:
            blocks: The block requests.
            stopped: Event that ends the stream when set, even while another thread waits for the next block.

        Raises:
            RunError: The stream failed.
        """
        ...


def pack(store: TokenStore, slots: Sequence[Slot]) -> pa.Table:
    """Read slots into a block. If a slot can't be read, the block contains an error message instead."""
    tokens, labels, weights, errors = zip(*(_packed(store, slot) for slot in slots), strict=True)
    # Tokens are copied once, into the block. A second copy would cost about as much as reading.
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


class Received:
    """A received slot as a `TokenStore` whose tokens are read once and in order."""

    def __init__(
        self, row: int, tokens: NDArray[Any], weights: NDArray[np.float32] | None, *, has_weights: bool, error: str
    ) -> None:
        """Create a slot from all ranges' tokens and label weights, or from the error that prevented reading them."""
        self.row, self.tokens, self.has_weights, self.error = row, tokens, has_weights, error
        self._weights, self._place = weights, 0

    @property
    def num_left(self) -> int:
        """Number of tokens that have not been read yet."""
        return int(self.tokens.size) - self._place

    def read(self, document: int, start: int, length: int) -> NDArray[np.integer]:
        """Return the next ``length`` tokens."""
        if length > self.num_left:
            raise RunError(f"row {self.row} arrived with too few tokens; set data.engine=local and report this error")
        self._place += length
        return self.tokens[self._place - length : self._place]

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing, since all tokens have arrived."""

    def label_weights(self, document: int, first: int, last: int) -> NDArray[np.float32] | None:
        """Return the label weights of the tokens that were read last."""
        return None if self._weights is None else self._weights[self._place - (last - first) : self._place]


def unpack(block: pa.Table) -> Iterator[Received]:
    """Yield the received slots of a block."""
    columns = [block.column(name) for name in _SCHEMA.names]
    for row, token_bytes, tokens, labels, weights, error in zip(*columns, strict=True):
        ids = np.frombuffer(tokens.as_buffer(), dtype=f"<u{token_bytes.as_py()}")
        found = np.frombuffer(weights.as_buffer(), dtype="<f4") if weights.is_valid else None
        has_weights = found is not None
        if labels.is_valid:
            bits = np.frombuffer(labels.as_buffer(), dtype=np.uint8)
            found = np.unpackbits(bits, count=ids.size).astype(np.float32)
        yield Received(row.as_py(), ids, found, has_weights=has_weights, error=error.as_py())


def _packed(store: TokenStore, slot: Slot) -> tuple[list[NDArray[np.integer]], bytes | None, bytes | None, str]:
    """Return the tokens of each range, the label bits or weights of all ranges, and the error if reading failed."""
    ranges = slot.ranges.tolist()
    tokens, weights = [], []
    try:
        store.fetch([(document, start, length) for document, start, length in ranges])
        for document, start, length in ranges:
            tokens.append(store.read(document, start, length))
            weights.append(store.label_weights(document, start, start + length))
    except UserError as error:
        return [], None, None, str(error)
    if not store.has_weights and all(found is None for found in weights):
        return tokens, None, None, ""
    pairs = zip(tokens, weights, strict=True)
    known = [np.ones(part.size, dtype="<f4") if found is None else found for part, found in pairs]
    joined = np.concatenate([np.empty(0, dtype="<f4"), *known])
    if store.has_weights:
        return tokens, None, joined.astype("<f4").tobytes(), ""
    return tokens, np.packbits(joined > 0).tobytes(), None, ""
