"""Arithmetic of the parallel layout: the data-parallel row and the part of the sequence that each rank holds.

Ranks of one sequence-parallel (``sp``) group are contiguous, so that a group is within a node if the node is large
enough: ``rank = dp_rank * sp_size + sp_rank``. Within it, ``sp_rank = ring_rank * ulysses_size + ulysses_rank``, so
that the exchange of heads, which sends the most, is among neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The layout of a world of ranks over the axes ``dp`` and ``sp``."""

    world_size: int
    sp_size: int
    """Ranks that share one row of tokens: ``ulysses_size * ring_size``."""
    ring_size: int = 1
    """Ranks that keys and values circulate over; 1 for none."""

    def __post_init__(self) -> None:
        """Raise unless ``sp`` groups divide the world, and rings divide an ``sp`` group."""
        if self.sp_size < 1:
            raise UserError(f"parallel.sp_size={self.sp_size} must be at least 1")
        if self.world_size < 1 or self.world_size % self.sp_size:
            lower = self.world_size // self.sp_size * self.sp_size
            choices = [str(n) for n in (lower, lower + self.sp_size) if n > 0]
            raise UserError(
                f"cluster.workers={self.world_size} is not a multiple of parallel.sp_size={self.sp_size}; "
                f"use {' or '.join(choices)} workers, or an sp_size that divides {self.world_size}"
            )
        check_ring_size(self.sp_size, self.ring_size)

    @property
    def ulysses_size(self) -> int:
        """Ranks that exchange attention heads."""
        return self.sp_size // self.ring_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups."""
        return self.world_size // self.sp_size

    def dp_rank(self, rank: int) -> int:
        """Return the index on the axis ``dp`` of a rank."""
        return self._checked(rank) // self.sp_size

    def sp_rank(self, rank: int) -> int:
        """Return the index on the axis ``sp`` of a rank."""
        return self._checked(rank) % self.sp_size

    def sp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every ``sp`` group, in the order of ``dp``."""
        size = self.sp_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every ``dp`` group, in the order of ``sp``."""
        return tuple(tuple(range(place, self.world_size, self.sp_size)) for place in range(self.sp_size))

    def ulysses_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every Ulysses group."""
        size = self.ulysses_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))

    def ring_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every ring, in the order of the ring."""
        return tuple(
            group[place :: self.ulysses_size] for group in self.sp_groups() for place in range(self.ulysses_size)
        )

    def _checked(self, rank: int) -> int:
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        return rank


def check_ring_size(sp_size: int, ring_size: int) -> None:
    """Raise unless the ring size divides the ``sp`` size.

    Raises:
        UserError: Names both sizes and the possible ring sizes.
    """
    if ring_size < 1 or sp_size % ring_size:
        choices = ", ".join(str(size) for size in range(1, sp_size + 1) if sp_size % size == 0)
        raise UserError(
            f"parallel.ring_size={ring_size} does not divide parallel.sp_size={sp_size}; use {choices}, "
            "or leave it out to have it chosen"
        )


def automatic_ring_size(sp_size: int, num_heads: int) -> int:
    """Return the default ring size.

    It is 1 as long as each rank can have a query head; beyond that the smallest for which the Ulysses size divides the
    heads, so that ranks have equal numbers of them.
    """
    if sp_size <= num_heads:
        return 1
    return next(ring for ring in range(2, sp_size + 1) if sp_size % ring == 0 and num_heads % (sp_size // ring) == 0)


def row_multiple(sp_size: int, ring_size: int) -> int:
    """Return the divisor of a row's length: for equal slices, and on a ring two equal chunks per ring rank."""
    return sp_size if ring_size == 1 else 2 * sp_size


def zigzag_chunks(ring_rank: int, ring_size: int) -> tuple[int, int]:
    """Return the two of a row's ``2 * ring_size`` chunks that a ring rank holds, in order.

    One is early and one late, so that all ring ranks have equal work under a causal mask.
    """
    return ring_rank, 2 * ring_size - 1 - ring_rank


def held_ranges(row_tokens: int, sp_rank: int, sp_size: int, ring_size: int = 1) -> tuple[tuple[int, int], ...]:
    """Return the tokens ``(start, stop)`` of a row that a rank of ``sp`` holds, in order.

    Without a ring that is one slice. On a ring of R, a row is divided into 2 R chunks, and ring rank ``r`` has chunks
    ``r`` and ``2 R - 1 - r``, so that all have equal work under a causal mask; its Ulysses ranks share the concatenated
    chunks in equal parts.

    Args:
        row_tokens: Length of the row, a multiple of :func:`row_multiple`.
        sp_rank: The rank.
        sp_size: Ranks that share the row.
        ring_size: Ring degree.
    """
    assert row_tokens % row_multiple(sp_size, ring_size) == 0
    local_tokens = row_tokens // sp_size
    if ring_size == 1:
        return ((sp_rank * local_tokens, (sp_rank + 1) * local_tokens),)
    ring_rank, ulysses_rank = divmod(sp_rank, sp_size // ring_size)
    low, high = ulysses_rank * local_tokens, (ulysses_rank + 1) * local_tokens
    chunk_tokens = row_tokens // (2 * ring_size)
    ranges: list[tuple[int, int]] = []
    for place, chunk in enumerate(zigzag_chunks(ring_rank, ring_size)):
        # Offset from the ring rank's own tokens to the row's.
        shift = (chunk - place) * chunk_tokens
        start = max(low, place * chunk_tokens) + shift
        stop = min(high, (place + 1) * chunk_tokens) + shift
        if start < stop and ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        elif start < stop:
            ranges.append((start, stop))
    return tuple(ranges)
