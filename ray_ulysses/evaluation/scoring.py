"""Scores tokens with a model, one forward pass per row of packed texts, sharded over ``sp``.

Nothing is generated. Greedy decoding produces an answer if and only if each answer token is the most probable token
after the preceding tokens, so one forward pass over text and answer is enough. Logits are computed one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ray_ulysses.attention.batch import IGNORE_INDEX, shard_batch, unshard
from ray_ulysses.engine.loss import score_tokens
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.mesh import SequenceMesh

_Text = TypeVar("_Text")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passage:
    """A text that the model reads as one document."""

    tokens: NDArray[np.int64]
    is_scored: NDArray[np.bool_]
    """Whether each token is scored. Only a masked language model predicts the first token."""
    masked_tokens: NDArray[np.int64] | None = None
    """The text with masks, which a masked language model reads in its place; None for a decoder."""

    def last(self, num_tokens: int) -> Passage:
        """Return the last tokens as a passage of their own."""
        masked = None if self.masked_tokens is None else self.masked_tokens[-num_tokens:]
        return Passage(tokens=self.tokens[-num_tokens:], is_scored=self.is_scored[-num_tokens:], masked_tokens=masked)

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.is_scored.shape and self.tokens.size > 1
        assert self.masked_tokens is not None or not self.is_scored[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassageScores:
    """The model's prediction of each token of a text from the preceding tokens, or from those that are not masked."""

    losses: NDArray[np.float64]
    """float64. Cross-entropy in nats; 0 for tokens that are not scored."""
    is_correct: NDArray[np.bool_]
    """Whether the token is scored and is the most probable token."""


Score = Callable[[Iterator[Passage]], Iterator[PassageScores]]
"""Scores texts in order; see `score_passages`."""


def score_passages(
    model: Callable[..., Any],
    passages: Iterable[Passage],
    mesh: SequenceMesh,
    *,
    row_tokens: int,
    device: torch.device | None = None,
) -> Iterator[PassageScores]:
    """Yield the scores of each text, in order. All ranks of ``sp`` must call this function with the same texts.

    Args:
        model: A model in evaluation mode, prepared for the mesh with ``apply_ulysses``.
        passages: Texts to score.
        mesh: Mesh over which rows are sharded.
        row_tokens: Maximum length of a row of packed texts. A longer text gets a separate row.
        device: Device of the model; None for the CPU.

    Raises:
        RunError: A loss is not finite.
    """
    for row in grouped(passages, lambda passage: passage.tokens.size, row_tokens):
        yield from _score_row(model, row, mesh, device or torch.device("cpu"))


def grouped(texts: Iterable[_Text], length_of: Callable[[_Text], int], row_tokens: int) -> Iterator[list[_Text]]:
    """Yield the texts of each row, in order. A text that is longer than a row gets a separate row."""
    row: list[_Text] = []
    num_tokens = 0
    for text in texts:
        length = length_of(text)
        if row and num_tokens + length > row_tokens:
            yield row
            row, num_tokens = [], 0
        row.append(text)
        num_tokens += length
    if row:
        yield row


def _score_row(
    model: Callable[..., Any], row: Sequence[Passage], mesh: SequenceMesh, device: torch.device
) -> Iterator[PassageScores]:
    tokens = torch.from_numpy(np.concatenate([one.tokens for one in row]))
    is_scored = torch.from_numpy(np.concatenate([one.is_scored for one in row]))
    labels = torch.where(is_scored, tokens, IGNORE_INDEX)
    given = [one.masked_tokens for one in row if one.masked_tokens is not None]
    read, shift = (torch.from_numpy(np.concatenate(given)), 0) if given else (tokens, 1)
    lengths = [one.tokens.size for one in row]
    batch = shard_batch(read.to(device), labels.to(device), lengths, mesh, shift_labels=not given)
    scores = score_tokens(model, batch)
    is_correct_BL = scores.predictions_BL == batch.labels_BL
    local_BL2 = torch.stack([scores.losses_BL.float(), is_correct_BL.float()], dim=-1)
    # In row order; index t holds the scores of token t + shift.
    found_T2 = unshard(local_BL2, batch)[0].double().cpu().numpy()
    if not np.isfinite(found_T2).all():
        raise RunError(
            "the model's losses on these texts are not finite: the model has diverged, or its dtype overflows; select "
            "an earlier step with --step, or compute with --dtype fp32"
        )
    start = 0
    for one in row:
        stop = start + one.tokens.size
        losses, is_correct = np.zeros(one.tokens.size), np.zeros(one.tokens.size, dtype=np.bool_)
        found_t2 = found_T2[start : stop - shift]
        losses[shift:], is_correct[shift:] = found_t2[:, 0], found_t2[:, 1] > 0
        yield PassageScores(losses=losses, is_correct=is_correct)
        start = stop
