"""A newcomer's first hour, as docs/migrating.md shows it: from a configuration of Axolotl to an exported model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ray_ulysses.tracking.events import Evaluated
from ray_ulysses.tracking.history import read_history
from tests.docs_commands import ROOT
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
_SCRIPT = ROOT / "examples/axolotl/run.sh"


def commands_in(text: str, prompt: str) -> list[str]:
    return re.findall(rf"^{prompt}(ray-ulysses .*)$", text, re.MULTILINE)


@pytest.mark.slow
def test_a_configuration_of_axolotl_becomes_an_exported_model(tmp_path: Path) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", _SCRIPT], cwd=tmp_path, env={**os.environ, "PATH": tools, "RAY_ADDRESS": ""},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    history = read_history(tmp_path / "outputs/tiny-sft")
    # max_steps, eval_steps and the random model's loss, ln 258.
    assert (history.status, history.step) == ("finished", 10)
    evaluated = [one.step for one in read_events(tmp_path / "outputs/tiny-sft") if isinstance(one, Evaluated)]
    assert evaluated == [0, 5, 10]
    assert history.steps[-1].loss < history.steps[0].loss - 0.5 and 5 < history.steps[0].loss < 6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = torch.tensor([tokenizer("def main():")["input_ids"]])
    assert model(ids, labels=ids).loss < 6


def test_the_page_shows_the_commands_of_the_script() -> None:
    page = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    shown = commands_in(page.partition("## The first hour\n")[2], r"\$ ")
    assert shown == commands_in(_SCRIPT.read_text(encoding="utf-8"), "") != []
