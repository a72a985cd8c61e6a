"""What a run minimizes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ray_ulysses.config.section import OnResume, Section, fixed

Task = Literal["causal_lm", "masked_lm", "sequence_classification"]
"""What a model predicts, by which its Transformers class is chosen: the next token, masked tokens, or the class of a
document."""


class ObjectiveSection(Section):
    """The loss: the cross-entropy of the next token, or a loss of pairs of answers.

    Pairs come from corpora that `prepare --chosen-field --rejected-field` has written.
    """

    on_resume: ClassVar[OnResume] = fixed("a change would alter the loss curve")

    kind: Literal["next_token", "classification", "dpo", "ipo", "orpo", "simpo"] = "next_token"
    """`next_token`: cross-entropy of the next token. `classification`: cross-entropy of each document's class. `dpo`
    and `ipo`: losses of pairs relative to a reference model, the model in `model.path`; `ray-ulysses reference`
    computes its log-probabilities first. `orpo` and `simpo`: losses of pairs that need no reference model. All but
    `dpo` divide log-probabilities by an answer's number of tokens. Default `next_token`."""

    beta: float = Field(default=0.1, gt=0)
    """For `orpo`, weight of the odds of both answers; otherwise, scale of the rewards, which is often 2 to 10 with
    `simpo`. For `ipo`, the target difference is `1 / (2 beta)`. Default 0.1."""

    margin: float = Field(default=0.0, ge=0)
    """For `simpo`, target difference between a pair's rewards (gamma). Default 0."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For `dpo` and `simpo`, probability that a pair's answers are exchanged. Default 0."""

    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's mean cross-entropy, which `orpo` always adds with weight 1. Default 0."""

    classes: tuple[str, ...] = Field(default=(), strict=False)
    """For `classification`, names of the classes in the order of the model's outputs. Default: those of the corpora."""

    @property
    def task(self) -> Task:
        """What the model predicts."""
        return "sequence_classification" if self.kind == "classification" else "causal_lm"

    @property
    def counts(self) -> Literal["tokens", "documents", "pairs"]:
        """What the loss is a mean over."""
        if self.kind == "classification":
            return "documents"
        return "tokens" if self.kind == "next_token" else "pairs"

    @property
    def needs_whole_documents(self) -> bool:
        """Whether every token of a document must be in its row."""
        return self.kind == "classification"

    @property
    def uses_pairs(self) -> bool:
        """Whether the loss is one of pairs of answers."""
        return self.counts == "pairs"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss depends on log-probabilities under a reference model."""
        return self.kind in ("dpo", "ipo")
