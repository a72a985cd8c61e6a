"""Lengths of documents in tokens, of which the benchmarks make corpora; the same seed gives the same ones."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST = 2, 1_000_000
SIGMA, MEAN_TOKENS = 1.5, 6_500
_CHUNK = 1 << 20


def log_normal(
    num_documents: int, *, mean: float = MEAN_TOKENS, sigma: float = SIGMA, seed: int = 0
) -> NDArray[np.uint32]:
    """Return log-normal lengths, clipped to [2, 1M]; ``mean`` is that of the distribution before it is clipped."""
    rng, centre = np.random.default_rng(seed), math.log(mean) - sigma**2 / 2
    lengths = np.empty(num_documents, dtype=np.uint32)
    # A chunk at a time: the draws take eight bytes each.
    for first in range(0, num_documents, _CHUNK):
        part = lengths[first : first + _CHUNK]
        part[:] = np.clip(rng.lognormal(centre, sigma, part.size), SHORTEST, LONGEST)
    return lengths


def near_context(
    num_documents: int, context_tokens: int, seed: int = 0, shares: tuple[float, float] = (0.55, 0.9)
) -> NDArray[np.uint32]:
    """Return lengths even between two shares of the context; by default no two of them share a row."""
    rng = np.random.default_rng(seed)
    low, high = math.ceil(shares[0] * context_tokens), int(shares[1] * context_tokens)
    return rng.integers(low, high, num_documents, endpoint=True).astype(np.uint32)


def mixed(num_documents: int, context_tokens: int, seed: int = 0) -> NDArray[np.uint32]:
    """Return as many tokens of log-normal documents as of ones of 0.55 to 0.9 of the context, shuffled."""
    small = log_normal(num_documents, seed=seed)
    near = near_context(round(float(small.sum(dtype=np.int64)) / (0.725 * context_tokens)), context_tokens, seed)
    return np.random.default_rng(seed).permutation(np.concatenate([small, near]))
