"""A run of stages before its workers start: planned as a whole, reported, stored, resumed and branched."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.checkpoint import CheckpointMeta
from ray_ulysses.config import Config, parse_config
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.planner.stages import stage_at
from ray_ulysses.report.plan import render_plan
from ray_ulysses.run import planning, preflight
from ray_ulysses.run.preflight import PreparedRun, check_resume, prepare_run
from ray_ulysses.run.settings import config_of_checkpoint
from ray_ulysses.trainer.loop import rate_of_step
from tests.distributed.run_case import MORE_FILES, claim_run, make_config, make_corpus

SHORT: dict[str, Any] = {"name": "short", "steps": 4, "context_tokens": 128}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("data")
    first = make_corpus(folder / "first", ("bisect.py", "cmd.py", "copy.py"))
    return str(first), str(make_corpus(folder / "more", MORE_FILES))


def stages(corpora: tuple[str, str], **last: Any) -> list[dict[str, Any]]:
    return [
        {**SHORT, "sp_size": 1, "path": corpora[0]},
        {"name": "middle", "tokens": 9000, "rope": {"rope_theta": 5e4}, "lr": 2e-3, "schedule": {"kind": "wsd"}},
        {"name": "long", "optimizer": "reset", **last},
    ]


def config_of(storage: Path, corpora: tuple[str, str], given: list[dict[str, Any]], **overrides: Any) -> Config:
    settings = {"run__stop_step": None, "data__path": None, "data__sources": [{"path": path} for path in corpora]}
    settings |= {"cluster__workers": 2, "data__context_tokens": 512, "data__rows_per_step": 4}
    return make_config(storage, Path(corpora[0]), given, **{**settings, **overrides})


def prepared(config: Config, *, branch: bool = False) -> PreparedRun:
    found = prepare_run(config, Path("/"), branch=branch)
    found.report.raise_problems()
    check_resume(found)
    return found


def ids(folder: Path) -> list[str]:
    return [segment.plan_id for segment in load_plan(folder / "run" / "plan").segments]


def test_the_plan_is_shown_before_the_run_and_kept_by_a_resume(corpora: tuple[str, str], tmp_path: Path) -> None:
    config = config_of(tmp_path, corpora, stages(corpora))
    first = prepared(config)
    claim_run(first)
    assert ids(tmp_path) == [segment.plan_id for segment in first.plan.segments] and len(first.new) == 3
    again = prepared(config)
    assert again.new == () and ids(tmp_path) == [segment.plan_id for segment in again.plan.segments]
    middle, text = first.plan.stage_start(2), " ".join(render_plan(first.report).split())
    for words in ("short 1 to 4 128", f"middle 5 to {middle} 512", "middle positions: theta 50000;"):
        assert words in text
    facts = first.report.stages
    assert [(one.row_tokens, one.sp_size, one.dp_size) for one in facts] == [(128, 1, 2), (512, 2, 1), (512, 2, 1)]
    assert [one.optimizer for one in facts] == ["kept", "kept", "reset"]
    assert facts[1].tokens >= 9000 and facts[2].steps == (middle + 1, first.plan.num_steps)
    assert facts[0].device_bytes < facts[2].device_bytes


def test_a_run_at_a_border_is_in_the_stage_that_follows(corpora: tuple[str, str], tmp_path: Path) -> None:
    config = config_of(tmp_path, corpora, stages(corpora))
    plan = prepared(config).plan
    border = plan.stage_start(2)
    found = [stage_at(config, plan, step) for step in (0, 3, 4, border, plan.num_steps)]
    assert [one.name for one in found] == ["short", "short", "middle", "long", "long"]
    assert [one.plan.num_steps for one in found] == [4, 4, border, plan.num_steps, plan.num_steps]
    assert [one.is_last for one in found] == [False, False, False, True, True]
    schedules = [(one.schedule_start, one.schedule_end(one.plan.num_steps)) for one in found]
    assert schedules == [(0, plan.num_steps)] * 2 + [(4, border)] + [(0, plan.num_steps)] * 2
    assert [one.begins_anew for one in found] == [False, False, False, True, True]
    stops = {
        stop: [
            stage_at(config_of(tmp_path, corpora, stages(corpora), run__stop_step=stop), plan, step).ends_the_run
            for step in (0, 4)
        ]
        for stop in (None, 4, 5)
    }
    assert stops == {None: [False, False], 4: [True, True], 5: [False, True]}, "with the stage that the run stops in"
    assert [one.run_last_step for one in found] == [plan.num_steps] * 3 + [None] * 2
    short = config_of(tmp_path, corpora, stages(corpora), run__stop_step=border + 1)
    assert [stage_at(short, plan, step).run_last_step for step in (0, 4, border)] == [border + 1, border + 1, None]


def test_a_checkpoint_has_the_configuration_of_its_stage(corpora: tuple[str, str], tmp_path: Path) -> None:
    config, without = config_of(tmp_path, corpora, stages(corpora)), config_of(tmp_path, corpora, [])

    def of_stage(name: str, config: Config = config) -> Config:
        meta = CheckpointMeta(sp_size=1, cursor={}, digest="0", tokens=0, extra={"stage": name} if name else {})
        return config_of_checkpoint(config, SimpleNamespace(step=4, meta=meta))

    assert of_stage("short").data.context_tokens == 128 and of_stage("middle").optimizer.lr == 2e-3
    with pytest.raises(UserError, match=r"stages: .*'other'"):
        of_stage("other")
    assert of_stage("").data.context_tokens == 128, "a branch added stages to a run without stages"
    assert of_stage("", without) is without


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the run's committed step."""

    def at(step: int) -> None:
        for module in (planning, preflight):
            monkeypatch.setattr(module, "committed_step", lambda run: step)

    return at


