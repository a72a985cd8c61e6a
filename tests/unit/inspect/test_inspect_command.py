"""Output and exit codes of `inspect`; docs/journal.md is up to date and documents the output of `inspect --json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.run_names import flight_record_key, memory_snapshot_key, profile_key
from tests.journal_page import PAGE, render_journal
from tests.unit.inspect.runs import SETTINGS, Run, make_run
from tests.unit.inspect.saved import cut, flip, make_folder, save, shard

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


def test_text_and_json_contain_the_plan(inspect: Inspect, run: Run, corpus: Path) -> None:
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
        *("rows_consumed", "data_digest", "lost_steps", "goodput", "time_spent"),
        *("damaged_records", "missing_steps", "evaluation", "samples", "failure", "plan", "diagnostics"),
    }
    assert fields["plan"][0]["sources"] == [{"path": str(corpus), "weight": None}]


def test_diagnostic_files_are_listed(inspect: Inspect, run: Run) -> None:
    run.trained(3)
    assert "diagnostics" not in inspect(run.folder)[1]
    keys = [profile_key(1, 2, 0), memory_snapshot_key(1, 3, 5), *(flight_record_key(2, rank) for rank in range(2))]
    for key in keys:
        (run.folder / key).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / key).write_bytes(b"")
    _, out, _ = inspect(run.folder)
    assert "\ndiagnostics\n" in out and all(f"  {key}\n" in out for key in keys)
    assert sorted(json.loads(inspect(run.folder, "--json")[1])["diagnostics"]) == sorted(keys)


def test_a_row_is_printed_as_text_and_as_json(inspect: Inspect, run: Run) -> None:
    run.trained(3)
    code, out, _ = inspect(run.folder, "--row", 2)
    assert code == 0
    assert out.startswith("row 2 of run 'demo'\n  trained     step 1 of attempt 1\n")
    assert ".txt" in out and "piece 0: tokens" in out
    assert "piece 0: tokens" not in inspect(run.folder, "--row", 2, "--text", "none")[1]
    code, out, _ = inspect(run.folder, "--row", 2, "--json", "--text", "full")
    fields = json.loads(out)
    assert (fields["row"], fields["planned_step"], fields["trained"]) == (2, 1, [{"step": 1, "attempt": 1}])
    assert {piece["text"]["left_out"] for piece in fields["pieces"]} == {0}


def test_verify_exits_with_0_for_a_correct_run(inspect: Inspect, run: Run, tmp_path: Path, corpus: Path) -> None:
    run.trained(4, finished=True)
    run.checkpoint(4)
    code, out, err = inspect(run.folder, "--verify")
    assert (code, err) == (0, "")
    assert out.startswith("run 'demo' (finished): every planned row up to step 4 of 27 was trained on once, with")
    code, out, _ = inspect(run.folder, "--verify", "--no-read", "--json")
    fields = json.loads(out)
    assert (code, fields["holds"], fields["reading"], fields["findings"]) == (0, True, None, [])
    other = make_run(tmp_path / "other", [corpus])
    other.trained(4)
    code, out, _ = inspect(run.folder, "--verify", other.folder)
    assert code == 0
    assert "trained the same rows and tokens in all 4 steps" in out


def test_verify_exits_with_1_on_a_finding(inspect: Inspect, run: Run, tmp_path: Path, corpus: Path) -> None:
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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 10 and 20."""
    store = make_folder(tmp_path / "saved")
    for step in (10, 20):
        save(store, step)
    return tmp_path / "saved"


def test_checkpoints_are_listed_as_text_and_as_json(inspect: Inspect, saved: Path) -> None:
    cut(shard(saved, 20), 5)
    code, out, err = inspect(saved, "--checkpoints")
    assert (code, err) == (0, "")
    assert out.startswith("run 'saved': 1 checkpoint with files of the right size, 1 damaged\n")
    assert "  resumes  from step 10" in out
    assert "step 20, DAMAGED: attempt-0001/rank-00001-of-00002.safetensors has" in out
    code, out, _ = inspect(saved, "--checkpoints", "--json")
    fields = json.loads(out)
    assert (code, fields["resumes_from"]) == (0, 10)
    found = [(one["step"], one["condition"], one["kept"]) for one in fields["checkpoints"]]
    assert found == [(10, "whole", ["last 3"]), (20, "damaged", ["last 3"])]


def test_a_checkpoint_is_verified_and_damage_exits_with_1(inspect: Inspect, saved: Path) -> None:
    flip(shard(saved, 20), 5000)
    code, out, err = inspect(saved, "--verify-checkpoint", 10)
    assert (code, err) == (0, "")
    assert out.startswith("checkpoint of step 10 of run 'saved': whole\n")
    code, out, _ = inspect(saved, "--verify-checkpoint", 20)
    assert code == 1
    assert "rank-00001-of-00002.safetensors: the checksum of fp32/weight is wrong (bytes " in out
    code, out, _ = inspect(saved, "--verify-checkpoint", 20, "--json")
    fields = json.loads(out)
    assert (code, fields["whole"], fields["files"][0]["problem"]) == (1, False, None)
    assert inspect(saved, "--verify-checkpoint", "latest")[0] == 1, "the newest is the damaged one"
    code, out, err = inspect(saved, "--verify-checkpoint", 30)
    assert (code, out) == (2, "")
    assert "no checkpoint of step 30 is committed" in err


