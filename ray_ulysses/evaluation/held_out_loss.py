"""The loss on held-out documents: by position in the document, and of the same tokens with increasing context."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.evaluation.held_out import HeldOut
from ray_ulysses.evaluation.report import ContextGain, ContextLoss, PositionBin, PositionLoss
from ray_ulysses.evaluation.scoring import Passage, Score

SPAN_TOKENS = 256
"""Tokens of a span whose loss is compared between contexts."""


def choose_documents(lengths: NDArray[np.int64], *, longest: int, max_tokens: int, seed: int) -> list[int]:
    """Return indices of documents in a seeded order, until their beginnings hold ``max_tokens`` tokens.

    At most ``longest`` tokens of each document count.
    """
    order = np.random.default_rng(seed).permutation(lengths.size)
    totals = np.cumsum(np.minimum(lengths[order], longest))
    return [int(place) for place in order[: int(np.searchsorted(totals, max_tokens)) + 1]]


def position_loss(held: HeldOut, score: Score, *, longest: int, max_tokens: int, seed: int) -> PositionLoss | None:
    """Return the loss over the beginnings of documents; None if none of their tokens may be a label.

    At most ``longest`` tokens of each document are read, until ``max_tokens`` is reached at the end of a document.
    """
    places = choose_documents(held.lengths, longest=longest, max_tokens=max_tokens, seed=seed)
    passages = [held.passage(place, 0, int(min(held.lengths[place], longest))) for place in places]
    tokens, sums = np.zeros(64, dtype=np.int64), np.zeros(64)
    for passage, scores in zip(passages, score(iter(passages)), strict=True):
        positions = np.flatnonzero(passage.is_scored)
        # Position p is in bin floor(log2(p)); frexp is exact for every integer that float64 holds.
        number = np.frexp(positions.astype(np.float64))[1] - 1
        tokens += np.bincount(number, minlength=64)
        sums += np.bincount(number, weights=scores.losses[positions], minlength=64)
    if not tokens.any():
        return None
    bins = tuple(
        PositionBin(first=2**place, last=2 ** (place + 1) - 1, tokens=int(tokens[place]), loss_sum=float(sums[place]))
        for place in np.flatnonzero(tokens).tolist()
    )
    return PositionLoss(documents=len(places), tokens=int(tokens.sum()), loss_sum=math.fsum(sums), bins=bins)


def choose_spans(
    lengths: NDArray[np.int64], *, longest_context: int, num_spans: int, seed: int
) -> list[tuple[int, int]]:
    """Return the document index and first token of each span; the longest context fits before every span.

    Spans of a document do not overlap, and every document gives one span before any gives a second.
    """
    rng = np.random.default_rng([seed, longest_context])
    counts = (lengths - longest_context) // SPAN_TOKENS
    places = rng.permutation(np.flatnonzero(counts > 0))[:num_spans]
    starts = [rng.permutation(min(int(counts[place]), 2**20))[:num_spans] for place in places]
    found = [
        (int(place), longest_context + int(own[turn]) * SPAN_TOKENS)
        for turn in range(num_spans)
        for place, own in zip(places, starts, strict=True)
        if turn < own.size
    ]
    return found[:num_spans]


def context_gain(
    held: HeldOut, score: Score, *, contexts: Sequence[int], num_spans: int, seed: int
) -> ContextGain | None:
    """Return the loss of the same spans with increasing context before them; None if no span has a label.

    ``contexts`` is ascending, and some document has room for the longest context before a span.
    """
    spans = choose_spans(held.lengths, longest_context=contexts[-1], num_spans=num_spans, seed=seed)
    targets = [held.passage(place, start - 1, SPAN_TOKENS + 1) for place, start in spans]
    spans = [span for span, target in zip(spans, targets, strict=True) if target.is_scored.any()]
    if not spans:
        return None

    def passages() -> Iterator[Passage]:
        for context in contexts:
            for place, start in spans:
                yield held.passage(place, start - context, context + SPAN_TOKENS, first_scored=context)

    sums = np.array([scores.losses.sum() for scores in score(passages())]).reshape(len(contexts), len(spans))
    counts = np.array([target.is_scored.sum() for target in targets if target.is_scored.any()])
    return ContextGain(
        spans=len(spans), documents=len({place for place, _ in spans}), contexts=paired(contexts, sums, counts)
    )


def paired(contexts: Sequence[int], sums: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[ContextLoss, ...]:
    """Return the loss of each context, and its gain over the shortest with the standard error.

    The gain is the ratio of two sums over spans, the loss difference and the number of tokens; the standard error is
    the ratio estimator's (Cochran, Sampling Techniques, 6.4).

    Args:
        contexts: Tokens before each span.
        sums: float64 ``[contexts, spans]``, loss of each span with each context, in nats.
        counts: int64 ``[spans]``, scored tokens of each span.
    """
    total, num = int(counts.sum()), counts.size
    found = []
    for context, own in zip(contexts, sums, strict=True):
        differences = sums[0] - own
        gain = float(differences.sum()) / total
        residuals = differences - gain * counts
        error = math.sqrt(float((residuals**2).sum()) * num / (num - 1)) / total if num > 1 else None
        loss = math.fsum(own) / total
        found.append(ContextLoss(context_tokens=context, tokens=total, loss=loss, gain=gain, standard_error=error))
    return tuple(found)
