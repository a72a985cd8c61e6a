"""Finds documents of equal content, within one corpus and across corpora that are trained on together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.errors import UserError

Digests = NDArray[np.uint64]
"""uint64 [documents, 2]: equal for documents of equal content."""


def first_of_same_content(groups: Sequence[Digests]) -> list[NDArray[np.int64]]:
    """Return for each document the number of the first one with the same content, or -1 if it is the first.

    Args:
        groups: The digests of the documents; they are numbered one group after another.
    """
    if not groups:
        return []
    digests = np.concatenate(groups)
    repeated = np.full(len(digests), -1, dtype=np.int64)
    candidates = _sharing_first_half(digests)
    if candidates.size:
        halves = digests[candidates]
        order = np.lexsort((candidates, halves[:, 1], halves[:, 0]))
        ordered = halves[order]
        is_first = np.ones(candidates.size, dtype=np.bool_)
        is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        firsts = candidates[order[np.maximum.accumulate(np.where(is_first, np.arange(candidates.size), 0))]]
        repeated[candidates[order]] = np.where(is_first, -1, firsts)
    return list(np.split(repeated, np.cumsum([len(group) for group in groups])[:-1]))


def refuse_repeats(corpora: Sequence[Corpus], num_known: int = 1) -> None:
    """Refuse corpora that repeat documents of earlier corpora, which would be trained on more than once.

    Args:
        corpora: The corpora of a run, in their order.
        num_known: Number of corpora at the beginning that are not checked.

    Raises:
        UserError: Names the two corpora and a document of both; or one of them can't be read.
    """
    if len(corpora) <= num_known:
        return
    repeated = first_of_same_content([corpus.digests() for corpus in corpora])
    bases = np.cumsum([0, *(corpus.num_documents for corpus in corpora)])
    for number in range(num_known, len(corpora)):
        elsewhere = np.flatnonzero((repeated[number] >= 0) & (repeated[number] < bases[number]))
        if elsewhere.size:
            first = int(repeated[number][elsewhere[0]])
            other = corpora[int(np.searchsorted(bases, first, side="right")) - 1]
            source = corpora[number].source(int(elsewhere[0]))
            place = source.source + (f" at {source.offset}" if source.offset else "")
            path, before = corpora[number].folder, other.folder
            raise UserError(
                f"data.sources: {path} holds {elsewhere.size} documents that corpora named before it hold too (the "
                f"first: {place}, which is in {before}), and they would be trained on again; prepare it again into "
                f"another directory with `--without {before}`, which leaves them out"
            )


def _sharing_first_half(digests: Digests) -> NDArray[np.int64]:
    """Return, ascending, the documents whose first 8 bytes of the digest are shared: nearly only true repeats."""
    order = np.argsort(digests[:, 0], kind="stable")
    ordered = digests[order, 0]
    same = ordered[1:] == ordered[:-1]
    shares = np.zeros(len(digests), dtype=np.bool_)
    shares[1:] |= same
    shares[:-1] |= same
    return np.sort(order[shares])
