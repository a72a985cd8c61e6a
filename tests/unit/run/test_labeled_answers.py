"""Labeled answers are for KTO alone, and KTO is for labeled answers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.run.preflight import prepare_run
from tests.distributed.reference_case import stored_model
from tests.distributed.run_case import make_config
from tests.distributed.test_dpo_runs import settings_of
from tests.distributed.test_kto_runs import labeled_corpus
from tests.distributed.test_pair_runs import pair_corpus


@pytest.mark.parametrize(
    ("kind", "data", "hint"),
    [
        ("kto", "pairs", "--completion-field and --label-field"),
        ("dpo", "answers", "set objective.kind: kto"),
        ("next_token", "answers", "for example to kto"),
        ("classification", "answers", "for example to kto"),
        ("kto", "answers", "ray-ulysses reference"),
    ],
)
def test_answers_fit_the_objective(tmp_path: Path, kind: str, data: str, hint: str) -> None:
    path = (labeled_corpus if data == "answers" else pair_corpus)(tmp_path / "corpus")
    stored_model(tmp_path / "model")
    settings = settings_of(tmp_path / "model", kind, parallel__sp_size=1, cluster__workers=1, data__eval_fraction=0.2)
    if kind in ("next_token", "classification"):
        del settings["objective__beta"]
    found = prepare_run(make_config(tmp_path, path, **settings), Path("/")).report.problems
    assert [one.path for one in found if hint in one.hint] == ["data.path"]
