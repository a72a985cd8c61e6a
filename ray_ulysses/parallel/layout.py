"""Which rank holds which data-parallel row and which part of the sequence: pure arithmetic.

Ranks of one sequence-parallel (``sp``) group are contiguous, so that a group lies within a node where the node
is large enough: ``rank = dp_rank * sp_size + sp_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The layout of a world of ranks over the axes ``dp`` and ``sp``.

    Attributes:
        world_size: Number of ranks.
        sp_size: Ranks that share one row of tokens.
    """

    world_size: int
    sp_size: int

    def __post_init__(self) -> None:
        """Refuse a world that is not a whole number of ``sp`` groups."""
        if self.sp_size < 1:
            raise UserError(f"parallel.sp_size={self.sp_size} must be at least 1")
        if self.world_size < 1 or self.world_size % self.sp_size:
            lower = self.world_size // self.sp_size * self.sp_size
            choices = [str(n) for n in (lower, lower + self.sp_size) if n > 0]
            raise UserError(
                f"cluster.workers={self.world_size} is not a multiple of parallel.sp_size={self.sp_size}; "
                f"use {' or '.join(choices)} workers, or an sp_size that divides {self.world_size}"
            )

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

    def rank_of(self, dp_rank: int, sp_rank: int) -> int:
        """Return the rank at a place of the mesh."""
        assert 0 <= dp_rank < self.dp_size and 0 <= sp_rank < self.sp_size
        return dp_rank * self.sp_size + sp_rank

    def sp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every ``sp`` group, in the order of ``dp``."""
        return tuple(tuple(self.rank_of(d, s) for s in range(self.sp_size)) for d in range(self.dp_size))

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every ``dp`` group, in the order of ``sp``."""
        return tuple(tuple(self.rank_of(d, s) for d in range(self.dp_size)) for s in range(self.sp_size))

    def _checked(self, rank: int) -> int:
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        return rank


def valid_sp_sizes(num_heads: int) -> tuple[int, ...]:
    """Return the Ulysses sizes that a model's query heads allow: the divisors of ``num_heads``."""
    return tuple(size for size in range(1, num_heads + 1) if num_heads % size == 0)


def valid_world_sizes(sp_size: int, most: int) -> tuple[int, ...]:
    """Return the worker counts up to ``most`` that are whole numbers of ``sp`` groups."""
    return tuple(range(sp_size, most + 1, sp_size))
