"""The log-probabilities of a reference model: equal at every layout, and stored whole or not at all."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.reference import read_reference
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.reference import PreparedReference, ReferenceRequest, prepare_reference
from tests.distributed.harness import run_ranks, run_ranks_to_outcomes
from tests.distributed.reference_case import PART_TOKENS, compute_rank, plain_pair, reference_run, stored_model
from tests.distributed.test_pair_runs import pair_corpus


def values_of(prepared: PreparedReference) -> np.ndarray:
    found = read_reference(prepared.corpus, prepared.reference)
    assert found is not None
    return found


def files_of(corpus: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(corpus)): one.read_bytes() for one in (corpus / "reference").rglob("*") if one.is_file()
    }


@pytest.mark.parametrize(
    ("world_size", "ring_size"),
    [(1, None), (4, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 1), (2, 2), (4, 1), (4, 4)))],
)
def test_the_values_are_those_of_each_answer_alone(tmp_path: Path, world_size: int, ring_size: int | None) -> None:
    path, model = pair_corpus(tmp_path / "pairs"), stored_model(tmp_path / "model")
    prepared = reference_run(path, tmp_path / "model", world_size=world_size, ring_size=ring_size)
    assert len(prepared.parts) > 3
    with torch.no_grad():
        wanted = [plain_pair(model, prepared.corpus, one)[0].numpy() for one in range(prepared.corpus.num_documents)]
    np.testing.assert_allclose(values_of(prepared), np.stack(wanted), rtol=1e-6)


def test_a_killed_computation_continues_and_stores_the_same_bytes(tmp_path: Path) -> None:
    path = pair_corpus(tmp_path / "pairs")
    stored_model(tmp_path / "model")
    shutil.copytree(path, tmp_path / "copy")
    reference_run(tmp_path / "copy", tmp_path / "model")

    request = ReferenceRequest(corpus=str(path), model=str(tmp_path / "model"), dtype="fp32", part_tokens=PART_TOKENS)
    prepared = prepare_reference(request)
    outcomes = run_ranks_to_outcomes(compute_rank, 1, request, prepared.reference, prepared.parts, dies_after=2)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert prepared.missing() == list(prepared.parts[2:]) and not prepared.is_complete
    before = files_of(path)
    assert run_ranks(compute_rank, 1, request, prepared.reference, prepared.parts) == [len(prepared.parts) - 2]
    assert not prepared.is_complete, "absent until it is committed"
    prepared.commit()
    assert prepared.is_complete and before.items() <= files_of(path).items()
    assert files_of(path) == files_of(tmp_path / "copy")


def test_another_model_dtype_or_corpus_has_values_of_its_own(tmp_path: Path) -> None:
    path = pair_corpus(tmp_path / "pairs")
    stored_model(tmp_path / "one", seed=1)
    stored_model(tmp_path / "other", seed=2)
    first = reference_run(path, tmp_path / "one")
    other = prepare_reference(ReferenceRequest(corpus=str(path), model=str(tmp_path / "other"), dtype="fp32"))
    assert first.is_complete and not other.is_complete
    assert not prepare_reference(
        ReferenceRequest(corpus=str(path), model=str(tmp_path / "one"), dtype="bf16")
    ).is_complete
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    assert prepare_reference(
        ReferenceRequest(corpus=str(path), model=str(tmp_path / "moved"), dtype="fp32")
    ).is_complete
    (part,) = [one for one in (path / first.reference.folder).iterdir() if one.name.startswith("0000000000-")]
    part.write_bytes(part.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(UserError, match=r"0000000000-.*can't be used.*ray-ulysses reference"):
        values_of(first)
    assert Corpus.open(path).num_documents == first.corpus.num_documents
