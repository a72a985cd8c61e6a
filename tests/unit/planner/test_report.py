"""The report of `plan` holds what the run will do, and every problem at once."""

import json
from dataclasses import replace
from fnmatch import fnmatch
from types import SimpleNamespace

import numpy as np
import pytest

from ray_ulysses.data.plan.corpus_set import plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import build_segment
from ray_ulysses.data.plan.stages import remainder_after
from ray_ulysses.data.tokenize.encoding import EncodingInfo
from ray_ulysses.errors import ConfigError
from ray_ulysses.planner.notes import plan_notes
from ray_ulysses.planner.report import PlanReport, build_report
from tests.unit.data.plans import segment_in_memory
from tests.unit.planner.runs import MODEL, make_config, make_corpus, make_plan, make_shape


def report_of(config, corpus) -> PlanReport:
    return build_report(config, make_shape(config), corpus, make_plan(config, corpus))


def test_a_sound_run_has_its_numbers_and_no_problem():
    report = report_of(make_config(), make_corpus([64, 64, 100, 1, 30]))
    assert report.problems == ()
    report.raise_problems()
    assert (report.layout.world_size, report.layout.sp_size, report.layout.dp_size) == (4, 2, 2)
    assert report.layout.valid_sp_sizes == (1, 2, 4)
    assert report.layout.level_world_sizes == (2, 4, 8)
    assert report.layout.largest_world_size == 8
    assert report.corpus.longest_document == 100
    assert report.data.skipped_documents == 1
    assert report.data.split_documents == 1
    assert report.data.num_steps == -(-report.data.num_rows // 4)
    assert report.data.stop_step == report.data.num_steps
    assert 0 < report.data.fill <= 1
    assert report.data.flops_per_step > 0


def test_all_problems_come_at_once():
    config = make_config({**MODEL, "vocab_size": 200}, run={"stop_step": 1000}, memory={"device_gib": 0.001})
    report = report_of(config, make_corpus([64] * 9))
    assert [problem.path for problem in report.problems] == ["data.path", "run.stop_step", "memory.device_gib"]
    with pytest.raises(ConfigError, match="run 'demo': 3 problems"):
        report.raise_problems()


def test_only_allowed_sp_sizes_are_offered():
    config = make_config(parallel={"sp_size": 2, "allowed_sp": [1, 2]})
    assert report_of(config, make_corpus([64] * 9)).layout.valid_sp_sizes == (1, 2)


@pytest.mark.parametrize(
    ("parallel", "split", "heads"),
    [
        ({"sp_size": 2}, (2, 1, True), [2, 2]),
        ({"sp_size": 3}, (3, 1, True), [1, 1, 2]),
        ({"sp_size": 12}, (4, 3, True), [1, 1, 1, 1]),
        ({"sp_size": 4, "ring_size": 2}, (2, 2, False), [2, 2]),
    ],
    ids=str,
)
def test_the_split_of_a_row_and_the_heads_of_a_rank_are_said(parallel, split, heads):
    config = make_config(parallel=parallel, cluster={"workers": parallel["sp_size"]})
    layout = report_of(config, make_corpus([64] * 9)).layout
    assert (layout.ulysses_size, layout.ring_size, layout.ring_is_chosen) == split
    assert [rank.num_heads for rank in layout.heads.ranks] == heads


def test_a_ring_that_can_not_be_is_a_problem_and_the_report_is_still_made():
    config = make_config(parallel={"sp_size": 8, "ring_size": 1}, cluster={"workers": 8})
    report = report_of(config, make_corpus([64] * 9))
    assert [problem.path for problem in report.problems] == ["parallel.ring_size"]
    assert json.dumps(report.to_json())


def test_idle_turns_are_noted():
    config = make_config(cluster={"workers": 6})
    (note,) = report_of(config, make_corpus([64] * 9)).notes
    assert note == (
        "3 data-parallel groups do not divide data.rows_per_step=4: 2 of 6 row slots per step are idle; "
        "the loss is the same"
    )


def test_a_warm_up_that_never_ends_is_noted():
    config = make_config(schedule={"warmup_steps": 100})
    (note,) = report_of(config, make_corpus([64] * 9)).notes
    assert note.startswith("schedule.warmup_steps=100 reaches the horizon of 3 steps")


def test_an_estimated_model_is_noted():
    config = make_config({**MODEL, "model_type": "olmo2"})
    (note,) = report_of(config, make_corpus([64] * 9)).notes
    assert note == "the parameter count of model_type 'olmo2' is an estimate"


def test_a_start_that_is_ignored_is_noted():
    config = make_config(model={"resume_state": "weights"})
    (note,) = report_of(config, make_corpus([64] * 9)).notes
    assert note == (
        "model.resume_state=weights is ignored, since model.resume_from is null: the run starts from what "
        "model.init=random gives"
    )
    config = make_config(model={"resume_state": "weights", "resume_from": "runs/other"})
    assert report_of(config, make_corpus([64] * 9)).notes == ()


def test_corpora_whose_documents_begin_or_end_differently_are_noted():
    (plain,) = make_corpus([64] * 9).corpora
    encodings = {
        "/bos": EncodingInfo(bos_token_id=1, eos_token_id=256),
        "/none": EncodingInfo(bos_token_id=None, eos_token_id=None),
    }
    corpora = [SimpleNamespace(folder=name, info=replace(plain.info, encoding=encoding))
               for name, encoding in encodings.items()]  # fmt: skip
    config = make_config()
    shape = make_shape(config)
    assert plan_notes(config, shape, None, corpora) == (
        "documents begin differently: those of /bos with token 1 and those of /none with no token. If that is not "
        "meant, prepare them alike (prepare --bos)",
        "documents end differently: those of /bos with token 256 and those of /none with no token. If that is not "
        "meant, prepare them alike (prepare --eos)",
    )
    assert plan_notes(config, shape, None, [corpora[1], corpora[1]]) == ()


def test_corpora_whose_conversations_other_templates_wrote_are_noted():
    (plain,) = make_corpus([64] * 9).corpora
    corpora = []
    for name, template in {"/a": "{{ 1 }}", "/old": None, "/same": "{{ 1 }}", "/b": "{{ 2 }}"}.items():
        encoding = EncodingInfo(bos_token_id=None, eos_token_id=256, num_chats=1, chat_template=template)
        corpora.append(SimpleNamespace(folder=name, info=replace(plain.info, encoding=encoding)))
    config = make_config()
    shape = make_shape(config)
    assert plan_notes(config, shape, None, corpora) == (
        "conversations of /a and /b were written by different chat templates, and an export publishes the first alone. "
        "If that is not meant, prepare them alike (prepare --chat-template)",
    )
    assert plan_notes(config, shape, None, corpora[:3]) == ()


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({"every_steps": None, "save_at_end": False}, "every_steps=null and * the run saves only on demand"),
        (
            {"every_steps": None},
            "every_steps=null and * the run saves only at its end, and a failure before that loses",
        ),
        ({"every_steps": 9, "save_at_end": False}, "every_steps=9 and * up to step 3: the run saves only on demand"),
        ({"every_steps": None, "every_minutes": 5.0, "save_at_end": False}, None),
        ({"every_steps": 3, "save_at_end": False}, None),
    ],
    ids=["never", "at-the-end", "beyond-the-end", "minutes", "steps"],
)
def test_a_run_that_does_not_save_by_itself_is_noted(checkpoint, said):
    notes = report_of(make_config(checkpoint=checkpoint), make_corpus([64] * 9)).notes
    assert [fnmatch(note, f"checkpoint.{said}*") for note in notes] == ([True] if said else [])


