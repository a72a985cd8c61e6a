"""Held-out documents on disk, and fakes for models and scoring."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.evaluation.held_out import HeldOut, held_out_documents
from ray_ulysses.evaluation.scoring import Passage, PassageScores, Score, score_passages
from tests.unit.attention.meshes import ALONE
from tests.unit.data.corpora import text_corpus, varied_texts

VOCAB = 320


def held_out(folder: Path, count: int = 12, longest: int = 4000) -> HeldOut:
    text_corpus(folder, varied_texts(count, longest=longest))
    return held_out_documents(folder / "corpus", None)


def score_with(model: Callable[..., Any], row_tokens: int = 8192) -> Score:
    def score(passages: Iterator[Passage]) -> Iterator[PassageScores]:
        return score_passages(model, passages, ALONE, row_tokens=row_tokens)

    return score


def saying(tokens_BL: torch.Tensor) -> Any:
    """Return a model output in which the given tokens are the most probable."""
    return SimpleNamespace(logits=torch.nn.functional.one_hot(tokens_BL, VOCAB) * 20.0)


def knows(**inputs: Any) -> Any:
    """Fake a model that knows every answer."""
    return saying(inputs["ulysses"].labels_BL.clamp(min=0))


def guesses(seed: int) -> Callable[..., Any]:
    """Return a fake model that answers with a random number from the row."""
    rng = np.random.default_rng(seed)

    def model(**inputs: Any) -> Any:
        labels = inputs["ulysses"].labels_BL
        said = labels.clamp(min=0)
        text = "".join(chr(token) if token < 256 else "|" for token in inputs["input_ids"][0].tolist())
        for document in _documents(inputs["ulysses"].documents.lengths[0]):
            shown = sorted(set(_numbers(text[document])))
            for start, stop in _runs((labels[0] != IGNORE_INDEX).tolist(), document):
                answer = f" {shown[int(rng.integers(len(shown)))]}"
                said[0, start:stop] = torch.tensor([ord(letter) for letter in answer])
        return saying(said)

    return model


def _documents(lengths: tuple[int, ...]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def _numbers(text: str) -> Iterator[str]:
    return (found[1] for found in re.finditer(r" (\d{5})(?=[.,]|$)", text))


def _runs(flags: list[bool], within: slice) -> Iterator[tuple[int, int]]:
    start = None
    for place in range(within.start, within.stop + 1):
        is_set = place < within.stop and flags[place]
        if is_set and start is None:
            start = place
        elif not is_set and start is not None:
            yield start, place
            start = None