def dies_at_segment(monkeypatch: pytest.MonkeyPatch, number: int, command: PreparedRun) -> None:
    """Let a command die as it stores a segment of its plan."""
    write, written = planning.write_segment, []

    def dies(*arguments: Any) -> Any:
        if len(written) == number:
            raise KeyboardInterrupt
        written.append(arguments)
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(planning, "write_segment", dies)
        with pytest.raises(KeyboardInterrupt):
            claim_run(command)


def test_a_command_or_a_branch_that_died_while_it_was_stored_is_started_again(
    corpora: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_step: Callable[[int], None]
) -> None:
    config = config_of(tmp_path, corpora, stages(corpora))
    first = prepared(config)
    dies_at_segment(monkeypatch, 2, first)
    again = prepared(config)
    assert len(again.new) == 3, "it had no attempt"
    claim_run(again)
    assert ids(tmp_path) == [segment.plan_id for segment in first.plan.segments]
    at_step(2)
    given = stages(corpora, rows_per_step=2)
    given[0]["context_tokens"] = 256
    changed = config_of(tmp_path, corpora, given)
    branch = prepared(changed, branch=True)
    assert branch.branched is not None and len(branch.new) == 3
    dies_at_segment(monkeypatch, 1, branch)
    claim_run(prepared(changed, branch=True))
    assert ids(tmp_path) == [segment.plan_id for segment in branch.plan.segments]
    assert prepared(changed).new == ()


