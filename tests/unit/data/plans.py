"""Plans in memory, pieces and all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import Remainder, build_segment
from ray_ulysses.data.plan.rows import Pieces
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.tokenize.spans import LabelSpans


def segment_in_memory(documents: PlanInput, settings: PlanSettings, remainder: Remainder | None = None) -> Segment:
    blocks: list[Pieces] = []
    segment = build_segment(documents, settings, remainder, take_pieces=blocks.append)
    return replace(segment, train=replace(segment.train, all_pieces=Pieces.join(blocks)))


def build_plan(
    lengths: NDArray[np.integer], fingerprint: str, settings: PlanSettings, spans: LabelSpans | None = None
) -> Plan:
    """Plan one corpus."""
    source = PlannedSource(path="", fingerprint=fingerprint, num_documents=int(lengths.size))
    return Plan(segments=(segment_in_memory(PlanInput(sources=(source,), lengths=lengths, spans=spans), settings),))