@pytest.mark.parametrize(
    ("evaluation", "every", "said"),
    [
        (
            3,
            2,
            "run.eval_every_steps=3 and checkpoint.every_steps=2 fall on one step every 6 steps: checkpoint.keep_*",
        ),
        (2, None, "run.eval_every_steps=2 and checkpoint.every_steps=null fall on one step only by chance: *"),
        (1, 3, None),
        (3, 1, None),
    ],
)
def test_the_best_of_few_that_are_evaluated_is_noted(evaluation, every, said):
    config = make_config(
        run={"eval_every_steps": evaluation},
        data={"eval_fraction": 0.2},
        checkpoint={"keep_best": 1, "every_steps": every, "every_minutes": 5.0},
    )
    notes = report_of(config, make_corpus([64] * 9)).notes
    assert [fnmatch(note, said or "") for note in notes] == ([True] if said else [])


@pytest.mark.parametrize(
    ("low", "high", "packing", "number", "advice"),
    [
        (0.34, 0.66, "best_fit", 20_000, "wide_fit"),
        (0.34, 0.66, "wide_fit", 20_000, None),
        (0.55, 0.9, "best_fit", 20_000, "concat"),
        (0.55, 0.9, "wide_fit", 20_000, "concat"),
        (0.55, 0.9, "best_fit", 40, "concat"),
        (0.55, 0.9, "concat", 20_000, None),
        (0.55, 0.9, "none", 20_000, "best_fit"),
        (0.01, 0.02, "best_fit", 20_000, None),
    ],
)
def test_rows_that_are_poorly_filled_are_noted_for_every_packing(low, high, packing, number, advice):
    config = make_config(data={"context_tokens": 1024, "packing": packing, "balance_steps": 16})
    corpus = make_corpus(np.random.default_rng(0).integers(int(low * 1024), int(high * 1024), number).tolist())
    settings = replace(make_plan(config, corpus).settings, packing=packing)
    plan = Plan(segments=(build_segment(plan_input(corpus), settings),))
    notes = [note for note in build_report(config, make_shape(config), corpus, plan).notes if "data.packing" in note]
    assert len(notes) == (advice is not None)
    if advice is not None:
        empty = f"data.packing={packing} leaves {1 - plan.newest.fill:.1%} of the rows empty"
        assert notes[0].startswith(empty) and advice in notes[0].removeprefix(empty)


