"""An evaluation gives the same numbers whatever the number of processes that share its rows."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from tests.apart import worst
from tests.breadth import fast_only
from tests.distributed.evaluation_case import VOCAB, Measured, measure_all
from tests.distributed.harness import run_ranks
from tests.result_table import ResultTable
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.data.corpora import text_corpus, varied_texts

FAST = ["llama", "gemma2", "granite", "qwen3"]
"""Plain, soft-capped, scaled and tied output heads."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("held"), varied_texts(12, longest=3000)).path


def difference(one: Measured, other: Measured) -> float:
    assert one.cells == other.cells and one.correct == other.correct
    assert [found.tokens for found in one.by_position.bins] == [found.tokens for found in other.by_position.bins]
    losses = [
        [measured.by_position.loss, *chain(*((found.loss, found.gain) for found in measured.gain.contexts))]
        for measured in (one, other)
    ]
    return worst(abs(first - second) for first, second in zip(*losses, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("sp_size", fast_only([2, 4], 2))
def test_the_numbers_are_those_of_one_process(corpus: Path, sp_size: int) -> None:
    cases = [(name, 1) for name in FAST]
    ranks = run_ranks(measure_all, sp_size, corpus, cases, timeout_s=150)
    (alone,) = run_ranks(measure_all, 1, corpus, cases, timeout_s=150)
    for found in ranks:
        for name, one, other in zip(FAST, alone, found, strict=True):
            assert difference(one, other) <= 1e-6, name
            assert one.correct > 0, name


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_every_architecture_and_layout(corpus: Path, result_table: ResultTable) -> None:
    # Its second embedding has a vocabulary of its own.
    names = [name for name in ARCHITECTURES if name != "gemma4_text"]
    (alone,) = run_ranks(measure_all, 1, corpus, [(name, 1) for name in names], timeout_s=1200)
    errors = []
    for sp_size, ring_size in ((2, 1), (2, 2), (4, 1), (4, 2)):
        found = run_ranks(measure_all, sp_size, corpus, [(name, ring_size) for name in names], timeout_s=1200)[0]
        for name, one, other in zip(names, alone, found, strict=True):
            error = difference(one, other)
            errors.append(error)
            result_table.add(
                {
                    "architecture": name,
                    "sp size": str(sp_size),
                    "ring": str(ring_size),
                    "loss": f"{one.by_position.loss:.6f}",
                    "largest difference to one process, nats": f"{error:.1e}",
                }
            )
    result_table.write("evaluation", "Evaluation over several processes against one, fp32")
    assert worst(errors) <= 1e-6


@pytest.mark.slow
@pytest.mark.distributed
def test_the_command_starts_the_processes_and_prints_the_same_numbers(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo_model("llama", vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    # What DeepSpeed says while the model is saved.
    capsys.readouterr()
    printed = []
    for size in ("1", "2"):
        arguments = ["evaluate", str(tmp_path / "model"), "--data", str(corpus), "--lengths", "900", "--depths", "1"]
        arguments += ["--cases", "1", "--max-tokens", "3000", "--out", str(tmp_path / size), "--json"]
        assert run(app, [*arguments, "--sp-size", size]) == 0
        printed.append(json.loads(capsys.readouterr().out))
        assert json.loads((tmp_path / size / "evaluation.json").read_text()) == printed[-1]
    one, two = printed
    assert (one["sp_size"], two["sp_size"]) == (1, 2)
    assert one["position_loss"]["loss"] == pytest.approx(two["position_loss"]["loss"], abs=1e-6)
    assert one["retrieval"] == two["retrieval"]
