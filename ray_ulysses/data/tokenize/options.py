"""Options of ``prepare`` that determine how documents are tokenized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TurnsOption = Literal["auto", "marks", "split", "whole"]
TrainOn = Literal["all", "last"]
TOKENIZER = "tokenizer"
NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingOptions:
    """Settings for tokenizing documents."""

    bos: str = TOKENIZER
    """Token that begins a text or a prompt: ``tokenizer`` for the token that the tokenizer itself prepends, if any;
    ``none``; or a token of the vocabulary."""
    eos: str = TOKENIZER
    """Token that ends a document: ``tokenizer`` for the tokenizer's ``eos_token``; ``none``; or a token of the
    vocabulary."""
    chat_template: str | None = None
    """Text of a chat template that replaces the tokenizer's own, or None to use the tokenizer's own."""
    turns: TurnsOption = "auto"
    """How to find the assistant's turns in the rendered chat. ``marks``: between the template's ``{% generation %}``
    marks. ``split``: by rendering the conversation up to each turn; a turn that the template renders differently once
    the conversation continues becomes a separate document. ``whole``: like ``split``, but conversations with such a
    turn are rejected. ``auto``: ``marks`` if the template has marks, otherwise ``split``."""
    train_on: TrainOn = "all"
    """Whether ``all`` assistant turns or only the ``last`` turn of each conversation is supervised."""

    @property
    def chat_settings(self) -> tuple[str, ...]:
        """Names of the chat settings with non-default values."""
        default = EncodingOptions()
        return tuple(
            name for name in ("chat_template", "turns", "train_on") if getattr(self, name) != getattr(default, name)
        )