def test_steps_that_exchanged_rows_would_balance_are_noted():
    config = make_config(data={"context_tokens": 1024})
    corpus = make_corpus([1024, *[64] * 16] * 500)
    plan = make_plan(config, corpus)
    (note,) = build_report(config, make_shape(config), corpus, plan).notes
    now = plan.newest.step_times(2).imbalance
    level = {
        steps: Plan(segments=(build_segment(plan_input(corpus), replace(plan.settings, balance_steps=steps)),))
        for steps in (4, 16, 64)
    }
    then = {steps: one.newest.step_times(2).imbalance for steps, one in level.items()}
    least = next(steps for steps in then if then[steps] - 1 <= (now - 1) / 2)
    assert note == (
        f"data.balance_steps=1: with 2 data-parallel groups, steps take {now:.2f}x the time of perfectly balanced "
        f"ranks; data.balance_steps={least} makes it {then[least]:.2f}x"
    )
    assert build_report(config, make_shape(config), corpus, level[least]).notes == ()


def test_the_report_is_json():
    fields = json.loads(json.dumps(report_of(make_config(), make_corpus([64] * 9)).to_json()))
    assert fields["shape"]["num_parameters"] > 0
    assert fields["memory"]["device_bytes"] > 0
    assert fields["problems"] == []


def test_a_branch_says_where_the_horizon_of_the_learning_rate_moves():
    config, corpora = make_config(), make_corpus([64] * 40)
    plan = make_plan(config, corpora)
    documents = plan_input(corpora)
    longer = replace(plan.settings, epochs=2)
    remainder = remainder_after(Plan(segments=(in_memory(documents, plan),)), 4, corpora.sources, longer)
    branched = Plan(segments=(*plan.segments, build_segment(documents, longer, remainder)))
    (note,) = build_report(config, make_shape(config), corpora, branched).notes
    assert note == (
        f"schedule.horizon_steps is null, so the learning rate's horizon moves from step 10 to {branched.num_steps} at "
        "step 4, and the rate jumps with it"
    )
    assert build_report(config, make_shape(config), corpora, branched).data.base_step == 4


def in_memory(documents, plan):
    return segment_in_memory(documents, plan.settings)
