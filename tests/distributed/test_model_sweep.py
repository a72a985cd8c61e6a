"""Every causal and masked model type of Transformers is exact or refused before weights, and none is silently wrong."""

from __future__ import annotations

import os

import pytest
import transformers

from tests import architectures_page
from tests.distributed.harness import run_ranks
from tests.distributed.sweep_case import Outcome, run_sweep, types_of

pytestmark = [pytest.mark.timeout(3600)]
_AT_ONCE = 16


@pytest.mark.slow
def test_every_model_type_is_exact_or_refused_as_it_is_stored() -> None:
    names, found = types_of("causal_lm"), list[Outcome]()
    for first in range(0, len(names), _AT_ONCE):
        found += run_ranks(run_sweep, 4, names[first : first + _AT_ONCE], timeout_s=600)[0]
    for first in range(0, len(types_of("masked_lm")), _AT_ONCE):
        some = types_of("masked_lm")[first : first + _AT_ONCE]
        found += run_ranks(run_sweep, 4, some, "masked_lm", timeout_s=600)[0]
    if "STORE_SWEEP" in os.environ:
        architectures_page.store(found, transformers.__version__)
    wrong = [one for one in found if one.kind in ("wrong", "failed")]
    assert wrong == []
    stored = {(one["model_type"], one["variant"]): one["kind"] for one in architectures_page.load()["outcomes"]}
    new = {(one.model_type, one.variant): one.kind for one in found}
    assert new == stored, "the outcomes have changed: look at them, and store them with STORE_SWEEP=1"


def test_representatives_of_the_sweep() -> None:
    """One of each: exact, exact with windows, refused, a text part; OPT's forward calls the decoder in its decoder."""
    found = run_ranks(run_sweep, 4, ["cohere2", "opt", "mamba", "llama4"], timeout_s=120)[0]
    assert [(one.model_type, one.variant, one.kind) for one in found] == [
        ("cohere2", "default", "exact"),
        ("cohere2", "windows", "exact"),
        ("opt", "default", "exact"),
        ("mamba", "default", "refused"),
        ("llama4", "default", "composite"),
    ]
    masked = run_ranks(run_sweep, 4, ["distilbert", "deberta", "xlm-roberta"], "masked_lm", timeout_s=120)[0]
    assert [one.kind for one in masked] == ["exact", "refused", "exact"]
