"""What a run minimizes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ray_ulysses.config.section import OnResume, Section, fixed

Task = Literal["causal_lm", "masked_lm", "sequence_classification", "embedding"]
"""What a model computes, by which its Transformers class is chosen: the next token, masked tokens, or the class or
vector of a document."""


Counts = Literal["tokens", "documents", "pairs"]


class ObjectiveSection(Section):
    """The loss: the cross-entropy of the next token, of masked tokens or of classes, or a loss of answers or vectors.

    Pairs of answers come from corpora written by `prepare --chosen-field --rejected-field`, pairs of texts from
    `--query-field --positive-field`, classes from `--label-field`, and the labeled answers of `kto` from
    `--prompt-field --completion-field --label-field`.
    """

    on_resume: ClassVar[OnResume] = fixed("a change would alter the loss curve")

    kind: Literal["next_token", "mlm", "classification", "embedding", "dpo", "ipo", "orpo", "simpo", "kto"] = (
        "next_token"
    )
    """`next_token`: cross-entropy of the next token. `mlm`: cross-entropy of masked tokens, for encoders.
    `classification`: cross-entropy of each document's class. `embedding`: cross-entropy of each query's positive among
    all positives of the step, by cosine similarities of vectors (InfoNCE). `dpo` and `ipo`: losses of pairs relative
    to a reference model, the model in `model.path`; `ray-ulysses reference` computes its log-probabilities first.
    `orpo` and `simpo`: losses of pairs that need no reference model. `kto`: loss of single answers that are labeled as
    desirable or not, relative to a reference model. All but `dpo` and `kto` divide log-probabilities by the number of
    tokens of an answer. Default `next_token`."""

    beta: float = Field(default=0.1, gt=0)
    """For `orpo`, weight of the odds of both answers; otherwise, scale of the rewards, which is often 2 to 10 with
    `simpo`. For `ipo`, the target difference is `1 / (2 beta)`. Default 0.1."""

    margin: float = Field(default=0.0, ge=0)
    """For `simpo`, target difference between a pair's rewards (gamma). Default 0."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For `dpo` and `simpo`, probability that a pair's answers are exchanged. Default 0."""

    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's mean cross-entropy, which `orpo` always adds with weight 1. Default 0."""

    desirable_weight: float = Field(default=1.0, gt=0)
    """For `kto`, weight of the loss of desirable answers. Default 1."""

    undesirable_weight: float = Field(default=1.0, gt=0)
    """For `kto`, weight of the loss of undesirable answers. Default 1."""

    classes: tuple[str, ...] = Field(default=(), strict=False)
    """For `classification`, names of the classes in the order of the model's outputs. Default: those of the corpora."""

    pooling: Literal["mean", "first", "last"] = "mean"
    """For `embedding`, tokens of a text whose hidden states are averaged: all, the first or the last.
    Default `mean`."""

    temperature: float = Field(default=0.05, gt=0)
    """For `embedding`, divisor of the similarities. Default 0.05."""

    mask_fraction: float = Field(default=0.15, gt=0, lt=1)
    """For `mlm`, expected fraction of tokens that are predicted (`mlm_probability` in Transformers). 0.3 is common for
    new encoders. Default 0.15."""

    mask_unit: Literal["token", "word", "span"] = "token"
    """For `mlm`, unit of masking: single tokens, whole words, or spans of several words. Default `token`."""

    mask_replacement: Literal["bert", "mask"] = "bert"
    """For `mlm`, replacement of predicted tokens: `bert` puts the mask token in 80% of the places, a random
    token in 10%, and leaves 10% unchanged; `mask` puts the mask token everywhere. Default `bert`."""

    @property
    def task(self) -> Task:
        """Prediction task."""
        return _TASKS.get(self.kind, "causal_lm")

    @property
    def counts(self) -> Counts:
        """Unit of the loss's mean."""
        if self.kind == "classification":
            return "documents"
        return "tokens" if self.kind in ("next_token", "mlm") else "pairs"

    @property
    def needs_whole_documents(self) -> bool:
        """Whether every token of a document must be in its row."""
        return self.kind in ("classification", "embedding")

    @property
    def uses_pairs(self) -> bool:
        """Whether the loss is a function of two texts, which share a row."""
        return self.counts == "pairs"

    @property
    def uses_answers(self) -> bool:
        """Whether the loss compares pairs of answers."""
        return self.uses_pairs and self.kind != "embedding"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss depends on log-probabilities under a reference model."""
        return self.kind in ("dpo", "ipo", "kto")

    def own_settings(self) -> dict[str, Any]:
        """Return the kind of the loss and the settings of this kind."""
        return {name: getattr(self, name) for name in ("kind", *SETTINGS_OF_KIND[self.kind])}

    def foreign_settings(self) -> list[str]:
        """Return the changed settings that this kind does not use."""
        own = self.own_settings()
        return [
            name
            for name, field in type(self).model_fields.items()
            if name not in own and getattr(self, name) != field.default
        ]


_TASKS: dict[str, Task] = {"mlm": "masked_lm", "classification": "sequence_classification", "embedding": "embedding"}
SETTINGS_OF_KIND = {
    "next_token": (),
    "mlm": ("mask_fraction", "mask_unit", "mask_replacement"),
    "classification": ("classes",),
    "embedding": ("pooling", "temperature"),
    "dpo": ("beta", "label_smoothing", "sft_weight"),
    "ipo": ("beta", "sft_weight"),
    "orpo": ("beta", "sft_weight"),
    "simpo": ("beta", "margin", "label_smoothing", "sft_weight"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
}
"""Settings of each kind of loss."""
