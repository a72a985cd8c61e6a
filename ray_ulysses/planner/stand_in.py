"""Documents of made-up lengths, for planning a run whose corpus does not exist yet."""

from __future__ import annotations

import numpy as np

from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.segment import PlanSettings

STEPS = 20
_MOST_DOCUMENTS = 1_000_000
_SHORTEST, _LONGEST = 1 / 64, 2.0
_MOST_TOKENS = 2**32 - 1


def length_range(settings: PlanSettings) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest made-up document, in tokens."""
    context = settings.context_tokens
    return max(2, int(context * _SHORTEST)), min(int(context * _LONGEST), _MOST_TOKENS)


def stand_in_documents(settings: PlanSettings) -> PlanInput:
    """Return documents for about `STEPS` steps.

    Their lengths are log-uniform from a 64th of the context to twice the context: as many between 1k and 2k tokens as
    between 64k and 128k, so that there are rows of many documents, rows of one, and pieces of split documents.

    Args:
        settings: The settings of the plan; their seed determines the lengths.
    """
    low, high = length_range(settings)
    mean = (high - low) / np.log(high / low) if high > low else high
    number = int(STEPS * settings.rows_per_step * settings.capacity / mean) + settings.rows_per_step
    number = min(number, _MOST_DOCUMENTS)
    drawn = np.exp(np.random.default_rng(settings.seed).uniform(np.log(low), np.log(high), number))
    source = PlannedSource(path="", fingerprint="made-up lengths", num_documents=number)
    return PlanInput(sources=(source,), lengths=drawn.astype(np.uint32), spans=None)
