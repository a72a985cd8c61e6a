"""Reads FASTA files: records of a header line, which begins with ``>``, and the lines of a sequence.

Like lines of JSON, records may be read in byte ranges. A record belongs to the range that contains the first byte of
its header, and is read completely even if it ends beyond the range.
"""

from __future__ import annotations

import math
import string
import zlib
from collections.abc import Iterator

from ray_ulysses.data.sources.files import path_text, unreadable
from ray_ulysses.data.sources.records import PACKED_SUFFIXES, is_packed, opened
from ray_ulysses.data.sources.rows import MOST_BYTES
from ray_ulysses.errors import UserError

FASTA_SUFFIXES = tuple(
    f"{kind}{packed}" for kind in (".fa", ".fasta", ".fna", ".faa") for packed in ("", *PACKED_SUFFIXES)
)
_READ_BYTES = 1 << 20
_UPPER = bytes.maketrans(string.ascii_lowercase.encode(), string.ascii_uppercase.encode())
_SPACE = string.whitespace.encode()


def fasta_records(path: str, first: int = 0, last: float = math.inf) -> Iterator[tuple[str, bytearray]]:
    """Yield the id and the sequence of each record whose header begins in the byte range ``[first, last)``.

    The id is the header up to the first white space. Letters are in upper case, since lower case marks repeats (soft
    masking). Only one record is in memory at a time. A sequence of more than ``MOST_BYTES`` bytes is truncated to a
    few bytes more than that limit.

    Raises:
        UserError: The file can't be read, or has a sequence before the first header.
    """
    name: str | None = None
    sequence = bytearray()
    is_header, begins_line, at = False, first == 0, first
    try:
        with opened(path) as file:
            if first:
                # The byte before `first` shows whether a line begins at `first`.
                at -= 1
                file.seek(at)
            while part := file.readline(_READ_BYTES):
                is_header = part.startswith(b">") if begins_line else is_header
                if is_header and begins_line:
                    if name is not None:
                        yield name, sequence
                    if at >= last:
                        return
                    name, sequence = (part[1:].split() or [b""])[0].decode("utf-8", "replace"), bytearray()
                elif name is None and at >= last:
                    return
                elif name is not None and not is_header and len(sequence) <= MOST_BYTES:
                    sequence += part.translate(_UPPER, _SPACE)
                elif first == 0 and name is None and not part.isspace():
                    raise UserError(
                        f"source={path_text(path)}: begins with a sequence, not with a header (>); correct the FASTA "
                        "file, or set --kind=text to read it as text"
                    )
                begins_line = part.endswith(b"\n")
                at += len(part)
            if name is not None:
                yield name, sequence
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, "FASTA" if is_packed(path) else "") from error
