"""The average of the last checkpoints is the fp32 mean of their master weights, and only of one model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.errors import UserError
from ray_ulysses.export.directory import read_record
from ray_ulysses.run_names import shard_file, step_folder
from ray_ulysses.storage import LocalStore
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.export.runs import export, fields_of, tensors_in, write_checkpoint, write_config


def models(count: int, architecture: str = "llama") -> list[Any]:
    found = []
    for number in range(count):
        model = zoo_model(architecture)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        found.append(model)
    return found


@pytest.mark.parametrize(("trained", "published"), [("fp32", "model"), ("bf16", "model")])
def test_the_average_is_the_mean_of_the_masters_at_any_world_size(tmp_path: Path, trained: str, published: Any) -> None:
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"]()), trained)
    states = [dict(model.named_parameters()) for model in models(4)]
    for step, model in enumerate(models(4), 1):
        write_checkpoint(tmp_path / "run", model, dtype=trained, step=step, world_size=step)
    report = export(tmp_path / "run", average=3, weights=published)
    assert report.averaged_steps == (2, 3, 4) and report.step == 4 and report.check is not None
    kind = torch.bfloat16 if (trained, published) == ("bf16", "model") else torch.float32
    for name, tensor in tensors_in(Path(report.out)).items():
        total = torch.zeros_like(states[0][name])
        for state in states[1:]:
            total += state[name].detach()
        assert torch.equal(tensor, (total / 3).to(kind)), name
    record = read_record(Path(report.out))
    assert record is not None and record.identity.average == 3
    assert "mean of the checkpoints of steps 2, 3, 4" in (Path(report.out) / "README.md").read_text()
    assert export(tmp_path / "run", average=3, weights=published).was_there
    with pytest.raises(UserError, match="it averages 3 checkpoints"):
        export(tmp_path / "run", weights=published)
    # An earlier step averages the checkpoints before it.
    assert export(tmp_path / "run", average=2, step=3, out=tmp_path / "hf").averaged_steps == (2, 3)


def test_checkpoints_that_do_not_belong_together_are_not_averaged(tmp_path: Path) -> None:
    write_config(run := tmp_path / "run", fields_of(ARCHITECTURES["llama"]()))
    (model,) = models(1)
    write_checkpoint(run, model, step=1, cursor={"next_row": 1, "plan_id": "a"})
    write_checkpoint(run, models(1, "qwen3")[0], step=2, cursor={"next_row": 1, "plan_id": "a"})
    # A step whose save has failed has no manifest.
    LocalStore(run).create(f"{step_folder(0)}/{shard_file(1, 0, 1)}", [b"half a save"])
    with pytest.raises(UserError, match=r"--average=3: the run has 2 committed .* \(of steps 1, 2\); use a smaller"):
        export(run, average=3)
    for step, plan, stage in ((3, "a", ""), (4, "b", ""), (5, "b", "long")):
        extra = {"stage": stage} if stage else {}
        write_checkpoint(run, model, step=step, cursor={"next_row": 1, "plan_id": plan}, extra=extra)
    reasons = {3: "they contain different models", 4: "the data plan was changed between them"}
    for step, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            export(run, average=2, step=step)
