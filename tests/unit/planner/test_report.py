"""The report of `plan`: sizes, all problems at once, and notes."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_ulysses.config import Config
from ray_ulysses.data.plan.corpus_set import CorpusSet, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import build_segment
from ray_ulysses.data.plan.stages import remainder_after
from ray_ulysses.data.tokenize.encoding import EncodingInfo
from ray_ulysses.errors import ConfigError
from ray_ulysses.planner.notes import plan_notes
from ray_ulysses.planner.report import PlanReport, build_report
from tests.unit.data.plans import segment_in_memory
from tests.unit.planner.runs import MODEL, make_config, make_corpus, make_plan, make_shape


def report_of(config: Config, corpora: CorpusSet | None = None, plan: Plan | None = None) -> PlanReport:
    corpora = corpora or make_corpus([64] * 9)
    return build_report(config, make_shape(config), corpora, plan or make_plan(config, corpora))


def replanned(corpora: CorpusSet, plan: Plan, **settings: Any) -> Plan:
    return Plan(segments=(build_segment(plan_input(corpora), replace(plan.settings, **settings)),))


def test_a_sound_run_has_its_numbers_and_no_problem() -> None:
    report = report_of(make_config(), make_corpus([64, 64, 100, 1, 30]))
    assert report.problems == ()
    report.raise_problems()
    layout, data = report.layout, report.data
    assert (layout.world_size, layout.sp_size, layout.dp_size) == (4, 2, 2)
    assert (layout.valid_sp_sizes, layout.level_world_sizes, layout.largest_world_size) == ((1, 2, 4), (2, 4, 8), 8)
    assert report.corpus.longest_document == 100
    assert (data.skipped_documents, data.split_documents) == (1, 1)
    assert data.num_steps == data.stop_step == -(-data.num_rows // 4)
    assert 0 < data.fill <= 1 and data.flops_per_step > 0
    fields = json.loads(json.dumps(report.to_json()))
    assert fields["memory"]["device_bytes"] > 0 and fields["problems"] == []


def test_all_problems_come_at_once() -> None:
    report = report_of(make_config({**MODEL, "vocab_size": 200}, run={"stop_step": 1000}, memory={"device_gib": 0.001}))
    assert [problem.path for problem in report.problems] == ["data.path", "run.stop_step", "memory.device_gib"]
    with pytest.raises(ConfigError, match="3 problems"):
        report.raise_problems()
    # The report is built although the layout is impossible.
    report = report_of(make_config(parallel={"sp_size": 8, "ring_size": 1}, cluster={"workers": 8}))
    assert [problem.path for problem in report.problems] == ["parallel.ring_size"] and json.dumps(report.to_json())


@pytest.mark.parametrize(
    ("parallel", "split", "heads"),
    [
        ({"sp_size": 3}, (3, 1, True), [1, 1, 2]),
        ({"sp_size": 12}, (4, 3, True), [1, 1, 1, 1]),
        ({"sp_size": 4, "ring_size": 2}, (2, 2, False), [2, 2]),
    ],
)
def test_the_split_of_a_row_and_the_heads_of_a_rank_are_reported(
    parallel: dict[str, int], split: tuple[int, int, bool], heads: list[int]
) -> None:
    layout = report_of(make_config(parallel=parallel, cluster={"workers": parallel["sp_size"]})).layout
    assert (layout.ulysses_size, layout.ring_size, layout.ring_is_chosen) == split
    assert [rank.num_heads for rank in layout.heads.ranks] == heads


def best_of(evaluation: int, every: int | None) -> dict[str, Any]:
    return {
        "run": {"eval_every_steps": evaluation},
        "data": {"eval_fraction": 0.2},
        "checkpoint": {"keep_best": 1, "every_steps": every, "every_minutes": 5.0},
    }


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"cluster": {"workers": 6}}, "data.rows_per_step=4 is not a multiple of the 3 *: 2 of 6 row slots *"),
        ({"schedule": {"warmup_steps": 100}}, "schedule.warmup_steps=100 is not below the schedule's 3 steps*"),
        ({"memory": {"zero_secondary": "node"}}, "memory.zero_secondary=node has no effect*4 workers are on one node*"),
        ({"memory": {"zero_secondary": "node"}, "cluster": {"workers": 4, "gpus_per_node": 2}}, None),
        ({"model": {"resume_state": "weights"}}, "model.resume_state=weights has no effect*model.init=random*"),
        ({"model": {"resume_state": "weights", "resume_from": "runs/other"}}, None),
        ({"checkpoint": {"every_steps": None, "save_at_end": False}}, "checkpoint.every_steps=null*only on demand*"),
        ({"checkpoint": {"every_steps": None}}, "checkpoint.every_steps=null*only at its end*"),
        ({"checkpoint": {"every_steps": 9, "save_at_end": False}}, "checkpoint.every_steps=9*step 3:*only on demand*"),
        ({"checkpoint": {"every_steps": None, "every_minutes": 5.0, "save_at_end": False}}, None),
        ({"checkpoint": {"every_steps": 3, "save_at_end": False}}, None),
        (best_of(3, 2), "run.eval_every_steps=3 and checkpoint.every_steps=2 *every 6 steps*"),
        (best_of(2, None), "run.eval_every_steps=2 and checkpoint.every_steps=null *only by chance*"),
        (best_of(1, 3), None),
        (best_of(3, 1), None),
    ],
)
def test_a_valid_setting_that_may_be_unintended_is_noted(changes: dict[str, Any], note: str | None) -> None:
    notes = report_of(make_config(**changes)).notes
    assert len(notes) == (note is not None) and all(fnmatch(one, note or "") for one in notes)


BYTES: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 256}


def encoding_notes(**encodings: dict[str, Any]) -> tuple[str, ...]:
    (plain,) = make_corpus([64] * 9).corpora
    corpora: Any = [
        SimpleNamespace(folder=f"/{name}", info=replace(plain.info, encoding=EncodingInfo(**BYTES | fields)))
        for name, fields in encodings.items()
    ]
    config = make_config()
    return plan_notes(config, make_shape(config), None, corpora)


def test_corpora_with_different_start_or_end_tokens_are_noted() -> None:
    begin, end = encoding_notes(bos={"bos_token_id": 1}, none={"eos_token_id": None})
    assert all(text in begin for text in ("/bos with token 1", "in /none with no token", "same --bos"))
    assert all(text in end for text in ("/bos with token 256", "/none with no token", "same --eos"))
    assert encoding_notes(one={}, other={}) == ()


def test_corpora_with_different_chat_templates_are_noted() -> None:
    one, same, other = ({"num_chats": 1, "chat_template": text} for text in ("{{ 1 }}", "{{ 1 }}", "{{ 2 }}"))
    (note,) = encoding_notes(a=one, old={"num_chats": 1}, same=same, b=other)
    assert "/a and /b were rendered with different chat templates" in note
    assert encoding_notes(a=one, old={"num_chats": 1}, same=same) == ()


@pytest.mark.parametrize(
    ("low", "high", "packing", "number", "advice"),
    [
        (0.34, 0.66, "best_fit", 20_000, "wide_fit"),
        (0.34, 0.66, "wide_fit", 20_000, None),
        (0.55, 0.9, "best_fit", 40, "concat"),
        (0.55, 0.9, "concat", 20_000, None),
        (0.55, 0.9, "none", 20_000, "best_fit"),
        (0.01, 0.02, "best_fit", 20_000, None),
    ],
)
def test_poorly_filled_rows_are_noted_for_every_packing(
    low: float, high: float, packing: str, number: int, advice: str | None
) -> None:
    config = make_config(data={"context_tokens": 1024, "packing": packing, "balance_steps": 16})
    corpora = make_corpus(np.random.default_rng(0).integers(int(low * 1024), int(high * 1024), number).tolist())
    plan = replanned(corpora, make_plan(config, corpora), packing=packing)
    notes = [note for note in report_of(config, corpora, plan).notes if "data.packing" in note]
    assert len(notes) == (advice is not None)
    if advice is not None:
        empty = f"data.packing={packing} leaves {1 - plan.newest.fill:.1%} of the rows empty"
        assert notes[0].startswith(empty) and advice in notes[0].removeprefix(empty)


def test_steps_that_balancing_would_speed_up_are_noted() -> None:
    config = make_config(data={"context_tokens": 1024, "balance_steps": 1})
    corpora = make_corpus([1024, *[64] * 16] * 500)
    plan = make_plan(config, corpora)
    level = {steps: replanned(corpora, plan, balance_steps=steps) for steps in (4, 16, 64)}
    now = plan.newest.step_times(2).imbalance
    then = {steps: one.newest.step_times(2).imbalance for steps, one in level.items()}
    least = next(steps for steps in then if then[steps] - 1 <= (now - 1) / 2)
    (note,) = report_of(config, corpora, plan).notes
    assert f"{now:.2f}x" in note and f"data.balance_steps={least}, they take {then[least]:.2f}x" in note
    assert report_of(config, corpora, level[least]).notes == ()


def test_steps_of_too_few_micro_batches_are_noted() -> None:
    config = make_config(data={"context_tokens": 1024, "rows_per_step": 2})
    corpora = make_corpus([1024, *[64] * 16] * 500)
    plan = make_plan(config, corpora)
    (note,) = report_of(config, corpora, plan).notes
    then = replanned(corpora, plan, rows_per_step=8).newest.step_times(2).imbalance
    assert note.startswith("data.rows_per_step=2:") and note.endswith(
        f"with data.rows_per_step=8, they take {then:.2f}x"
    )


def test_a_branch_that_moves_the_end_of_the_schedule_is_noted() -> None:
    config, corpora = make_config(), make_corpus([64] * 40)
    plan, documents = make_plan(config, corpora), plan_input(corpora)
    longer = replace(plan.settings, epochs=2)
    stored = Plan(segments=(segment_in_memory(documents, plan.settings),))
    remainder = remainder_after(stored, 4, corpora.sources, longer)
    branched = Plan(segments=(*plan.segments, build_segment(documents, longer, remainder)))
    report = report_of(config, corpora, branched)
    assert [fnmatch(one, f"*at step 4 *from step 10 to {branched.num_steps},*") for one in report.notes] == [True]
    assert report.data.base_step == 4
