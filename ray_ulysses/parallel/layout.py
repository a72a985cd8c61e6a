"""Computes the parallel layout: each rank's position on the axes, tokens and heads, and the tile sizes.

The ranks of a sequence-parallel (``sp``) group are contiguous, so that a group stays within a node if the node is large
enough: ``rank = dp_rank * sp_size + sp_rank``. Within a group, ``sp_rank = ring_rank * ulysses_size + ulysses_rank``,
so that the exchange of heads, which moves the most data, is between neighboring ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import Literal

from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """An assignment of all ranks to the axes ``dp`` and ``sp``."""

    world_size: int
    sp_size: int
    """Number of ranks that share a row: ``ulysses_size * ring_size``."""
    ring_size: int = 1
    """Number of ranks over which keys and values circulate; 1 without a ring."""

    def __post_init__(self) -> None:
        """Raise unless ``sp_size`` divides ``world_size`` and ``ring_size`` divides ``sp_size``."""
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
        """Number of ranks that exchange attention heads."""
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
        """Return the ranks of each ``sp`` group, ordered by ``dp`` rank."""
        size = self.sp_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each ``dp`` group, ordered by ``sp`` rank."""
        return tuple(tuple(range(place, self.world_size, self.sp_size)) for place in range(self.sp_size))

    def ulysses_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each Ulysses group."""
        size = self.ulysses_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))

    def ring_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each ring, in ring order."""
        return tuple(
            group[place :: self.ulysses_size] for group in self.sp_groups() for place in range(self.ulysses_size)
        )

    def _checked(self, rank: int) -> int:
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        return rank


def largest_node_group(nodes: Sequence[str]) -> int:
    """Return the largest size of equal groups of contiguous ranks that never cross nodes.

    ``nodes`` contains the node name of each rank, indexed by rank.
    """
    return math.gcd(*(len(tuple(ranks)) for _, ranks in groupby(nodes)))


def check_ring_size(sp_size: int, ring_size: int) -> None:
    """Raise unless the ring size divides the ``sp`` size.

    Raises:
        UserError: The ring size does not divide the ``sp`` size. The message contains the valid ring sizes.
    """
    if ring_size < 1 or sp_size % ring_size:
        choices = ", ".join(str(size) for size in range(1, sp_size + 1) if sp_size % size == 0)
        raise UserError(
            f"parallel.ring_size={ring_size} does not divide parallel.sp_size={sp_size}; use {choices}, or remove "
            "parallel.ring_size to choose it automatically"
        )


