"""The check says what is wrong: a model that has diverged is no fault of the export's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ray_ulysses.errors import RunError
from ray_ulysses.export.export_run import export_run
from ray_ulysses.export.report import ExportRequest
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.export.runs import fields_of, write_checkpoint, write_config


@pytest.mark.parametrize("value", [float("nan"), 1e38], ids=["weights", "logits"])
def test_a_model_that_has_diverged_is_called_so(tmp_path: Path, value: float) -> None:
    model = zoo_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(value)
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"]()))
    write_checkpoint(tmp_path / "run", model)
    request = ExportRequest(run_dir=tmp_path / "run")
    with pytest.raises(RunError) as error:
        export_run(request, lambda line: None)
    where = "nor 1 of its weights (lm_head.weight)" if value != value else "though its weights are"
    assert str(error.value) == (
        f"the export failed its check: the live model's logits are not finite, {where}: the run had diverged by that "
        "step. Nothing was published; export an earlier step with --step, or this one with --no-check"
    )
    assert list((tmp_path / "run/export").iterdir()) == []
