"""Tokenizes the prompts that a run continues while it trains, with the tokenizer that prepared its corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.format import CorpusInfo
from ray_ulysses.data.tokenize.tokenizers import Tokenizer, load_unchanged
from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePrompts:
    """The prompts of ``run.sample_prompts`` as tokens."""

    tokenizer: Tokenizer
    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each prompt, as at the beginning of a document."""
    end_tokens: tuple[int, ...]
    """Tokens that end a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of generated tokens, without a token that ends it."""
        return self.tokenizer.decode(np.array([one for one in tokens if one not in self.end_tokens], dtype=np.int64))


def read_prompts(config: Config, info: CorpusInfo) -> SamplePrompts:
    """Tokenize ``run.sample_prompts``.

    Args:
        config: The run's configuration.
        info: Description of one of the run's corpora. All of them have the same tokenizer.

    Raises:
        UserError: The corpus's tokenizer can't be loaded or has changed, or a prompt has no tokens or fills a row.
    """
    tokenizer = load_unchanged(info.tokenizer)
    bos, most = info.encoding.bos_token_id, config.data.context_tokens
    found = []
    for prompt in config.run.sample_prompts:
        tokens = [*(() if bos is None else (bos,)), *map(int, tokenizer.encode_all([prompt])[0])]
        if not 0 < len(tokens) < most:
            raise UserError(f"the prompt {prompt[:40]!r} has {len(tokens):,} tokens, and a row has {most:,}")
        found.append(tuple(tokens))
    return SamplePrompts(tokenizer=tokenizer, tokens=tuple(found), end_tokens=info.end_tokens)
