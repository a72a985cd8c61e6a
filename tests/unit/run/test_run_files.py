"""What describes a run, in its directory and in its tracker."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.run.run_files import RunTexts, describe_run, describing_files


def test_what_is_there_is_handed_on_without_passwords(tmp_path: Path) -> None:
    assert describing_files(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("tracking:\n  uri: http://me:secret@mlflow:5000\n")
    describe_run(tmp_path, RunTexts(plan="plan of run 'demo'", readme="# demo\n", facts={"name": "demo"}))
    assert describing_files(tmp_path) == {
        "README.md": "# demo\n",
        "config.yaml": "tracking:\n  uri: http://***@mlflow:5000\n",
        "plan.txt": "plan of run 'demo'\n",
    }
    (tmp_path / "plan.txt").write_bytes(b"\xff")
    assert set(describing_files(tmp_path)) == {"README.md", "config.yaml"}
