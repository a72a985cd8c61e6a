"""Loss on held-out documents: by position, on the same tokens with increasing context, and preferences in pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.evaluation.held_out import HeldOut
from ray_ulysses.evaluation.report import ContextGain, ContextLoss, PairBin, PairPreference, PositionBin, PositionLoss
from ray_ulysses.evaluation.scoring import Passage, Score

SPAN_TOKENS = 256
"""Number of tokens in a span whose loss is compared between contexts."""


def choose_documents(lengths: NDArray[np.int64], *, longest: int, max_tokens: int, seed: int) -> list[int]:
    """Choose documents in a seeded random order until they have ``max_tokens`` tokens, and return their indices.

    At most ``longest`` tokens per document count toward ``max_tokens``.
    """
    order = np.random.default_rng(seed).permutation(lengths.size)
    totals = np.cumsum(np.minimum(lengths[order], longest))
    return [int(place) for place in order[: int(np.searchsorted(totals, max_tokens)) + 1]]


def position_loss(held: HeldOut, score: Score, *, longest: int, max_tokens: int, seed: int) -> PositionLoss | None:
    """Measure the loss on the beginnings of documents, or return None if none of their tokens is supervised.

    Reads at most ``longest`` tokens per document, and stops after the document that reaches ``max_tokens``.
    """
    places = choose_documents(held.lengths, longest=longest, max_tokens=max_tokens, seed=seed)
    first = 1 if held.masking is None else 0
    passages = [held.passage(place, 0, int(min(held.lengths[place], longest)), first) for place in places]
    tokens, sums = np.zeros(64, dtype=np.int64), np.zeros(64)
    for passage, scores in zip(passages, score(iter(passages)), strict=True):
        positions = np.flatnonzero(passage.is_scored)
        # Position p is in bin floor(log2(p)), and 0 in the first. frexp is exact for all integers of float64.
        number = np.frexp(np.maximum(positions, 1).astype(np.float64))[1] - 1
        tokens += np.bincount(number, minlength=64)
        sums += np.bincount(number, weights=scores.losses[positions], minlength=64)
    if not tokens.any():
        return None
    bins = tuple(
        PositionBin(first=2**place, last=2 ** (place + 1) - 1, tokens=int(tokens[place]), loss_sum=float(sums[place]))
        for place in np.flatnonzero(tokens).tolist()
    )
    return PositionLoss(documents=len(places), tokens=int(tokens.sum()), loss_sum=math.fsum(sums), bins=bins)


def pair_preference(held: HeldOut, score: Score, *, longest: int, max_tokens: int, seed: int) -> PairPreference | None:
    """Measure how often the chosen answers of pairs are preferred, or return None if no pair has two supervised texts.

    Pairs with a text of more than ``longest`` tokens are left out. Stops after the pair that reaches ``max_tokens``.
    """
    fitting = np.flatnonzero(held.longest_texts <= longest)
    places = fitting[choose_documents(held.lengths[fitting], longest=2 * longest, max_tokens=max_tokens, seed=seed)]
    chosen = [pair for pair in map(held.pair, places.tolist()) if all(one.is_scored.any() for one in pair)]
    texts = [one for pair in chosen for one in pair]
    sums = np.array([-scores.losses.sum() for scores in score(iter(texts))]).reshape(-1, 2)
    means = sums / np.array([one.is_scored.sum() for one in texts]).reshape(-1, 2)
    lengths = np.array([one.tokens.size for one in texts]).reshape(-1, 2).max(axis=1)
    number = np.frexp(lengths.astype(np.float64))[1] - 1
    bins = []
    for place in np.unique(number).tolist():
        own, own_means = sums[number == place], means[number == place]
        bins.append(
            PairBin(
                first=2**place,
                last=2 ** (place + 1) - 1,
                pairs=len(own),
                summed=int((own[:, 0] > own[:, 1]).sum()),
                averaged=int((own_means[:, 0] > own_means[:, 1]).sum()),
                margin_sum=math.fsum(own_means[:, 0] - own_means[:, 1]),
            )
        )
    return PairPreference(bins=tuple(bins)) if bins else None


def choose_spans(
    lengths: NDArray[np.int64], *, longest_context: int, num_spans: int, seed: int
) -> list[tuple[int, int]]:
    """Return each span's document index and first token. Every span has at least ``longest_context`` tokens before it.

    The spans of a document do not overlap. Every document contributes one span before any contributes a second.
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
    """Measure the loss of the same spans with increasing context, or return None if no span has a supervised token.

    ``contexts`` is ascending. At least one document must be long enough for the longest context and a span.
    """
    spans = choose_spans(held.lengths, longest_context=contexts[-1], num_spans=num_spans, seed=seed)
    most = contexts[-1]

    def whole(span: tuple[int, int]) -> Passage:
        # Masks of words and spans depend on where a passage begins, so shorter contexts are parts of the longest one.
        return held.passage(span[0], span[1] - most, most + SPAN_TOKENS, first_scored=most)

    counts = np.array([int(whole(span).is_scored.sum()) for span in spans], dtype=np.int64)
    spans, counts = [span for span, count in zip(spans, counts, strict=True) if count], counts[counts > 0]
    if not spans:
        return None

    def passages() -> Iterator[Passage]:
        return (whole(span).last(context + SPAN_TOKENS) for context in contexts for span in spans)

    sums = np.array([scores.losses.sum() for scores in score(passages())]).reshape(len(contexts), len(spans))
    return ContextGain(
        spans=len(spans), documents=len({place for place, _ in spans}), contexts=paired(contexts, sums, counts)
    )


def paired(contexts: Sequence[int], sums: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[ContextLoss, ...]:
    """Return each context's loss, and its gain over the shortest context with the gain's standard error.

    The gain is the loss difference summed over spans, divided by their number of tokens. Its standard error is that of
    the ratio estimator (Cochran, Sampling Techniques, 6.4).

    Args:
        contexts: Number of tokens before each span.
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
