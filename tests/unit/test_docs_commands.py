"""Every command in README.md and docs/ is one that exists, with options that it takes.

That they do what is said is seen by `tests/cluster/test_docs_story.py`, which runs them one after another.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import tomllib
from importlib import import_module
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement

from benchmarks.runner import Benchmark
from ray_ulysses.cli import app
from tests.docs_commands import PAGES, ROOT, Command, commands, languages

_COMMANDS = tuple(command for page in PAGES for command in commands(page))
_PROGRAM: Any = typer.main.get_command(app)
_SHELL = ("export ", "source .venv/bin/activate", "cd ", "git clone ", "cat ", "ls ", "mkdir ", "kill ")


def _of(*words: str) -> list[Any]:
    found = [command for command in _COMMANDS if shlex.split(command.text)[: len(words)] == list(words)]
    return [pytest.param(command, id=str(command)) for command in found]


def parse(arguments: list[str]) -> None:
    _PROGRAM.commands[arguments[0]].make_context(arguments[0], arguments[1:])


def test_every_block_says_what_it_is_and_every_command_is_of_a_known_kind() -> None:
    assert [page.name for page in PAGES if "" in languages(page) or "bash" in languages(page)] == []
    assert len(_COMMANDS) > 15
    ours = ("ray-ulysses ", "ray job submit ", "make ", "pip install ", "mlflow ui ", "torchrun ")
    known = (*ours, "python -m benchmarks.", "ray up ", "ray start ", "kubectl apply ", "docker build ", *_SHELL)
    assert [str(command) for command in _COMMANDS if not command.text.startswith(known)] == []


@pytest.mark.parametrize("command", _of("ray-ulysses"))
def test_a_command_of_ours_exists_with_its_options_and_files(command: Command) -> None:
    arguments = shlex.split(command.text)[1:]
    parse([word for word in arguments if word != "&"])
    assert [word for word in arguments if word.startswith("configs/") and not (ROOT / word).is_file()] == []
    if arguments[0] == "train" and "README" in str(command):
        words = [shlex.split(one.text) for one in commands(ROOT / "README.md")]
        (prepared,) = (line for line in words if line[:2] == ["ray-ulysses", "prepare"])
        trained = yaml.safe_load((ROOT / arguments[1]).read_text(encoding="utf-8"))["data"]["path"]
        assert trained == prepared[prepared.index("--out") + 1]


@pytest.mark.parametrize("command", _of("python", "-m"))
def test_a_benchmark_of_the_docs_is_there(command: Command) -> None:
    module = import_module(shlex.split(command.text)[2])
    assert isinstance(module.BENCHMARK, Benchmark)


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


@pytest.mark.parametrize("command", _of("pip", "install"))
def test_what_pip_is_asked_for_exists(command: Command) -> None:
    words = shlex.split(command.text)[2:]
    asked = [word for number, word in enumerate(words) if not word.startswith("-") and words[number - 1] != "-c"]
    assert (ROOT / words[words.index("-c") + 1]).read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in asked:
        if word.startswith("."):
            assert set(re.findall(r"[\w-]+", word)) <= set(project["optional-dependencies"])
        else:
            assert Requirement(word).name
