from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ray_ulysses.cluster.reference_job import run_reference
from ray_ulysses.data.corpus.reference import read_reference
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.reference import ReferenceRequest, prepare_reference
from tests.distributed.reference_case import plain_pair, stored_model
from tests.distributed.test_pair_runs import pair_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def test_groups_of_processes_compute_all_parts_and_a_model_that_changes_is_refused(
    cluster: None, tmp_path: Path
) -> None:
    path, model = pair_corpus(tmp_path / "pairs", num_pairs=20), stored_model(tmp_path / "model")
    request = ReferenceRequest(corpus=str(path), model=str(tmp_path / "model"), dtype="fp32", part_tokens=1500)
    prepared, said = prepare_reference(request), list[str]()
    assert len(prepared.parts) == 2, "each is a group's"
    run_reference(prepared, None, said.append)
    values = read_reference(prepared.corpus, prepared.reference)
    assert values is not None and said[-1].endswith(f"{len(prepared.parts)} of {len(prepared.parts)} parts are stored")
    with torch.no_grad():
        for document in range(prepared.corpus.num_documents):
            wanted = plain_pair(model, prepared.corpus, document)[0].numpy()
            np.testing.assert_allclose(values[document], wanted, rtol=1e-6)

    other = prepare_reference(ReferenceRequest(corpus=str(path), model=str(tmp_path / "model"), dtype="bf16"))
    stored_model(tmp_path / "model", seed=6)
    with pytest.raises(UserError, match="reads another corpus or model"):
        run_reference(other, None, said.append)
    assert not other.is_complete
