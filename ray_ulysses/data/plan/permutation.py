"""A seeded order of any size without memory: each element is computed from its place.

A Feistel network on the smallest power of two that holds all places, walked until it lands inside (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002). Six rounds of a 64-bit mixer shuffle; they do not encrypt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.mixing import mix_int
from ray_ulysses.data.plan.packing_kernels import NUM_ROUNDS, permute_range


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """A pseudorandom order of ``size`` elements.

    Attributes:
        size: Number of elements; places and elements are numbered from 0.
        low_bits: Bits of the lower half of a number.
        high_bits: Bits of the upper half.
        round_keys: uint64 [rounds].
    """

    size: np.uint64
    low_bits: np.uint64
    high_bits: np.uint64
    round_keys: NDArray[np.uint64]

    @classmethod
    def seeded(cls, size: int, *seeds: int) -> Permutation:
        """Return the order given by the seeds; it is the same on every machine."""
        bits = max(2, (size - 1).bit_length()) if size else 2
        key = 0
        for seed in seeds:
            key = mix_int(key ^ mix_int(seed))
        return cls(
            size=np.uint64(size),
            low_bits=np.uint64(bits // 2),
            high_bits=np.uint64(bits - bits // 2),
            round_keys=np.asarray([mix_int(key + number) for number in range(NUM_ROUNDS)], dtype=np.uint64),
        )

    @property
    def arguments(self) -> tuple[np.uint64, np.uint64, np.uint64, NDArray[np.uint64]]:
        """Return what ``permute_range`` takes after the first place."""
        return self.size, self.low_bits, self.high_bits, self.round_keys

    def elements(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the elements at the places ``[first, stop)``."""
        out = np.empty(stop - first, dtype=np.int64)
        permute_range(first, *self.arguments, out)
        return out
