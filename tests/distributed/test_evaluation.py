"""An evaluation gives the same numbers whatever the number of processes that share its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses
from ray_ulysses.cli import app, run
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer
from ray_ulysses.evaluation.held_out import held_out_documents
from ray_ulysses.evaluation.held_out_loss import context_gain, position_loss
from ray_ulysses.evaluation.needles import Haystack, retrieval_cells
from ray_ulysses.evaluation.report import KINDS, ContextGain, PositionLoss, RetrievalCell
from ray_ulysses.evaluation.scoring import Passage, PassageScores, score_passages
from tests.apart import worst
from tests.distributed.harness import run_ranks
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.data.corpora import text_corpus, varied_texts

VOCAB = 320
FAST = ("gemma2", "qwen3")
"""Soft-capped and tied output heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    by_position: PositionLoss
    gain: ContextGain
    cells: tuple[RetrievalCell, ...]
    correct: int
    """Tokens of all texts that were the most probable ones."""


def measure_all(rank: int, world_size: int, corpus: Path, names: list[str], ring_size: int = 1) -> list[Measured]:
    mesh = SequenceMesh.from_group(dist.group.WORLD if world_size > 1 else None, ring_size=ring_size)
    return [_measure(mesh, corpus, name) for name in names]


def _measure(mesh: SequenceMesh, corpus: Path, architecture: str) -> Measured:
    model = apply_ulysses(zoo_model(architecture, vocab_size=VOCAB, max_position_embeddings=1024).eval(), mesh)
    held, correct = held_out_documents(corpus, None), 0

    def score(passages: Iterator[Passage]) -> Iterator[PassageScores]:
        nonlocal correct
        for found in score_passages(model, passages, mesh, row_tokens=2500, device=torch.device("cpu")):
            correct += int(found.is_correct.sum())
            yield found

    by_position = position_loss(held, score, longest=700, max_tokens=6000, seed=0)
    gain = context_gain(held, score, contexts=(60, 500), num_spans=4, seed=0)
    assert by_position is not None and gain is not None
    haystack = Haystack(held, ByteTokenizer(), VOCAB)
    cells = chain(
        *(retrieval_cells(haystack, score, kind=kind, length=901, num_depths=2, cases=1, seed=0) for kind in KINDS)
    )
    return Measured(by_position=by_position, gain=gain, cells=tuple(cells), correct=correct)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("held"), varied_texts(12, longest=3000)).path


def difference(one: Measured, other: Measured) -> float:
    """Return the largest difference of a loss, in nats, where both have one; everything counted has to be equal."""
    assert (one.cells, one.correct) == (other.cells, other.correct)
    assert [found.tokens for found in one.by_position.bins] == [found.tokens for found in other.by_position.bins]
    losses = [
        [measured.by_position.loss, *chain(*((found.loss, found.gain) for found in measured.gain.contexts))]
        for measured in (one, other)
    ]
    return worst(abs(first - second) for first, second in zip(*losses, strict=True))


@pytest.mark.parametrize(
    ("names", "layouts"),
    [
        pytest.param(FAST, ((2, 1),), id="fast"),
        # The second embedding of the one left out has a vocabulary of its own.
        pytest.param(
            [name for name in ARCHITECTURES if name != "gemma4_text"], ((2, 2), (4, 1), (4, 2)), id="all",
            marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
        ),
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_one_process(
    corpus: Path, names: list[str], layouts: tuple[tuple[int, int], ...]
) -> None:
    (alone,) = run_ranks(measure_all, 1, corpus, names, timeout_s=1200)
    # A few of the random models are never right.
    assert sum(one.correct > 0 for one in alone) > len(names) / 2
    for sp_size, ring_size in layouts:
        for found in run_ranks(measure_all, sp_size, corpus, names, ring_size, timeout_s=1200):
            for name, one, other in zip(names, alone, found, strict=True):
                assert difference(one, other) <= 1e-6, (name, sp_size, ring_size)


@pytest.mark.slow
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