def test_other_stages_need_a_branch(corpora: tuple[str, str], tmp_path: Path, at_step: Callable[[int], None]) -> None:
    claim_run(prepared(config_of(tmp_path, corpora, stages(corpora))))
    changed = config_of(tmp_path, corpora, stages(corpora, rows_per_step=2))
    with pytest.raises(ConfigError, match=r"stages: .*2\.rows_per_step: 2.*--branch"):
        prepared(changed)
    before = ids(tmp_path)
    # The run has trained two steps of its second stage.
    at_step(6)
    branch = prepared(changed, branch=True)
    claim_run(branch)
    loaded = load_plan(tmp_path / "run" / "plan")
    assert [(one.stage_number, one.base_step) for one in loaded.segments][:3] == [(0, 0), (1, 4), (1, 6)]
    assert ids(tmp_path)[:2] == before[:2] and loaded.segments[3].settings.rows_per_step == 2
    assert any("--branch: the run's data changes after step 6" in note for note in branch.notes)
    assert prepared(changed).new == (), "it is the run's own plan now"
    given = stages(corpora, rows_per_step=2)
    given[0]["lr"] = 1e-3
    with pytest.raises(ConfigError, match=r"stages\.0: optimizer\.lr=0\.001"):
        prepared(config_of(tmp_path, corpora, given), branch=True)


@pytest.mark.parametrize("is_own", [True, False], ids=["own-schedule", "shared-schedule"])
def test_steps_before_a_branch_keep_their_learning_rate(
    corpora: tuple[str, str], tmp_path: Path, at_step: Callable[[int], None], is_own: bool
) -> None:
    schedule = {"schedule": {"kind": "cosine", "warmup_ratio": 0.1}} if is_own else {}

    def rates(steps: int, at: int | None = None) -> list[float]:
        """Store a plan, or a branch of it, whose first stage has so many steps, and return the rates of all steps."""
        given = [{"name": "first", "steps": steps, **schedule}, {"name": "last", "steps": 3}]
        config = config_of(tmp_path, corpora, given, schedule__horizon_steps=None, schedule__warmup_steps=1)
        if at is not None:
            at_step(at)
        claim_run(prepared(config, branch=at is not None))
        plan = load_plan(tmp_path / "run" / "plan")
        return [rate_of_step(stage_at(config, plan, step), step + 1) for step in range(plan.num_steps)]

    first, second, third = rates(8), rates(12, at=6), rates(10, at=9)
    assert second[:6] == first[:6] and second[6] > first[6], "what is trained again has the rate that it had"
    assert third[:9] == second[:9] and third[9] < second[9]


def test_at_a_border_the_next_stage_may_change(
    corpora: tuple[str, str], tmp_path: Path, at_step: Callable[[int], None]
) -> None:
    claim_run(prepared(config_of(tmp_path, corpora, stages(corpora))))
    before, given = ids(tmp_path), stages(corpora)
    at_step(4)
    given[1] |= {"lr": 1e-4, "rows_per_step": 2}
    changed = config_of(tmp_path, corpora, given)
    branch = prepared(changed, branch=True)
    # Another command continues the run while the branch is planned.
    at_step(5)
    with pytest.raises(UserError, match="advanced to step 5"):
        check_resume(branch)
    at_step(4)
    claim_run(prepared(changed, branch=True))
    loaded = load_plan(tmp_path / "run" / "plan")
    assert [(one.stage_number, one.base_step) for one in loaded.segments][:2] == [(0, 0), (1, 4)]
    assert len(loaded.segments) == 3 and ids(tmp_path)[0] == before[0] and ids(tmp_path)[1] != before[1]
    assert prepared(changed).new == ()
    # The length of a stage that has been trained is fixed.
    at_step(6)
    given[0]["steps"] = 5
    with pytest.raises(ConfigError, match=r"stages\.0\.steps=5"):
        prepared(config_of(tmp_path, corpora, given), branch=True)


