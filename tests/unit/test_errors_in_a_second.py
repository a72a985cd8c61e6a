from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ray_ulysses.checkpoint.fence import claim_attempt
from ray_ulysses.errors import ConfigError
from ray_ulysses.run_names import CONFIG_FILE
from ray_ulysses.storage.local import LocalStore
from tests.distributed.run_case import make_config, make_corpus

_HEAVY = ("torch", "numba", "ray", "transformers", "mlflow", "deepspeed", "rich")
_DATA = ("numpy", "pyarrow", "obstore")
# CPU seconds of the whole process, so that a busy machine does not fail the test: about five times what a quiet one
# takes, and below what torch alone takes to import.
_BUDGET_S = 2.0
_RUN = (
    "import json, sys, time\n"
    "from ray_ulysses.cli import app, run\n"
    "code = run(app, sys.argv[2:])\n"
    "found = [name for name in json.loads(sys.argv[1]) if name in sys.modules]\n"
    "print(json.dumps([code, found, time.process_time()]))\n"
)


def refused(folder: Path, *arguments: str, unwanted: tuple[str, ...] = (*_HEAVY, *_DATA)) -> str:
    """Run a command in a process of its own, and return what it says on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(unwanted), *arguments],
        capture_output=True, text=True, timeout=120, cwd=folder, check=True,
    )  # fmt: skip
    code, imported, seconds = json.loads(done.stdout.splitlines()[-1])
    assert (code, imported) == (2, []), done.stderr
    assert seconds < _BUDGET_S
    return done.stderr


def test_a_resume_with_other_settings_is_refused_before_torch_and_ray_are_imported(tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path / "corpus")
    config.run_dir.mkdir()
    (config.run_dir / CONFIG_FILE).write_text(config.to_yaml())
    claim_attempt(LocalStore(config.run_dir), 1)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    sets = ("--set=run.seed=7", "--set=optimizer.lr=1.0")
    said = refused(tmp_path, "train", "config.yaml", *sets, unwanted=("torch", "ray", "rich"))
    assert "run.seed=7" in said and "optimizer.lr=1.0" in said


def test_too_few_gpus_on_this_machine_are_the_users_input_and_leave_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray_ulysses.cluster import session, train_job
    from ray_ulysses.commands.display import open_console
    from ray_ulysses.commands.progress import ProgressView
    from ray_ulysses.commands.train import run_texts
    from ray_ulysses.run.preflight import prepare_run

    def start(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session.ray, "init", start)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = make_config(tmp_path / "runs", make_corpus(tmp_path), cluster__gpus_per_worker=1)
    prepared = prepare_run(config, tmp_path)
    console = open_console(stderr=True)
    with (
        ProgressView(config.run_dir, name="run", console=console, log_every_steps=1, is_quiet=True) as view,
        pytest.raises(ConfigError, match=r"cluster\.gpus_per_worker=1: .*finds 0"),
    ):
        train_job.train(prepared, run_texts(prepared), view, 0.0)
    assert not (config.run_dir / CONFIG_FILE).exists()


@pytest.mark.parametrize(
    ("text", "said"), [("run:\n  name: a\n bad: 1\n", "config.yaml:3:2"), ("run: {name: 3}", "run.name=3")]
)
def test_a_wrong_file_is_refused_before_torch_and_ray_are_imported(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert said in refused(tmp_path, "train", "config.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan absent.yaml", "CONFIG='absent.yaml'"),
        ("inspect absent --verify-checkpoint newest", "--verify-checkpoint=newest"),
        ("export absent --step newest", "--step=newest"),
        ("prepare absent --out corpus --tokenizer bytes", "source=absent"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_heavy_is_imported(
    tmp_path: Path, arguments: str, said: str
) -> None:
    # `prepare` shows its phases with rich from the first second on.
    prepares = tuple(name for name in _HEAVY if name != "rich")
    unwanted = prepares if arguments.startswith("prepare") else (*_HEAVY, *_DATA)
    assert said in refused(tmp_path, *arguments.split(), unwanted=unwanted)
