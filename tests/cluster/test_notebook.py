"""The notebook of examples/ runs from its first cell to its last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.notebook import execute, load, store

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_notebook_prepares_plans_trains_generates_and_exports(
    tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = load()
    left = execute(notebook)
    assert left["report"].problems == ()
    history = left["result"].history
    assert (history.status, history.step) == ("finished", 30)
    losses = [step.loss for step in history.steps]
    assert losses[-1] < losses[0] - 2
    assert left["model"].num_parameters() == 438_912
    assert str(tmp_path) not in str(notebook)
    if os.environ.get("STORE_NOTEBOOK"):
        store(notebook)
