"""A checkpoint's weights are evaluated in the requested dtype, whatever the dtype of the base model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.evaluation.model_source import find_model
from ray_ulysses.evaluation.report import ModelRequest
from tests.unit.export.runs import assert_same
from tests.unit.export.test_decoder_merge import make_run, make_whole, trained_decoder


@pytest.mark.parametrize("dtype", ["fp32", "model"])
@pytest.mark.parametrize("trained", ["bf16", "fp32"])
def test_a_multimodal_models_decoder_has_the_requested_weights(tmp_path: Path, trained: str, dtype: Any) -> None:
    decoder = trained_decoder(make_whole(tmp_path / "base", "gemma3", torch.bfloat16))
    make_run(tmp_path / "run", tmp_path / "base", decoder, dtype=trained)
    found = find_model(ModelRequest(model=tmp_path / "run", is_run=True, dtype=dtype)).build()
    masters = {name: one.detach() for name, one in decoder.named_parameters()}
    assert any((one != one.bfloat16()).any() for one in masters.values())
    kind = torch.bfloat16 if (trained, dtype) == ("bf16", "model") else torch.float32
    wanted = {name: one.to(kind) for name, one in masters.items()}
    assert_same({name: one.detach() for name, one in found.named_parameters()}, wanted)
