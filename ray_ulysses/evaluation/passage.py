"""A text that a model reads, and what it says of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passage:
    """A text that the model reads alone, as one document."""

    tokens: NDArray[np.int64]
    is_scored: NDArray[np.bool_]
    """For each token, whether its prediction counts; the first token has none."""

    def __post_init__(self) -> None:
        """Check the shapes, and that the first token is not scored."""
        assert self.tokens.shape == self.is_scored.shape and self.tokens.size > 1 and not self.is_scored[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassageScores:
    """What the model says of each token of a text, given the tokens before it."""

    losses: NDArray[np.float64]
    """float64 cross-entropy in nats; 0 where the token is not scored."""
    is_correct: NDArray[np.bool_]
    """Whether the token is scored and the most probable one."""


Score = Callable[[Iterator[Passage]], Iterator[PassageScores]]
"""Scores texts in order, as `scoring.score_passages` does."""
