"""Lengths of documents in tokens, of which the benchmarks make corpora; the same seed gives the same ones."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST = 2, 1_000_000
SIGMA, MEAN_TOKENS = 1.5, 6_500
_CHUNK = 1 << 20


def log_normal(
    num_documents: int, *, mean: float = MEAN_TOKENS, sigma: float = SIGMA, seed: int = 0
) -> NDArray[np.uint32]:
    """Return log-normal lengths, clipped to [2, 1M]; ``mean`` is that of the distribution before it is clipped."""
    return np.concatenate([*_log_normal_chunks(num_documents, mean, sigma, seed)])


def write_log_normal(path: Path, num_documents: int, seed: int = 0) -> None:
    """Write log-normal lengths as an ``.npy`` of uint32, a million at a time."""
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=(num_documents,))
    first = 0
    for chunk in _log_normal_chunks(num_documents, MEAN_TOKENS, SIGMA, seed):
        lengths[first : first + chunk.size] = chunk
        first += chunk.size
    lengths.flush()


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


def standard_library() -> NDArray[np.uint32]:
    """Return the bytes of each Python file of the standard library, one end token each; a byte is a token."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return np.asarray([path.stat().st_size + 1 for path in files], dtype=np.uint32)


def _log_normal_chunks(num_documents: int, mean: float, sigma: float, seed: int) -> Iterator[NDArray[np.uint32]]:
    rng = np.random.default_rng(seed)
    centre = math.log(mean) - sigma**2 / 2
    for first in range(0, num_documents, _CHUNK):
        drawn = rng.lognormal(centre, sigma, min(_CHUNK, num_documents - first))
        yield np.clip(drawn, SHORTEST, LONGEST).astype(np.uint32)
