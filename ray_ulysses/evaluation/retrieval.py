"""The share of right answers about facts in long texts, by kind, length and depth."""

from __future__ import annotations

import numpy as np

from ray_ulysses.evaluation.needles import Haystack, depth_places, needle_rows
from ray_ulysses.evaluation.passage import Score
from ray_ulysses.evaluation.results import Kind, RetrievalCell


def retrieval_cells(
    haystack: Haystack, score: Score, *, kind: Kind, length: int, num_depths: int, cases: int, seed: int
) -> tuple[RetrievalCell, ...]:
    """Return the cells of one kind and length, from the smallest depth to the largest.

    Args:
        haystack: What the facts are hidden in.
        score: Scores texts.
        kind: Kind of the facts and questions.
        length: Tokens of a row.
        num_depths: Number of depths.
        cases: Number of questions about each.
        seed: Seed of everything drawn.

    Raises:
        UserError: A row has no room for one question.
    """
    depths = depth_places(num_depths)
    rows = list(needle_rows(haystack, kind, length=length, depths=depths, cases=cases, seed=seed))
    found: list[list[tuple[bool, float, float]]] = [[] for _ in depths]
    for row, scores in zip(rows, score(row.passage for row in rows), strict=True):
        for answer in row.answers:
            is_right = bool(scores.is_correct[answer.tokens].all())
            found[answer.depth].append((is_right, answer.chance, answer.chance_shown))
    return tuple(
        RetrievalCell(
            kind=kind,
            length=length,
            depth=depth,
            cases=len(own),
            correct=sum(is_right for is_right, _, _ in own),
            chance=float(np.mean([chance for _, chance, _ in own])),
            chance_shown=float(np.mean([chance for _, _, chance in own])),
        )
        for depth, own in zip(depths, found, strict=True)
    )
