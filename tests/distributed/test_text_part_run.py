"""A run of the text decoder of a multimodal checkpoint: trained, resumed on other workers, and put back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.tracking.history import read_history
from tests.distributed.run_case import SMALL_FILES, make_config, make_corpus, train
from tests.unit.attention.multimodal import multimodal_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_a_decoder_is_trained_resumed_and_exported_into_its_whole(tmp_path: Path) -> None:
    whole = multimodal_model("qwen2_5_vl", vocab_size=264)
    whole.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    model = {"model__init": "pretrained", "model__path": str(tmp_path / "base"), "model__part": "text"}
    corpus = make_corpus(tmp_path, SMALL_FILES)

    def trained(workers: int, sp_size: int, stop: int, session: str) -> tuple[str, int]:
        split = {"cluster__workers": workers, "parallel__sp_size": sp_size, "run__stop_step": stop}
        config = make_config(tmp_path, corpus, model__config=None, checkpoint__every_steps=2, **model, **split)
        return train(config, session)

    assert trained(2, 2, 2, "first") == ("finished", 2)
    assert trained(1, 1, 4, "second") == ("finished", 4)
    history = read_history(tmp_path / "run")
    assert [step.step for step in history.steps] == [1, 2, 3, 4]
    assert [attempt.first_step for attempt in history.attempts] == [1, 3]

    assert run_cli(app, ["export", str(tmp_path / "run")]) == 0
    out = tmp_path / "run/export/step-00000004"
    before = dict(whole.named_parameters())
    for name, parameter in AutoModelForMultimodalLM.from_pretrained(out).named_parameters():
        is_new = name.startswith(("model.language_model.", "lm_head."))
        assert torch.equal(parameter, before[name]) != is_new, name