def test_only_needed_corpora_must_exist(
    corpora: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [shutil.copytree(path, tmp_path / f"corpus-{number}") for number, path in enumerate(corpora)]
    given = [SHORT | {"path": str(paths[0])}, {"name": "long", "path": str(paths[1])}]
    config = config_of(tmp_path, corpora, given, data__sources=None)
    first = prepared(config)
    claim_run(first)
    paths[0].rename(tmp_path / "elsewhere")
    for known in (None, 3):
        monkeypatch.setattr(planning, "known_step", lambda store, known=known: known)
        with pytest.raises(UserError, match=r"corpus-0"):
            prepared(config)
    monkeypatch.setattr(planning, "known_step", lambda store: 4)
    again = prepared(config)
    assert again.new == () and [str(corpus.path) for corpus in again.corpora.corpora] == [str(paths[1])]
    # Without its corpus, a past stage's mixture is not known.
    assert [replace(one, mixture=()) for one in again.report.stages] == [
        replace(one, mixture=()) for one in first.report.stages
    ]
    paths[1].rename(tmp_path / "elsewhere too")
    with pytest.raises(UserError, match=r"corpus-1"):
        prepared(config)


def test_a_problem_of_any_stage_is_found_beforehand_and_names_it(corpora: tuple[str, str], tmp_path: Path) -> None:
    model = {
        "model_type": "gpt2", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "n_positions": 200, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    given = [SHORT, {"name": "long"}]
    config = config_of(tmp_path, corpora, given, model__config=model)
    (problem,) = prepare_run(config, Path("/")).report.problems
    assert "position table has 200 entries" in str(problem)
    with pytest.raises(UserError, match=r"stages\.0\.steps=4000"):
        prepared(config_of(tmp_path, corpora, [SHORT | {"steps": 4000}, given[1]]))
    # A stop in an early stage is no problem of the later ones.
    assert prepared(config_of(tmp_path, corpora, stages(corpora), run__stop_step=3)).last_step == 3
    late = prepare_run(config_of(tmp_path, corpora, stages(corpora), run__stop_step=9999), Path("/"))
    assert len([one for one in late.report.problems if one.path == "run.stop_step"]) == 1


def test_the_suggested_fix_for_a_stage_that_does_not_fit_works(corpora: tuple[str, str], tmp_path: Path) -> None:
    given = [SHORT, {"name": "long"}]

    def problems(gib: float, *overrides: str) -> list[str]:
        tree = config_of(tmp_path, corpora, given, memory__device_gib=gib).model_dump(mode="json", exclude_unset=True)
        report = prepare_run(parse_config(tree, overrides), Path("/")).report
        return [str(problem) for problem in report.problems]

    bytes_of = [one.device_bytes for one in prepared(config_of(tmp_path, corpora, given)).report.stages]
    gib = (bytes_of[0] + bytes_of[1]) / 2 / 2**30
    (said,) = problems(gib)
    assert "(in stage 'long')" in said
    found = re.search(r"that fit are (.*?) \(see `plan --fit`\); or use (stages\.long\.context_tokens=\d+) ", said)
    assert found is not None, said
    nearest = [one for one in shlex.split(found[1]) if one != "--set"]
    assert problems(gib, *nearest) == [] and problems(gib, found[2]) == []


def test_notes_use_the_horizon_and_checkpoints_of_each_stage(corpora: tuple[str, str], tmp_path: Path) -> None:
    def notes_of(**changes: Any) -> list[str]:
        notes = prepared(config_of(tmp_path, corpora, given, **changes)).notes
        return [note for note in notes if "warmup" in note or "saves" in note]

    given, plain = stages(corpora), {"checkpoint__every_steps": 2}
    # The stage has four steps, and the run's own schedule extends over the other stages.
    given[1]["schedule"] = {"kind": "linear", "warmup_steps": 2}
    assert notes_of(schedule__warmup_steps=5, **plain) == []
    # The end of a stage is always saved.
    notes = notes_of(checkpoint__every_steps=None, checkpoint__save_at_end=False)
    only = [("only at its end" in note, "only on demand" in note) for note in notes]
    assert only == [(True, False), (True, False), (False, True)] and notes[2].endswith("(stage long)")
    given[1]["schedule"]["warmup_steps"] = 7
    (note,) = notes_of(**plain)
    assert note.startswith("stages.1.schedule.warmup_steps=7 ") and note.endswith("(stage middle)")
