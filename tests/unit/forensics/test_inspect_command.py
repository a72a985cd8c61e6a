"""``ray-ulysses inspect`` on the command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from tests.unit.forensics.runs import SETTINGS, Run, make_run

Inspect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Runs the command; returns exit code, standard output and standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run_command(app, ["inspect", *(str(argument) for argument in arguments)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return call


def test_the_plan_stands_in_text_and_json_beside_what_was_there_before(
    inspect: Inspect, run: Run, corpus: Path
) -> None:
    run.trained(5)
    run.branch(5, replace(SETTINGS, rows_per_step=3), [corpus])
    code, out, _ = inspect(run.folder)
    assert code == 0
    assert f"0  {run.plan.segments[0].plan_id}" in out and f"1  {run.plan.plan_id}" in out
    code, out, _ = inspect(run.folder, "--json")
    fields = json.loads(out)
    assert [(segment["segment"], segment["base_step"]) for segment in fields["plan"]] == [(0, 0), (1, 5)]
    assert set(fields) == {
        *("name", "status", "step", "tokens", "steps", "attempts", "checkpoints"),
        *("rows_consumed", "data_digest", "lost_steps", "goodput", "plan"),
    }
    assert fields["plan"][0]["sources"] == [{"path": str(corpus), "weight": None}]


def test_a_row_is_printed_as_text_and_as_json(inspect: Inspect, run: Run) -> None:
    run.trained(3)
    code, out, _ = inspect(run.folder, "--row", 2)
    assert code == 0
    assert out.startswith("row 2 of run 'demo'\n  trained      step 1 of attempt 1\n")
    assert ".txt" in out and "piece 0: tokens" in out
    assert "piece 0: tokens" not in inspect(run.folder, "--row", 2, "--text", "none")[1]
    code, out, _ = inspect(run.folder, "--row", 2, "--json", "--text", "full")
    fields = json.loads(out)
    assert (fields["row"], fields["planned_step"], fields["trained"]) == (2, 1, [{"step": 1, "attempt": 1}])
    assert {piece["text"]["left_out"] for piece in fields["pieces"]} == {0}


def test_verify_exits_with_0_where_all_holds(inspect: Inspect, run: Run, tmp_path: Path, corpus: Path) -> None:
    run.trained(4, finished=True)
    run.checkpoint(4)
    code, out, err = inspect(run.folder, "--verify")
    assert (code, err) == (0, "")
    assert out.startswith("run 'demo' (finished): every planned row was trained on once, with the tokens")
    code, out, _ = inspect(run.folder, "--verify", "--no-read", "--json")
    fields = json.loads(out)
    assert (code, fields["holds"], fields["reading"], fields["findings"]) == (0, True, None, [])
    other = make_run(tmp_path / "other", [corpus])
    other.trained(4)
    code, out, _ = inspect(run.folder, "--verify", other.folder)
    assert code == 0
    assert "trained the same rows and tokens in all its 4 steps" in out


def test_verify_exits_with_1_where_something_does_not(inspect: Inspect, run: Run, tmp_path: Path, corpus: Path) -> None:
    wrong = run.step(2, digest="00000000000000ff")
    run.attempt([run.started(), run.step(1), wrong, run.step(3)])
    code, out, _ = inspect(run.folder, "--verify")
    assert code == 1
    assert "DOES NOT HOLD: 1 finding" in out and "digest: step 2 of attempt 1, rows 4 to 7" in out
    code, out, _ = inspect(run.folder, "--verify", "--json")
    fields = json.loads(out)
    assert code == 1
    assert [(finding["kind"], finding["step"]) for finding in fields["findings"]] == [("digest", 2)]
    assert fields["reading"]["digest"] == f"{run.sum(3):016x}" != fields["data_digest"]
    other = make_run(tmp_path / "other", [corpus])
    other.trained(3)
    code, out, _ = inspect(other.folder, "--verify", run.folder, "--no-read")
    assert code == 1
    assert f"{run.folder} differs from step 2 on" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--row", "99999"), "--row=99999: the plan"),
        (("--row", "0", "--verify"), "ask one at a time"),
        (("--row", "0", "--text", "some"), "--text=some: must be one of cut, full, none"),
        (("--text", "full"), "--text=full: goes with --row"),
        (("--no-read",), "--no-read: goes with --verify"),
        (("--corpus", "x"), "--corpus=x: goes with --row or --verify"),
        (("elsewhere",), "goes with --verify, which compares the two"),
        (("--verify", "elsewhere"), "OTHER='elsewhere': is no run directory"),
        (("--verify", "--corpus", "nowhere"), "--corpus nowhere: data.path=nowhere: does not exist"),
        (("--row", "0", "--corpus", "nowhere"), "--corpus nowhere: data.path=nowhere: does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_exits_with_2_and_says_the_way_out(
    inspect: Inspect, run: Run, arguments: tuple[str, ...], said: str
) -> None:
    run.trained(2)
    code, out, err = inspect(run.folder, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_run_that_is_none_or_has_no_plan_exits_with_2(inspect: Inspect, tmp_path: Path) -> None:
    for arguments in ((), ("--verify",), ("--row", 0)):
        code, _, err = inspect(tmp_path, *arguments)
        assert code == 2 and "is no run directory" in err
    (tmp_path / "journal").mkdir()
    assert inspect(tmp_path)[0] == 0
    for arguments in (("--verify",), ("--row", 0)):
        code, _, err = inspect(tmp_path, *arguments)
        assert code == 2 and "has no data plan yet" in err
