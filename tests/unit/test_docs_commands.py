"""Every command in README.md and docs/ is one that exists, with options that it takes.

That they do what is said is seen by `tests/cluster/test_docs_story.py`, which runs them one after another.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement

from ray_ulysses.cli import app
from tests.docs_commands import PAGES, ROOT, Command, commands, languages

_COMMANDS = tuple(command for page in PAGES for command in commands(page))
_PROGRAM: Any = typer.main.get_command(app)
_SHELL = ("export ", "source .venv/bin/activate", "cd ", "git clone ", "cat ", "ls ", "mkdir ", "kill ")


def _of(*words: str) -> list[Any]:
    found = [command for command in _COMMANDS if shlex.split(command.text)[: len(words)] == list(words)]
    return [pytest.param(command, id=str(command)) for command in found]


def parse(arguments: list[str]) -> None:
    """Let the command line read its arguments, and run nothing."""
    _PROGRAM.commands[arguments[0]].make_context(arguments[0], arguments[1:])


def test_every_block_says_what_it_is_and_every_command_is_of_a_known_kind() -> None:
    assert [page.name for page in PAGES if "" in languages(page) or "bash" in languages(page)] == []
    assert len(_COMMANDS) > 15
    ours = ("ray-ulysses ", "ray job submit ", "make ", "pip install ", "mlflow ui ", "torchrun ")
    known = (*ours, "ray up ", "ray start ", "kubectl apply ", "docker build ", *_SHELL)
    assert [str(command) for command in _COMMANDS if not command.text.startswith(known)] == []


@pytest.mark.parametrize("command", _of("ray-ulysses"))
def test_a_command_of_ours_exists_with_its_options_and_files(command: Command) -> None:
    arguments = shlex.split(command.text)[1:]
    parse([word for word in arguments if word != "&"])
    assert [word for word in arguments if word.startswith("configs/") and not (ROOT / word).is_file()] == []


@pytest.mark.parametrize("command", _of("ray", "job", "submit"))
def test_a_submitted_job_has_its_working_directory_and_an_entry_point_that_exists(command: Command) -> None:
    from ray.dashboard.modules.job.cli import submit

    arguments = shlex.split(command.text)[3:]
    options, entry = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parsed = submit.make_context("submit", [*options, "--", *entry])
    assert parsed.params["working_dir"] == "."
    assert entry[0] == "python"
    file = ROOT / entry[1]
    called = re.search(r'main\(\["(\w+)"', file.read_text(encoding="utf-8"))
    assert called is not None
    parse([called[1], *entry[2:]])


@pytest.mark.parametrize("command", [*_of("ray", "up"), *_of("kubectl", "apply"), *_of("docker", "build")])
def test_what_a_cluster_is_made_of_is_there(command: Command) -> None:
    words = shlex.split(command.text)
    options = dict(itertools.pairwise(words))
    places = [word for word in words if word.startswith("infra/")]
    assert places and [place for place in places if not (ROOT / place).exists()] == []
    if "-k" in options:
        assert (ROOT / options["-k"] / "kustomization.yaml").is_file()


@pytest.mark.parametrize("command", _of("ray", "start"))
def test_ray_start_takes_its_options(command: Command) -> None:
    from ray.scripts.scripts import start

    start.make_context("start", shlex.split(command.text)[2:])


@pytest.mark.parametrize("command", _of("make"))
def test_a_target_of_make_exists(command: Command) -> None:
    # Not to be mistaken for a sub-make by the one that may run this test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", *shlex.split(command.text)[1:]],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", _of("torchrun"))
def test_torchrun_takes_its_options_and_the_loop_is_there(command: Command) -> None:
    from torch.distributed.run import parse_args

    parsed = parse_args(shlex.split(command.text)[1:])
    assert (ROOT / parsed.training_script).is_file()
    assert parsed.training_script_args == ["--sp-size", "2"]


@pytest.mark.parametrize("command", _of("mlflow", "ui"))
def test_mlflow_takes_its_options(command: Command) -> None:
    from mlflow.cli import cli

    group: Any = cli
    name, *options = shlex.split(command.text)[1:]
    group.get_command(None, name).make_context(name, options)


def test_the_corpus_that_readme_prepares_is_the_one_that_it_trains_on() -> None:
    words = [shlex.split(command.text) for command in commands(ROOT / "README.md")]
    (prepared,) = (line for line in words if line[:2] == ["ray-ulysses", "prepare"])
    trained = {line[2] for line in words if line[:2] == ["ray-ulysses", "train"]}
    named = {yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["data"]["path"] for file in trained}
    assert named == {prepared[prepared.index("--out") + 1]}


def _extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def test_what_the_gpu_extra_installs_is_imported() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "ray_ulysses").rglob("*.py")))
    imported = set(re.findall(r"""import_module\("(\w+)|^\s*(?:import|from) (\w+)""", source, re.MULTILINE))
    names = {name for pair in imported for name in pair}
    assert {"flash_attn", "torch"} <= names
    assert [name for name in map(_module, _extras()["gpu"]) if name not in names] == []


def _module(requirement: str) -> str:
    return Requirement(requirement).name.replace("-", "_")


@pytest.mark.parametrize("command", _of("pip", "install"))
def test_what_pip_is_asked_for_exists(command: Command) -> None:
    words = shlex.split(command.text)[2:]
    asked = [word for number, word in enumerate(words) if not word.startswith("-") and words[number - 1] != "-c"]
    constraints = (ROOT / words[words.index("-c") + 1]).read_text(encoding="utf-8")
    for word in asked:
        if word.startswith("."):
            assert set(re.findall(r"[\w-]+", word)) <= set(_extras())
        else:
            assert Requirement(word).name
            assert constraints


def test_flash_attn_comes_after_torch_and_is_built_against_it() -> None:
    """Its setup imports torch, which a build in isolation does not have."""
    lines = [command.text for command in commands(ROOT / "docs/start.md") if command.text.startswith("pip install")]
    gpu = next(number for number, line in enumerate(lines) if "[gpu]" in line)
    assert "--no-build-isolation" in lines[gpu]
    assert lines[0].startswith("pip install . "), "brings torch"
    tools = set(shlex.split(" ".join(lines[1:gpu])))
    assert {"setuptools", "wheel", "ninja", "packaging", "psutil"} <= tools, "what flash-attn's setup imports"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gpu_install_is_resolved(tmp_path: Path) -> None:
    """Resolved by pip, not built: flash-attn is asked for its metadata alone, which runs its setup against torch."""
    report = tmp_path / "report.json"
    command = next(one.text for one in commands(ROOT / "docs/start.md") if "[gpu]" in one.text)
    words = [*shlex.split(command)[1:], "--dry-run", "--quiet", "--report", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
    )  # fmt: skip
    if "Failed to establish a new connection" in done.stderr or "No matching distribution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    found = {item["metadata"]["name"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]}
    assert {"flash_attn", "ray-ulysses"} <= found