def automatic_ring_size(sp_size: int, num_heads: int) -> int:
    """Return the default ring size.

    The default is 1 if there are enough query heads for all ranks. Otherwise it is the smallest ring size for which the
    Ulysses size divides the number of heads, so that all ranks have the same number of heads.
    """
    if sp_size <= num_heads:
        return 1
    return next(ring for ring in range(2, sp_size + 1) if sp_size % ring == 0 and num_heads % (sp_size // ring) == 0)


def row_multiple(sp_size: int, ring_size: int) -> int:
    """Return the number that must divide a row's length, so that all slices (and a ring's chunks) have equal length."""
    return sp_size if ring_size == 1 else 2 * sp_size


def zigzag_chunks(ring_rank: int, ring_size: int) -> tuple[int, int]:
    """Return the indices of a ring rank's two chunks, where a row has ``2 * ring_size`` chunks.

    One chunk is early in the row and the other is late, so that causal attention is balanced across ring ranks.
    """
    return ring_rank, 2 * ring_size - 1 - ring_rank


def held_ranges(row_tokens: int, sp_rank: int, sp_size: int, ring_size: int = 1) -> tuple[tuple[int, int], ...]:
    """Return a rank's tokens of a row as ranges ``(start, stop)``, in ascending order.

    Without a ring, the result is one slice. With a ring of R ranks, a row is divided into 2 R chunks, ring rank ``r``
    gets chunks ``r`` and ``2 R - 1 - r`` (which balances causal attention), and the ring rank's Ulysses ranks get equal
    parts of the concatenated chunks. ``row_tokens`` must be a multiple of :func:`row_multiple`.
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
        # Difference between an index in the row and an index in the ring rank's concatenated chunks.
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
    """Query heads and KV heads of one rank."""

    first: int
    stop: int
    groups: tuple[tuple[int, int], ...]
    """``(kv_head, num_query_heads)`` in ascending order: each KV head that the rank uses, and the number of the rank's
    query heads that use this KV head."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.stop - self.first

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return len(self.groups)

    @property
    def first_kv(self) -> int:
        """Index of the first KV head."""
        return self.groups[0][0] if self.groups else 0

    @property
    def stop_kv(self) -> int:
        """Index of the last KV head, plus one."""
        return self.first_kv + len(self.groups)

    def calls(self) -> tuple[tuple[slice, slice], ...]:
        """Return the slices ``(query heads, KV heads)`` of each kernel call, indexed within the rank.

        A kernel requires KV groups of equal size, so consecutive groups of the same size share a call.
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
    """Assignment of heads to the ranks of a Ulysses group."""

    num_heads: int
    num_kv_heads: int
    ranks: tuple[RankHeads, ...]

    @property
    def max_heads(self) -> int:
        """Largest number of query heads on a rank."""
        return max(rank.num_heads for rank in self.ranks)

    @property
    def max_kv_heads(self) -> int:
        """Largest number of KV heads on a rank."""
        return max(rank.num_kv_heads for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """Largest number of query heads on a rank, divided by the mean number per rank."""
        return self.max_heads * len(self.ranks) / self.num_heads

    @property
    def kernel_calls(self) -> int:
        """Largest number of kernel calls per layer on a rank; 1 if every rank's KV groups have equal size."""
        return max(len(rank.calls()) for rank in self.ranks)

    @property
    def kv_copies(self) -> float:
        """Mean number of ranks that receive a copy of each KV head."""
        return sum(rank.num_kv_heads for rank in self.ranks) / self.num_kv_heads


@cache
def assign_heads(num_heads: int, num_kv_heads: int, ulysses_size: int) -> HeadPlan:
    """Assign heads to the ranks of a Ulysses group.

    Rank ``r`` gets the query heads from ``r * H // U`` to ``(r + 1) * H // U``, so the ranks' numbers of heads differ
    by at most one. If ``U`` divides the number of KV heads, no KV head is copied.

    Args:
        num_heads: Number of query heads ``H``.
        num_kv_heads: Number of KV heads, a divisor of ``H``.
        ulysses_size: Number of ranks ``U``, at most ``H``.

    Raises:
        UserError: There are more ranks than query heads, or the number of KV heads does not divide ``H``.
    """
    if ulysses_size > num_heads:
        raise UserError(
            f"{num_heads} attention heads are not enough for {ulysses_size} ranks, which need at least one head each; "
            f"set parallel.ring_size so that parallel.sp_size / parallel.ring_size is at most {num_heads}"
        )
    if num_heads % num_kv_heads:
        raise UserError(
            f"the model has {num_kv_heads} key-value heads, which do not divide its {num_heads} query heads; correct "
            "the model's configuration"
        )
    borders = [rank * num_heads // ulysses_size for rank in range(ulysses_size + 1)]
    ranks = tuple(_rank_heads(first, stop, num_heads // num_kv_heads) for first, stop in pairwise(borders))
    return HeadPlan(num_heads=num_heads, num_kv_heads=num_kv_heads, ranks=ranks)


@cache
def part_of(plan: HeadPlan, part: int, num_parts: int) -> HeadPlan:
    """Divide each rank's KV heads into ``num_parts`` parts, and return the plan for part ``part``.

    A rank with fewer KV heads than parts has no heads in some parts.
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
"""Number of tokens per tile. ``auto`` derives the number from the layer's width; ``off`` disables tiling."""

TILE_TOKENS = "_tile_tokens"
"""Name of an attribute of modules with a tiled ``forward``: a function that returns the tokens per tile."""

_MOST_VALUES = 1 << 26
_LEAST_VALUES = 1 << 20
_VALUES_OF_NORM_TILE = 1 << 24
_MOST_LOSS_TOKENS, _MOST_MLP_TOKENS = 512, 4096
_LEAST_LOSS_TILES = 8


def loss_tile_tokens(setting: TileSetting, tokens: int, vocab_size: int) -> int:
    """Return the number of tokens per tile of the loss, for ``tokens`` tokens on this rank.

    ``auto`` means 512 tokens: then summing the head's gradients takes a small share of the time, and peak memory is
    independent of the row's length. The tiles are smaller if there would be fewer than 8 tiles or more than 2**26
    logits per tile (256 MiB in fp32), and larger if there would be fewer than 2**20 logits per tile (4 MiB). The result
    never exceeds ``tokens``, and the last tile may be shorter.
    """
    tile = min(_MOST_LOSS_TOKENS, tokens // _LEAST_LOSS_TILES, _MOST_VALUES // vocab_size)
    return _tile_tokens(setting, tokens, max(tile, _LEAST_VALUES // vocab_size))


def mlp_tile_tokens(setting: TileSetting, tokens: int, width: int) -> int:
    """Return the number of tokens per tile of an MLP with ``width`` intermediate features per token.

    ``auto`` means up to 4,096 tokens and up to 2**26 intermediate values. Summing the weights' gradients then takes a
    small share of the time at any width.
    """
    return _tile_tokens(setting, tokens, min(_MOST_MLP_TOKENS, _MOST_VALUES // width))


def norm_tile_vectors(setting: TileSetting, vectors: int, width: int, hidden_size: int) -> int:
    """Return the number of vectors per tile of a norm. ``auto`` means 2**24 values per tile.

    ``vectors`` is the number of vectors of ``width`` values that are normalized separately: one per token, or one per
    token and head. A numeric setting is a number of tokens of ``hidden_size`` values each, converted to vectors.
    """
    if setting == "off":
        return max(1, vectors)
    values = _VALUES_OF_NORM_TILE if setting == "auto" else setting * hidden_size
    return _tile_tokens("auto", vectors, values // width)


def _tile_tokens(setting: TileSetting, tokens: int, automatic: int) -> int:
    tile = tokens if setting == "off" else automatic if setting == "auto" else setting
    return max(1, min(tile, tokens))
