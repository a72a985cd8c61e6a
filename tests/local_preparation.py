"""Preparations in this process, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import (
    Preparation,
    PrepareRequest,
    ProgressCallback,
    claimed,
    finish,
    listed,
    progress_of,
)
from ray_ulysses.data.prepare.unit_writer import write_unit
from ray_ulysses.storage.retry import RETRY, RetryPolicy


@contextmanager
def preparing(request: PrepareRequest, retry: RetryPolicy = RETRY) -> Iterator[Preparation]:
    """List the sources and lock the output directory until the block ends."""
    with claimed(listed(request, retry), retry) as preparation:
        yield preparation


def prepare_local(
    request: PrepareRequest, progress: ProgressCallback | None = None, retry: RetryPolicy = RETRY
) -> Corpus:
    """Prepare a corpus, one unit after another; writes the same files as through Ray."""
    with preparing(request, retry) as preparation:
        request = preparation.request
        if preparation.is_complete:
            return Corpus.open(request.out, retry=retry)
        results = list(preparation.done)
        for unit in preparation.pending:
            results.append(write_unit(request.out, unit, preparation.encoder, retry))
            if progress is not None:
                progress(progress_of(preparation, results))
        return finish(preparation, tuple(results), retry)
