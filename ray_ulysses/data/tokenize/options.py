"""The options of ``prepare`` that decide how a document is written as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TurnsOption = Literal["auto", "marks", "split", "whole"]
TrainOn = Literal["all", "last"]
TOKENIZER = "tokenizer"
NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingOptions:
    """How documents are written as tokens."""

    bos: str = TOKENIZER
    """The token that begins a text or a prompt: ``tokenizer`` (the one that the tokenizer itself puts there, if any),
    ``none``, or a token of the vocabulary."""
    eos: str = TOKENIZER
    """The token that ends a document: ``tokenizer`` (its ``eos_token``), ``none``, or a token of the vocabulary."""
    chat_template: str | None = None
    """The text of a chat template that takes the place of the tokenizer's own; None for its own."""
    turns: TurnsOption = "auto"
    """How the turns of the assistant are found in the rendered chat. ``marks`` takes the text between the template's
    ``{% generation %}`` marks. ``split`` renders the conversation up to each turn; a turn that the template writes
    differently once the conversation goes on is learned in a document of its own. ``whole`` leaves out a conversation
    with such a turn. ``auto`` is ``marks`` for a template that has them, else ``split``."""
    train_on: TrainOn = "all"
    """``all`` turns of the assistant are learned, or only the ``last`` of each conversation."""

    @property
    def chat_settings(self) -> tuple[str, ...]:
        """Return the names of the settings that differ from the default and count only for chats."""
        default = EncodingOptions()
        return tuple(
            name for name in ("chat_template", "turns", "train_on") if getattr(self, name) != getattr(default, name)
        )
