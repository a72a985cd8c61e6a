"""A run on DPO is refused, before any worker starts, until the values of its own reference model are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.reference import commit, parts_of, write_part
from ray_ulysses.engine.model_digest import model_digest
from ray_ulysses.errors import Problem
from ray_ulysses.run.preflight import prepare_run, report_run
from ray_ulysses.run.reference import reference_of
from ray_ulysses.storage.place import open_store
from tests.distributed.reference_case import stored_model
from tests.distributed.run_case import make_config
from tests.distributed.test_dpo_runs import settings_of
from tests.distributed.test_pair_runs import pair_corpus


def store_values(config: Any, path: Path) -> None:
    corpus = Corpus.open(path)
    reference = reference_of(config, corpus, model_digest(str(config.model.path)))
    store, parts = open_store(path), parts_of(corpus.lengths, 1000)
    for first, stop in parts:
        write_part(store, reference, (first, stop), np.zeros((stop - first, 2)))
    commit(store, reference, parts)


def test_a_run_needs_the_values_of_its_model_for_each_corpus(tmp_path: Path) -> None:
    path, held = pair_corpus(tmp_path / "pairs"), pair_corpus(tmp_path / "held", 1, 20)
    stored_model(tmp_path / "model")
    more = {"run__stop_step": 1, "parallel__sp_size": 1, "cluster__workers": 1, "data__validation": [str(held)]}

    def problems(**changes: Any) -> tuple[Any, list[Problem]]:
        config = make_config(tmp_path, path, **settings_of(tmp_path / "model", "dpo", **more, **changes))
        return config, list(prepare_run(config, Path("/")).report.problems)

    config, found = problems()
    assert [(one.path, one.value) for one in found] == [("data.path", str(path)), ("data.validation", str(held))]
    command = f"run `ray-ulysses reference {path} --model {tmp_path / 'model'} --dtype fp32`"
    assert found[0].hint == command
    assert [one.path for one in report_run(config, Path("/")).problems] == ["data.path", "data.validation"]

    for one in (path, held):
        store_values(config, one)
    assert problems()[1] == []
    _, found = problems(model__dtype="bf16")
    assert len(found) == 2 and "--dtype fp32" in found[0].rule
    stored_model(tmp_path / "model", seed=6)
    _, found = problems()
    assert len(found) == 2 and f"{tmp_path / 'model'} (a model with other weights)" in found[0].rule


@pytest.mark.parametrize("part_tokens", [1, 7, 10, 25, 1000])
def test_parts_cover_all_documents_once(part_tokens: int) -> None:
    lengths = np.array([3, 9, 1, 1, 30, 2])
    parts = parts_of(lengths, part_tokens)
    assert [one for first, stop in parts for one in range(first, stop)] == list(range(6))
    assert all(lengths[first : stop - 1].sum() < part_tokens for first, stop in parts)
