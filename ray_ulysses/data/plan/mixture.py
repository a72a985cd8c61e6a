"""The sources of a plan, and how much of each an epoch takes.

Without weights an epoch takes every document of every source once. With weights the source that is scarcest for its
weight is taken whole, and of the others as many tokens as their weights ask for. What is left of documents that were
begun counts among them, and is taken even where it is more than the weights ask for. Of a source that is taken in part,
the documents that the run has used least come first, in a seeded order: none is taken twice before every other was
taken once, even across changes of the run's data, and none twice in one epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.errors import UserError
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Number, Whole

if TYPE_CHECKING:
    from ray_ulysses.data.plan.drawing import Drawing, Fragments


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSource:
    """One corpus of a plan.

    Attributes:
        path: Its path when the plan was made.
        fingerprint: Identity of its content.
        num_documents: Its documents; those of all sources are numbered one source after another.
        weight: Its share of an epoch's tokens, relative to the others; None to take all of it, 0 to take none.
        tokenizer: Fingerprint of the tokenizer that made it; empty if unknown.
        end_tokens: The tokens that a model learns from it to end a text with.
        has_weights: Whether its tokens have loss weights.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    path: str
    fingerprint: str
    num_documents: Whole
    weight: Number | None = None
    tokenizer: str = ""
    end_tokens: tuple[Whole, ...] = ()
    has_weights: bool = False

    @property
    def is_used(self) -> bool:
        """Return whether rows are made from it."""
        return self.weight is None or self.weight > 0

    @property
    def identity(self) -> list[Any]:
        """Return what of it determines a plan, which excludes its path."""
        return [self.fingerprint, self.num_documents, None if self.weight is None else float(self.weight)]


def corpus_fingerprint(sources: Sequence[PlannedSource]) -> str:
    """Return the identity of the content of all sources."""
    if len(sources) == 1:
        return sources[0].fingerprint
    return stable_hash([source.fingerprint for source in sources])


def check_weights(sources: Sequence[PlannedSource]) -> None:
    """Refuse weights that are incomplete or invalid.

    Raises:
        UserError: Only some are given, one is negative or not finite, or they sum to zero.
    """
    weights = [source.weight for source in sources]
    given = [weight for weight in weights if weight is not None]
    if not given:
        return
    # A source that was taken out of the run has weight 0, even beside sources without weights.
    if len(given) < len(weights) and any(given):
        raise UserError(
            f"data.sources: {len(given)} of {len(weights)} sources have a weight; give each one, or none of them one"
        )
    if any(not np.isfinite(weight) or weight < 0 for weight in given):
        raise UserError(f"data.sources: the weights {given} must be finite and at least 0")
    if len(given) == len(weights) and sum(given) == 0:
        raise UserError("data.sources: the weights sum to zero, so no source is used; give at least one above 0")


def choose_documents(
    sources: Sequence[PlannedSource],
    drawing: Drawing,
    uses: NDArray[np.uint32],
    epoch: int,
    fragments: Fragments,
    planned: NDArray[np.bool_] | None = None,
    *,
    keeps: bool = False,
) -> tuple[NDArray[np.bool_], tuple[int, ...]]:
    """Return which documents an epoch takes if sources have weights, and count their uses.

    Args:
        sources: The sources.
        drawing: The documents that can be taken, and their lengths.
        uses: [documents], how often each was taken before; incremented in place.
        epoch: Number of the epoch, for the text of an error.
        fragments: What the epoch takes of documents that were begun.
        planned: [documents], what the epoch had planned and not trained, if a branch continues it. If a source in use
            has nothing left, the epoch ends with these.
        keeps: Whether it goes on with these in any case, since no weight has changed.

    Returns:
        bool [documents], and the tokens that the epoch takes of each source, fragments included.

    Raises:
        UserError: A source that is used has no token left for the epoch.
    """
    weights = [source.weight or 0.0 for source in sources]
    resumed = drawing.fragment_tokens(fragments)
    available = [
        drawing.available_tokens(number) + resumed[number] if weight else 0 for number, weight in enumerate(weights)
    ]
    empty = [source for source, tokens in zip(sources, available, strict=True) if source.weight and not tokens]
    if empty and planned is None:
        raise UserError(
            f"data.sources: {empty[0].path} has weight {empty[0].weight} and no token left for epoch {epoch}; "
            "set its weight to 0, or add documents"
        )
    chosen = np.zeros(uses.size, dtype=np.bool_)
    if planned is not None and (empty or keeps):
        chosen |= planned
    else:
        total = sum(weights)
        length = min(tokens * total / weight for tokens, weight in zip(available, weights, strict=True) if weight)
        for number, weight in enumerate(weights):
            if weight:
                drawing.choose(number, max(0, round(length * weight / total) - resumed[number]), uses, chosen)
    uses += chosen
    taken = drawing.among(chosen)
    tokens = (
        taken.available_tokens(number) + resumed[number] if weight else 0 for number, weight in enumerate(weights)
    )
    return chosen, tuple(tokens)


def first_documents(sources: Sequence[PlannedSource]) -> NDArray[np.int64]:
    """Return the number of each source's first document, and one past the last of all."""
    return np.cumsum([0, *(source.num_documents for source in sources)], dtype=np.int64)