def test_an_unreadable_journal_exits_with_1(inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_folder(tmp_path / "saved"), 10)
    (tmp_path / "saved/journal/attempt-0001.jsonl").touch()

    denied = PermissionError(13, "Permission denied", str(tmp_path / "saved/journal/attempt-0001.jsonl"))
    monkeypatch.setattr("ray_ulysses.tracking.journal_files.open_regular", Mock(side_effect=denied))
    for arguments in ((), ("--checkpoints",)):
        code, out, err = inspect(tmp_path / "saved", *arguments)
        assert (code, out) == (1, "")
        assert err == f"error: {tmp_path}/saved/journal/attempt-0001.jsonl: Permission denied\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--row", "0", "--checkpoints"), "--row and --checkpoints: use only one of these options"),
        (("--verify-checkpoint", "x"), "--verify-checkpoint=x: must be the step of a committed checkpoint, or latest"),
        (("--row", "99999"), "--row=99999: the plan"),
        (("--row", "0", "--text", "some"), "'some' is not one of 'cut', 'full', 'none'"),
        (("--text", "full"), "--text=full: applies only to --row"),
        (("--no-read",), "--no-read: applies only to --verify"),
        (("--corpus", "x"), "--corpus=x: applies only to --row and --verify"),
        (("elsewhere",), "comparing two runs requires --verify"),
        (("--verify", "elsewhere"), "OTHER='elsewhere' is not a run directory"),
        (("--verify", "--corpus", "nowhere"), "--corpus nowhere: data.path=nowhere: does not exist"),
        (("--row", "0", "--corpus", "nowhere"), "--corpus nowhere: data.path=nowhere: does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_exits_with_2_and_advice(inspect: Inspect, run: Run, arguments: tuple[str, ...], said: str) -> None:
    run.trained(2)
    code, out, err = inspect(run.folder, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_missing_run_or_plan_exits_with_2(inspect: Inspect, tmp_path: Path) -> None:
    for arguments in ((), ("--verify",), ("--row", 0)):
        code, _, err = inspect(tmp_path, *arguments)
        assert code == 2 and "is not a run directory" in err
    (tmp_path / "journal").mkdir()
    assert inspect(tmp_path)[0] == 0
    for arguments in (("--verify",), ("--row", 0)):
        code, _, err = inspect(tmp_path, *arguments)
        assert code == 2 and "has no data plan yet" in err


_PAGE = PAGE.read_text(encoding="utf-8")


def _documented(section: str) -> dict[str, bool]:
    """Return the fields of a section's table, and whether each may be missing."""
    parts = re.split(r"^#{2,4} (.*)$", _PAGE, flags=re.MULTILINE)
    sections = dict(zip((title.strip("`") for title in parts[1::2]), parts[2::2], strict=True))
    rows = re.findall(r"^\| `(\w+)`(°?) \|", sections[section], flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)), f"{section}: a field stands twice"
    return {name: bool(mark) for name, mark in rows}


def test_the_committed_page_is_up_to_date() -> None:
    assert render_journal() == _PAGE, "run `make docs`"


def test_the_page_reads_lines_as_the_journal_writes_them(run: Run) -> None:
    code = re.findall(r"```python\n(.*?)```", _PAGE, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code[0], namespace)
    run.trained(3)
    lines = (run.folder / "journal/attempt-0001.jsonl").read_bytes().splitlines(keepends=True)
    (example,) = re.findall(r'^\{"crc32".*\n', _PAGE, flags=re.MULTILINE)
    for line in [*lines, example.encode()]:
        assert namespace["read_line"](line)["attempt"] == 1
        assert namespace["read_line"](line.replace(b'"attempt": 1', b'"attempt": 2')) is None


def test_the_page_has_the_fields_of_inspect(inspect: Inspect, run: Run) -> None:
    failed = {"event": "run_failed", "session": "s", "reason": "lost worker 1", "restarts": False}
    evaluated = {"event": "evaluation", "step": 3, "loss": "nan", "tokens": 8}
    run.attempt([run.started(), *run.steps(1, 3), evaluated, run.committed(3), failed])
    (run.folder / "checkpoints/step-00000003").mkdir(parents=True)
    (run.folder / "checkpoints/step-00000003/manifest.json").write_text("{}")
    code, out, _ = inspect(run.folder, "--json")
    found = json.loads(out)
    assert code == 0
    assert {name for name, optional in _documented("The run").items() if not optional} == set(found)
    (segment,) = found["plan"]
    parts = {
        **{f"{name}[]": found[name][0] for name in ("steps", "attempts", "checkpoints", "plan")},
        **{name: found[name] for name in ("time_spent", "evaluation", "failure")},
        "time_spent.starts": found["time_spent"]["starts"],
        "plan[].sources[]": segment["sources"][0],
    }
    assert list(found["time_spent"]["recovery"]) == list(found["time_spent"]["starts"])
    for section, part in parts.items():
        assert list(_documented(section)) == list(part), section
