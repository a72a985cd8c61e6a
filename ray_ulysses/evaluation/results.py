"""What an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["key_value", "several_keys", "variables"]
"""Kind of facts and questions; see `needles`."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """The loss of all tokens that have between ``first`` and ``last`` tokens of their document before them.

    Attributes:
        tokens: Number of scored tokens.
        loss_sum: Their loss, in nats.
    """

    first: int
    last: int
    tokens: int
    loss_sum: float

    @property
    def loss(self) -> float:
        """Return the mean loss, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionLoss:
    """The loss over the beginnings of documents.

    Attributes:
        documents: Number of documents.
        tokens: Scored tokens.
        loss_sum: Their loss, in nats.
        bins: By position, in powers of two; bins without tokens are left out.
    """

    documents: int
    tokens: int
    loss_sum: float
    bins: tuple[PositionBin, ...]

    @property
    def loss(self) -> float:
        """Return the mean loss, in nats."""
        return self.loss_sum / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLoss:
    """The loss of the spans with a number of tokens before each.

    Attributes:
        context_tokens: Tokens before a span.
        tokens: Scored tokens of the spans, the same ones for every context.
        loss: Their mean loss, in nats.
        gain: How much lower it is than with the shortest context.
        standard_error: Standard error of the gain over spans, from the differences of each; None for a single span.
    """

    context_tokens: int
    tokens: int
    loss: float
    gain: float
    standard_error: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGain:
    """The loss of the same spans with more and more context.

    Attributes:
        spans: Number of spans.
        documents: Number of documents that they are from.
        contexts: From the shortest to the longest.
    """

    spans: int
    documents: int
    contexts: tuple[ContextLoss, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalCell:
    """The answers to all questions of one kind, length and depth.

    Attributes:
        kind: Kind of the facts and questions.
        length: Tokens of a row.
        depth: Share of the documents' text before the (first) fact.
        cases: Number of questions.
        correct: Number of right answers: every token is the most probable one.
        chance: Expected share of right answers of a model that draws each number from all possible ones.
        chance_shown: The same of one that draws from the numbers in the row.
    """

    kind: Kind
    length: int
    depth: float
    cases: int
    correct: int
    chance: float
    chance_shown: float

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.correct / self.cases
