"""``ray-ulysses evaluate`` measures how often a model prefers the chosen answers of held-out pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from ray_ulysses.cli import app, run
from ray_ulysses.evaluation.held_out import held_out_documents
from tests.unit.attention.models import zoo_model
from tests.unit.data.test_pairs import prepared
from tests.unit.evaluation.test_evaluate_command import Told, make_trained

PAIRS = [("why is the sky blue?", "light scatters", "paint"), ("what barks?", "a dog", "the old cat of the house")] * 6
VOCAB = 320


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"prompt": f"{number}. {prompt}", "chosen": chosen * (1 + number % 3), "rejected": rejected}
        for number, (prompt, chosen, rejected) in enumerate(PAIRS)
    ]
    return prepared(tmp_path_factory.mktemp("pairs"), rows, prompt="prompt").path


@pytest.mark.parametrize("sp_size", [1, 2])
def test_the_accuracy_is_that_of_the_answers_log_probabilities(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sp_size: int
) -> None:
    make_trained(tmp_path / "run")
    given = ("--data", pairs, "--sp-size", sp_size, "--lengths", "900", "--max-tokens", "100000")
    found = Told(capsys).json(tmp_path / "run", *given, "--json")

    model = zoo_model("llama", vocab_size=VOCAB)
    summed, averaged, margins = 0, 0, []
    held = held_out_documents(pairs, None)
    for place in range(held.numbers.size):
        scores = []
        for text in held.pair(place):
            tokens = torch.from_numpy(text.tokens)
            with torch.no_grad():
                log_probs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            own = log_probs.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(text.is_scored)[1:]]
            scores.append((float(own.sum()), float(own.mean())))
        summed += scores[0][0] > scores[1][0]
        averaged += scores[0][1] > scores[1][1]
        margins.append(scores[0][1] - scores[1][1])
    bins = found["preference"]["bins"]
    assert sum(one["pairs"] for one in bins) == len(PAIRS) == len(margins)
    assert sum(one["summed"] for one in bins) == summed
    assert sum(one["averaged"] for one in bins) == averaged
    assert 0 < summed < len(PAIRS), "an accuracy of 0 or 1 would not test the order of the answers"
    assert sum(one["margin_sum"] for one in bins) == pytest.approx(math.fsum(margins), abs=1e-4)
    assert found["position_loss"] is None and not found["retrieval"]


def test_people_see_the_accuracy_and_the_reason_why_nothing_else_is_measured(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tmp_path / "run")
    told = Told(capsys)
    printed = told(tmp_path / "run", "--data", pairs, "--lengths", "900")
    assert "how often the chosen answer has the larger log-probability" in printed
    written = next((tmp_path / "run" / "evaluation").rglob("evaluation.json"))
    assert json.loads(written.read_text())["preference"]["bins"]
    assert "needs texts" in told(tmp_path / "run", "--data", pairs, "--task", "retrieval", code=2)


def test_pairs_that_are_longer_than_the_length_are_left_out(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tmp_path / "run")
    assert run(app, ["evaluate", str(tmp_path / "run"), "--data", str(pairs), "--lengths", "40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < sum(one["pairs"] for one in found["preference"]["bins"]) < len(PAIRS)
