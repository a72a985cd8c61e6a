"""ZeRO-3's trace of module calls is the same on all ranks whatever their rows hold: otherwise they wait forever."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.trace_case import MICRO_BATCHES, TraceCase, traced_calls

pytestmark = pytest.mark.distributed

CALLED_BY_TOKEN = [
    TraceCase(architecture="qwen3_next"),
    TraceCase(architecture="llama", calls_by_token=True),
]
KEPT_AND_CALLED_BY_TOKEN = [TraceCase(architecture="qwen3_next", kept="both")]
OTHERS = [
    TraceCase(architecture="lfm2_moe", kept="both"),
    TraceCase(architecture="gpt_oss", kept="none"),
    TraceCase(architecture="granitemoehybrid"),
    TraceCase(architecture="lfm2"),
    TraceCase(architecture="nemotron_h", kept="kernel"),
    TraceCase(architecture="falcon_h1"),
    TraceCase(architecture="zamba2", kept="none"),
]


@pytest.mark.parametrize(
    "cases",
    [
        CALLED_BY_TOKEN,
        pytest.param(KEPT_AND_CALLED_BY_TOKEN, marks=pytest.mark.slow),
        pytest.param(OTHERS, marks=pytest.mark.slow),
    ],
    ids=["called by token", "kept and called by token", "others"],
)
def test_ranks_with_other_documents_experts_and_labels_trace_the_same_calls(cases: list[TraceCase]) -> None:
    by_rank = run_ranks(traced_calls, 4, cases, timeout_s=200)
    for place, case in enumerate(cases):
        traced = [calls for found in by_rank for calls in found[place].traced]
        assert len(traced) == 4 * MICRO_BATCHES
        assert all(calls == traced[0] for calls in traced), case
        assert "forward lm_head" in traced[0] and "backward lm_head" in traced[0]
    for place, case in enumerate([] if cases is OTHERS else cases):
        # What is not traced differs, so that the test could fail: experts call their activation if they have a token.
        assert len({tuple(found[place].untraced) for found in by_rank}) > 1, case
