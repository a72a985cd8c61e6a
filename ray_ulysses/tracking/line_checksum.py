"""The checksum of a journal's line, by which damage is noticed and a single flipped bit is corrected.

A line is a JSON object whose first member is the CRC-32 of all that follows it:
``{"crc32": "1c291ca3", "time": 1700000000.0, ...}``.
"""

from __future__ import annotations

import zlib

_BEGINNING = b'{"crc32": "'
_HEAD_BYTES = len(_BEGINNING) + len('01234567", ')
_MOST_CORRECTED_BYTES = 11_000


def with_checksum(line: bytes) -> bytes:
    """Return a line, which is a JSON object with members, with its checksum in front of them."""
    return _head(line[1:]) + line[1:]


def has_checksum(line: bytes) -> bool:
    """Return whether a line begins as one with a checksum does, right or wrong."""
    return line.startswith(_BEGINNING)


def is_intact(line: bytes) -> bool:
    """Return whether a line has a checksum, and the right one."""
    return line[:_HEAD_BYTES] == _head(line[_HEAD_BYTES:])


def corrected(line: bytes) -> bytes | None:
    """Return a damaged line as it was before one of its bits was flipped; None if it was damaged otherwise.

    Two different single flips never have the same effect on a CRC-32, and two flips never look like one (its Hamming
    distance is 4 up to 11 kB: P. Koopman, https://users.ece.cmu.edu/~koopman/crc/crc32.html). A longer line, as a
    stretch of a disk that was overwritten leaves, is not corrected: the search would take seconds for each.
    """
    if len(line) > _MOST_CORRECTED_BYTES:
        return None
    head, rest = line[:_HEAD_BYTES], line[_HEAD_BYTES:]
    right = _head(rest)
    if len(head) == len(right) and _num_flips(head, right) == 1:
        return right + rest
    if not head.startswith(_BEGINNING):
        return None
    try:
        wanted = zlib.crc32(rest) ^ int(head[len(_BEGINNING) :][:8], 16)
    except ValueError:
        return None
    # The checksum is linear: a flip changes it by the same bits whatever the line says.
    zero = zlib.crc32(b"\0")
    effects = [zlib.crc32(bytes([1 << bit])) ^ zero for bit in range(8)]
    for place in reversed(range(len(rest))):
        if wanted in effects:
            byte = rest[place] ^ (1 << effects.index(wanted))
            return head + rest[:place] + bytes([byte]) + rest[place + 1 :]
        # One byte further from the end, a zero byte more has gone through the register since.
        effects = [zlib.crc32(b"\0", effect) ^ zero for effect in effects]
    return None


def _head(rest: bytes) -> bytes:
    return b'%s%08x", ' % (_BEGINNING, zlib.crc32(rest))


def _num_flips(one: bytes, other: bytes) -> int:
    return (int.from_bytes(one) ^ int.from_bytes(other)).bit_count()
