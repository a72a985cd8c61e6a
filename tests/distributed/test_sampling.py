"""What a sharded model writes while it trains is what one process writes with its weights, and the training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer
from ray_ulysses.errors import ConfigError
from ray_ulysses.report.page import render_report
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.tracking.events import Sampled
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.sampling import open_sampler
from tests.breadth import fast_only
from tests.distributed.run_case import make_config, make_corpus, train
from tests.unit.export.runs import export

PROMPTS, TOKENS = ["def ", "import os\n\n\nclass"], 12
SAMPLES: dict[str, Any] = {
    "run__sample_every_steps": 4, "run__sample_prompts": PROMPTS, "run__sample_tokens": TOKENS,
}  # fmt: skip
CHANGES: dict[str, Any] = {"run__stop_step": 10, "checkpoint__every_steps": 4, "optimizer__lr": 3e-3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def written_alone(model: Any, prompt: str) -> tuple[str, int]:
    """Return the greedy continuation of one process, with a full forward for each token."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode_all([prompt])[0].tolist()
    found: list[int] = []
    while len(found) < TOKENS and found[-1:] != [256]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens + found]), use_cache=False).logits
        found.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(np.array(found)), len(found)


@pytest.mark.parametrize("ring_size", fast_only([1, 2], 2))
def test_samples_are_those_of_one_process_and_do_not_change_the_training(
    corpus: Path, tmp_path: Path, ring_size: int
) -> None:
    layout = {"parallel__sp_size": 2, "parallel__ring_size": ring_size}
    config = make_config(tmp_path / "with", corpus, **CHANGES, **SAMPLES, **layout)
    train(config)
    history = read_history(config.run_dir)
    assert [one.step for one in history.samples] == [4, 8, 10]
    for one in history.samples:
        report = export(config.run_dir, step=one.step, check=False)
        model = AutoModelForCausalLM.from_pretrained(report.out, dtype="auto").eval()
        wanted = [(prompt, *written_alone(model, prompt)) for prompt in PROMPTS]
        assert [(each.prompt, each.text, each.tokens) for each in one.samples] == wanted
    assert len({each.text for one in history.samples for each in one.samples}) > 1
    assert history.time_spent.evaluation_s >= sum(map(seconds_of, history.samples)) * 0.99
    if ring_size == 1:
        plain = make_config(tmp_path / "without", corpus, **CHANGES, **layout)
        train(plain)
        assert [one.loss for one in read_history(plain.run_dir).steps] == [one.loss for one in history.steps]
        page = render_report(config.run_dir)
        assert "<h2>Samples</h2>" in page and "<h2>Samples</h2>" not in render_report(plain.run_dir)


def seconds_of(event: Sampled) -> float:
    assert event.seconds > 0
    return event.seconds


def test_prompts_that_can_not_be_tokenized_or_fill_a_row_are_refused_before_a_worker_starts(
    corpus: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path, corpus, **(SAMPLES | {"run__sample_prompts": ["a" * 256]}))
    with pytest.raises(ConfigError, match=r"run\.sample_every_steps.*has 256 tokens, and a row has 256"):
        prepare_run(config, Path("/")).report.raise_problems()


def test_an_attempt_whose_node_can_not_read_the_tokenizer_goes_on_without_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, tmp_path / "elsewhere", **SAMPLES)
    context: Any = SimpleNamespace(
        run=SimpleNamespace(config=config, layout=None),
        rank=0,
        nodes=("node-1/10.0.0.1",),
        messenger=SimpleNamespace(broadcast=lambda value: value),
    )
    with caplog.at_level(logging.WARNING, logger="ray_ulysses"):
        assert open_sampler(context) is None
    assert "node-1/10.0.0.1 can't read the tokenizer, so this attempt takes no samples" in caplog.text
