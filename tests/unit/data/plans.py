"""Plans in memory, including their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import Remainder, build_segment
from ray_ulysses.data.plan.rows import Pieces
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.tokenize.spans import LabelSpans
from tests.unit.data.corpora import MemoryStore


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


def memory_reader(
    lengths: Sequence[int], spans: LabelSpans | None = None, **changes: Any
) -> tuple[MemoryStore, Plan, RowReader]:
    """Plan documents in memory, by default with rows of up to 24 tokens and four rows per step."""
    settings = PlanSettings(seed=1, context_tokens=24, pad_multiple=8, rows_per_step=4)
    store = MemoryStore(lengths, spans)
    plan = build_plan(store.lengths, store.fingerprint, replace(settings, **changes), spans)
    return store, plan, RowReader(store, plan)
