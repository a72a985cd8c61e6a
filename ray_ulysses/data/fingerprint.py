"""Hashes of JSON values and 64-bit integers. They must never change, since stored corpora and plans contain them.

The evaluation split and the data digest use the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014) with the constants of Stafford's variant 13.
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
    """Return a hash of 32 hexadecimal digits, computed from the JSON form of ``value`` with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def mix(values: UInt64Array) -> UInt64Array:
    """Map each 64-bit value to a well-mixed 64-bit value; the mapping is a bijection."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def mix_int(value: int) -> int:
    """Return `mix` of one integer, which is first reduced modulo 2**64."""
    return int(mix(np.asarray([value & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0])
