"""Arithmetic of the parallel layout: the data-parallel row and the part of the sequence that each rank holds.

Ranks of a sequence-parallel (``sp``) group are contiguous, so that a group is within a node if the node is large
enough: ``rank = dp_rank * sp_size + sp_rank``. Within a group, ``sp_rank = ring_rank * ulysses_size + ulysses_rank``,
so that the exchange of heads, which sends the most data, is among neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import Literal

from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The layout of a world of ranks over the axes ``dp`` and ``sp``."""

    world_size: int
    sp_size: int
    """Ranks that share one row of tokens: ``ulysses_size * ring_size``."""
    ring_size: int = 1
    """Ranks over which keys and values circulate; 1 without a ring."""

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
        """Return a rank's index on the ``dp`` axis."""
        return self._checked(rank) // self.sp_size

    def sp_rank(self, rank: int) -> int:
        """Return a rank's index on the ``sp`` axis."""
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
            "or leave it out to choose it automatically"
        )


def automatic_ring_size(sp_size: int, num_heads: int) -> int:
    """Return the default ring size.

    It is 1 if each rank can have a query head. Otherwise it is the smallest for which the Ulysses size divides the
    number of heads, so that ranks have equal numbers of heads.
    """
    if sp_size <= num_heads:
        return 1
    return next(ring for ring in range(2, sp_size + 1) if sp_size % ring == 0 and num_heads % (sp_size // ring) == 0)


def row_multiple(sp_size: int, ring_size: int) -> int:
    """Return the divisor of a row's length, for equal slices and, with a ring, two equal chunks per ring rank."""
    return sp_size if ring_size == 1 else 2 * sp_size


def zigzag_chunks(ring_rank: int, ring_size: int) -> tuple[int, int]:
    """Return the indices of a ring rank's two chunks among a row's ``2 * ring_size``, in order.

    One chunk is early and one late, so that all ring ranks have equal work under a causal mask.
    """
    return ring_rank, 2 * ring_size - 1 - ring_rank


def held_ranges(row_tokens: int, sp_rank: int, sp_size: int, ring_size: int = 1) -> tuple[tuple[int, int], ...]:
    """Return the tokens ``(start, stop)`` of a row that a rank of ``sp`` holds, in order.

    Without a ring this is one slice. With a ring of R ranks, a row is divided into 2 R chunks. Ring rank ``r`` has
    chunks ``r`` and ``2 R - 1 - r``, so that all have equal work under a causal mask, and its Ulysses ranks share the
    concatenated chunks in equal parts. ``row_tokens`` must be a multiple of :func:`row_multiple`.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHeads:
    """The heads of one rank."""

    first: int
    stop: int
    groups: tuple[tuple[int, int], ...]
    """``(kv_head, num_query_heads)`` in order: each key-value head that the rank needs, and the number of its query
    heads that use it."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.stop - self.first

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads."""
        return len(self.groups)

    @property
    def first_kv(self) -> int:
        """First key-value head."""
        return self.groups[0][0] if self.groups else 0

    @property
    def stop_kv(self) -> int:
        """End of the key-value heads, exclusive."""
        return self.first_kv + len(self.groups)

    def calls(self) -> tuple[tuple[slice, slice], ...]:
        """Return the (query heads, key-value heads) of each kernel call, indexed within the rank.

        A kernel needs groups of equal size, so neighboring groups of the same size share a call.
        """
        calls, head, kv = [], 0, 0
        for count, run in groupby(self.groups, key=lambda group: group[1]):
            num_groups = len(list(run))
            calls.append((slice(head, head + num_groups * count), slice(kv, kv + num_groups)))
            head += num_groups * count
            kv += num_groups
        return tuple(calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlan:
    """The heads of every rank of a Ulysses group."""

    num_heads: int
    num_kv_heads: int
    ranks: tuple[RankHeads, ...]

    @property
    def max_heads(self) -> int:
        """Largest number of query heads on a rank."""
        return max(rank.num_heads for rank in self.ranks)

    @property
    def max_kv_heads(self) -> int:
        """Largest number of key-value heads on a rank."""
        return max(rank.num_kv_heads for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """Largest number of query heads on a rank divided by the mean: attention's time relative to equal shares."""
        return self.max_heads * len(self.ranks) / self.num_heads

    @property
    def kernel_calls(self) -> int:
        """Largest number of kernel calls per layer on a rank; 1 if its heads form groups of equal size."""
        return max(len(rank.calls()) for rank in self.ranks)

    @property
    def kv_copies(self) -> float:
        """Number of key-value heads sent, divided by the number of key-value heads."""
        return sum(rank.num_kv_heads for rank in self.ranks) / self.num_kv_heads


@cache
def assign_heads(num_heads: int, num_kv_heads: int, ulysses_size: int) -> HeadPlan:
    """Return the heads of each rank of a Ulysses group.

    Rank ``r`` has the query heads from ``r * H // U``: sizes differ by at most one, and borders are borders of
    key-value groups where equal sizes allow it.

    Args:
        num_heads: Query heads ``H``.
        num_kv_heads: Key-value heads, a divisor of ``H``.
        ulysses_size: Ranks ``U`` over which heads are exchanged, at most ``H``.

    Raises:
        UserError: There are more ranks than query heads, or key-value heads do not divide query heads.
    """
    if ulysses_size > num_heads:
        raise UserError(
            f"{ulysses_size} ranks can't share {num_heads} attention heads: each needs at least one; set "
            f"parallel.ring_size so that parallel.sp_size / ring_size is at most {num_heads}"
        )
    if num_heads % num_kv_heads:
        raise UserError(
            f"{num_kv_heads} key-value heads do not divide {num_heads} query heads; each must serve a whole group"
        )
    borders = [rank * num_heads // ulysses_size for rank in range(ulysses_size + 1)]
    ranks = tuple(_rank_heads(first, stop, num_heads // num_kv_heads) for first, stop in pairwise(borders))
    return HeadPlan(num_heads=num_heads, num_kv_heads=num_kv_heads, ranks=ranks)


@cache
def part_of(plan: HeadPlan, part: int, num_parts: int) -> HeadPlan:
    """Return one part of a plan, with a fraction of every rank's key-value heads.

    A rank with fewer key-value heads than parts has no heads in some parts.
    """
    ranks = []
    for rank in plan.ranks:
        low, high = (rank.num_kv_heads * index // num_parts for index in (part, part + 1))
        before = sum(count for _, count in rank.groups[:low])
        inside = sum(count for _, count in rank.groups[low:high])
        first = rank.first + before
        ranks.append(RankHeads(first=first, stop=first + inside, groups=rank.groups[low:high]))
    return HeadPlan(num_heads=plan.num_heads, num_kv_heads=plan.num_kv_heads, ranks=tuple(ranks))


def _rank_heads(first: int, stop: int, group: int) -> RankHeads:
    groups = tuple(
        (kv, min(stop, (kv + 1) * group) - max(first, kv * group)) for kv in range(first // group, -(-stop // group))
    )
    return RankHeads(first=first, stop=stop, groups=groups)


TileSetting = int | Literal["auto", "off"]
"""Tokens per tile; ``auto`` chooses them by width, ``off`` processes all tokens at once."""

TILE_TOKENS = "_tile_tokens"
"""Attribute of a module whose ``forward`` runs over tiles: a function that returns the tokens per tile."""

_MOST_VALUES = 1 << 26
_LEAST_VALUES = 1 << 20
_VALUES_OF_NORM_TILE = 1 << 24
_MOST_LOSS_TOKENS, _MOST_MLP_TOKENS = 512, 4096
_LEAST_LOSS_TILES = 8


def loss_tile_tokens(setting: TileSetting, tokens: int, vocab_size: int) -> int:
    """Return the tokens per tile of the loss; the last tile may have fewer.

    ``auto`` makes tiles of 512 tokens: summing the head's gradients then takes little of the time, and the peak does
    not grow with the row. Tiles are smaller if there would be fewer than 8 or a tile would have over 2**26 logits (256
    MiB in fp32), and larger if a tile would have under 2**20 (4 MiB). ``tokens`` is this rank's tokens of a batch. A
    tile longer than the row becomes the whole row, since rows differ in length.
    """
    tile = min(_MOST_LOSS_TOKENS, tokens // _LEAST_LOSS_TILES, _MOST_VALUES // vocab_size)
    return _tile_tokens(setting, tokens, max(tile, _LEAST_VALUES // vocab_size))


def mlp_tile_tokens(setting: TileSetting, tokens: int, width: int) -> int:
    """Return the tokens per tile of an MLP; ``auto`` makes tiles of up to 4,096 tokens and 2**26 values of its width.

    With so many tokens, summing the weights' gradients takes little of the time for any width. ``width`` is the number
    of values per token inside the MLP.
    """
    return _tile_tokens(setting, tokens, min(_MOST_MLP_TOKENS, _MOST_VALUES // width))


def norm_tile_vectors(setting: TileSetting, vectors: int, width: int, hidden_size: int) -> int:
    """Return the vectors per tile of a norm; ``auto`` makes tiles of 2**24 values.

    Each vector of ``width`` values is normalized separately: this rank's tokens of a batch, or their heads. A number as
    the setting means tokens of hidden states, and gives as many values as these tokens have.
    """
    if setting == "off":
        return max(1, vectors)
    values = _VALUES_OF_NORM_TILE if setting == "auto" else setting * hidden_size
    return _tile_tokens("auto", vectors, values // width)


def _tile_tokens(setting: TileSetting, tokens: int, automatic: int) -> int:
    tile = tokens if setting == "off" else automatic if setting == "auto" else setting
    return max(1, min(tile, tokens))
