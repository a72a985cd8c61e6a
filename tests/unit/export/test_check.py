"""The check says what is wrong: a model that has diverged is no fault of the export's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ray_ulysses.errors import RunError
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.export.runs import export, fields_of, write_checkpoint, write_config


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["weights", "logits"])
def test_a_model_that_has_diverged_is_called_so(tmp_path: Path, value: float) -> None:
    model = zoo_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(value)
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"]()))
    write_checkpoint(tmp_path / "run", model)
    what = "lm_head.weight" if value != value else "logits are not finite, though its weights are"
    with pytest.raises(RunError, match=what):
        export(tmp_path / "run")
    assert list((tmp_path / "run/export").iterdir()) == []
