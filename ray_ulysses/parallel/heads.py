"""Assigns attention heads to the ranks of a Ulysses group, for any number of heads.

Each rank gets a contiguous range of query heads, with sizes as equal as possible. A key-value head goes to every rank
that has one of its query heads, and to no other, so that nothing unused is sent and the number of ranks need not divide
the number of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise

from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHeads:
    """The heads of one rank."""

    first: int
    stop: int
    groups: tuple[tuple[int, int], ...]
    """``(kv_head, num_query_heads)`` in order: the key-value heads that it needs, and the number of its query heads
    that use each."""

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
        """Largest number of query heads on a rank over the mean, and so attention's time relative to equal shares."""
        return self.max_heads * len(self.ranks) / self.num_heads

    @property
    def kernel_calls(self) -> int:
        """Largest number of kernel calls per layer on a rank; 1 if its heads form groups of equal size."""
        return max(len(rank.calls()) for rank in self.ranks)

    @property
    def kv_copies(self) -> float:
        """Number of key-value heads sent over the number of key-value heads."""
        return sum(rank.num_kv_heads for rank in self.ranks) / self.num_kv_heads


@cache
def assign_heads(num_heads: int, num_kv_heads: int, ulysses_size: int) -> HeadPlan:
    """Return the heads of each rank of a Ulysses group.

    Rank ``r`` has the query heads from ``r * H // U``: sizes differ by at most one, and borders coincide with those of
    key-value groups where equal sizes allow it.

    Args:
        num_heads: Query heads ``H``.
        num_kv_heads: Key-value heads, a divisor of ``H``.
        ulysses_size: Ranks ``U`` that heads are exchanged over, at most ``H``.

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
    """Return one part of a plan: a fraction of every rank's key-value heads.

    Args:
        plan: The whole plan.
        part: Index of the part.
        num_parts: Number of parts; a rank with fewer key-value heads has none in some parts.
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
