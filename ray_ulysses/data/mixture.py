"""Sources of a plan and how much of each an epoch takes.

Without weights an epoch takes every document of every source once. With weights an epoch is as long as the source that
is scarcest for its weight allows: that one is taken whole, of the others as many tokens as their weight asks for. Each
source is walked round a circle of its documents in a seeded order and goes on in the next epoch where it stopped, so
none of its documents is taken twice before every other was taken once, and none twice in one epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.drawing import Drawing, EpochDraw
from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSource:
    """One corpus of a plan.

    Attributes:
        path: Where it was when the plan was made.
        fingerprint: Identity of its content.
        num_documents: Its documents; those of all sources are numbered one source after another.
        weight: Its share of an epoch's tokens, relative to the others; None where all of it is taken; 0 where none is.
        tokenizer: Fingerprint of the tokenizer that made it; empty where it is not known.
    """

    path: str
    fingerprint: str
    num_documents: int
    weight: float | None = None
    tokenizer: str = ""

    @property
    def is_used(self) -> bool:
        """Return whether rows are made of it."""
        return self.weight is None or self.weight > 0

    @property
    def identity(self) -> list[Any]:
        """Return what of it decides a plan: not where it lies."""
        return [self.fingerprint, self.num_documents, self.weight]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceWindow:
    """What an epoch takes of a source's circle.

    Attributes:
        first: First place on the circle.
        count: Places; those of documents that can't be taken are among them.
    """

    first: int
    count: int


def check_weights(sources: Sequence[PlannedSource]) -> None:
    """Refuse weights that decide nothing.

    Raises:
        UserError: They are given in part, are negative or not finite, or sum to zero.
    """
    weights = [source.weight for source in sources]
    given = [weight for weight in weights if weight is not None]
    if not given:
        return
    # A source that an edit took out of the run stands at 0 beside sources without weights.
    if len(given) < len(weights) and any(given):
        raise UserError(
            f"data.sources: {len(given)} of {len(weights)} sources have a weight; give each one, or none of them one"
        )
    if any(not np.isfinite(weight) or weight < 0 for weight in given):
        raise UserError(f"data.sources: the weights {given} must be finite and at least 0")
    if len(given) == len(weights) and sum(given) == 0:
        raise UserError("data.sources: the weights sum to zero, so no source is used; give at least one above 0")


def epoch_windows(
    sources: Sequence[PlannedSource],
    firsts: Sequence[int],
    drawing: Drawing,
    epoch: int,
    begun: Sequence[SourceWindow] | None = None,
) -> tuple[SourceWindow, ...]:
    """Return what an epoch takes of each source.

    Args:
        sources: The sources.
        firsts: Where each one's circle goes on.
        drawing: Which documents can be taken, and how long they are.
        epoch: Number of the epoch, for the text of an error.
        begun: What the epoch took so far, where a branch goes on with it: if a source that is used has nothing left,
            the epoch ends with what it had planned.

    Raises:
        UserError: A source that is used has no token left for the epoch.
    """
    used = [source.is_used for source in sources]
    sizes = [source.num_documents for source in sources]
    weighted = [source.weight or 0.0 for source in sources]
    if not any(weighted):
        return tuple(
            SourceWindow(first=first, count=size if use else 0)
            for first, size, use in zip(firsts, sizes, used, strict=True)
        )
    unbegun = [SourceWindow(first=first, count=0) for first in firsts]
    available = [drawing.available_tokens(number) if use else 0 for number, use in enumerate(used)]
    for source, tokens in zip(sources, available, strict=True):
        if source.is_used and not tokens and begun is not None:
            windows = [*begun, *unbegun[len(begun) :]]
            return tuple(window if use else none for window, none, use in zip(windows, unbegun, used, strict=True))
        if source.is_used and not tokens:
            raise UserError(
                f"data.sources: {source.path} has weight {source.weight} and no token left for epoch {epoch}; "
                "set its weight to 0, or add documents"
            )
    total = sum(weighted)
    length = min(tokens * total / weight for tokens, weight in zip(available, weighted, strict=True) if weight)
    windows = []
    for number, (weight, first) in enumerate(zip(weighted, firsts, strict=True)):
        if not weight:
            windows.append(SourceWindow(first=first, count=0))
            continue
        quota = round(length * weight / total)
        count = sizes[number] if quota >= available[number] else drawing.places_for(number, first, quota)
        windows.append(SourceWindow(first=first, count=count))
    return tuple(windows)


def next_firsts(windows: Sequence[SourceWindow], sources: Sequence[PlannedSource]) -> tuple[int, ...]:
    """Return where each source's circle goes on after an epoch."""
    return tuple(
        (window.first + window.count) % max(1, source.num_documents)
        for window, source in zip(windows, sources, strict=True)
    )


def draw_of(windows: Sequence[SourceWindow], *, seed: int, epoch: int, stream: int, held_out: bool) -> EpochDraw:
    """Return the order in which an epoch takes its documents."""
    return EpochDraw(
        firsts=np.asarray([window.first for window in windows], dtype=np.int64),
        counts=np.asarray([window.count for window in windows], dtype=np.int64),
        seeds=(seed, epoch, stream),
        held_out=held_out,
    )


def first_documents(sources: Sequence[PlannedSource]) -> NDArray[np.int64]:
    """Return the number of each source's first document, and one past the last of all."""
    return np.cumsum([0, *(source.num_documents for source in sources)], dtype=np.int64)
