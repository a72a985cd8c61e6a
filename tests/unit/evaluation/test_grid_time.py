"""The retrieval grid of a small model is a matter of a minute on two cores."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.cli import app, run
from tests.unit.data.corpora import text_corpus, varied_texts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_grid_of_a_model_of_two_million_parameters_takes_less_than_a_minute_of_two_cores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In time of the CPU, of which a busy machine gives only a part."""
    config = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    assert 1.6e6 < model.num_parameters() < 1.8e6
    model.save_pretrained(tmp_path / "model")
    corpus = text_corpus(tmp_path / "held", varied_texts(30, longest=9000)).path
    capsys.readouterr()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    started, wall = time.process_time(), time.monotonic()
    try:
        arguments = [str(tmp_path / "model"), "--data", str(corpus), "--task", "retrieval"]
        assert run(app, ["evaluate", *arguments, "--out", str(tmp_path / "out"), "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    taken_s, wall_s = time.process_time() - started, time.monotonic() - wall
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"] == [1024, 4096, 8192] and len(found["retrieval"]) == 3 * 3 * 5
    print(f"{taken_s:.0f} s of the CPU, {wall_s:.0f} s on the clock")
    assert taken_s <= 2 * 60
