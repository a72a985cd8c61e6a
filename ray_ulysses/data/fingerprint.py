"""Hashes that must never change: of JSON values, to identify corpora, plans and sources, and of 64-bit integers.

The mixer behind the evaluation split and the data digest is SplitMix64's finaliser (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; constants of variant 13 by Stafford).
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def stable_hash(value: object) -> str:
    """Return 32 hexadecimal digits that depend only on the JSON form of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def mix(values: UInt64Array) -> UInt64Array:
    """Return a bijective, well-mixed image of each 64-bit value."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def mix_int(value: int) -> int:
    """Return `mix` of one integer, taken modulo 2**64."""
    return int(mix(np.asarray([value & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0])
