"""What an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["key_value", "several_keys", "variables"]
"""Kind of facts and questions; see `needles`."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """The loss of all tokens that have between ``first`` and ``last`` tokens of their document before them."""

    first: int
    last: int
    tokens: int
    """Number of scored tokens."""
    loss_sum: float
    """Their loss, in nats."""

    @property
    def loss(self) -> float:
        """Return the mean loss, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionLoss:
    """The loss over the beginnings of documents."""

    documents: int
    """Number of documents."""
    tokens: int
    loss_sum: float
    """Their loss, in nats."""
    bins: tuple[PositionBin, ...]
    """By position, in powers of two; bins without tokens are left out."""

    @property
    def loss(self) -> float:
        """Return the mean loss, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLoss:
    """The loss of the spans with a number of tokens before each."""

    context_tokens: int
    """Tokens before a span."""
    tokens: int
    """Scored tokens of the spans, the same ones for every context."""
    loss: float
    """Their mean loss, in nats."""
    gain: float
    """How much lower it is than with the shortest context."""
    standard_error: float | None
    """Standard error of the gain over spans, from the differences of each; None for a single span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGain:
    """The loss of the same spans with more and more context."""

    spans: int
    """Number of spans."""
    documents: int
    """Number of documents that they are from."""
    contexts: tuple[ContextLoss, ...]
    """From the shortest to the longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalCell:
    """The answers to all questions of one kind, length and depth."""

    kind: Kind
    """Kind of the facts and questions."""
    length: int
    """Tokens of a row."""
    depth: float
    """Share of the documents' text before the (first) fact."""
    cases: int
    """Number of questions."""
    correct: int
    """Number of right answers: every token is the most probable one."""
    chance: float
    """Expected share of right answers of a model that draws each number from all possible ones."""
    chance_shown: float
    """The same of one that draws from the numbers in the row."""

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.correct / self.cases
