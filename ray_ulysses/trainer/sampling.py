"""Continues prompts with the model that is being trained, as it is sharded, so that the run shows what it writes.

Each token is the most probable one after a full forward pass over the text so far, because training has no KV cache.
All ranks take part, and every SP group computes the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.attention.batch import held_tokens, shard_batch
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.engine.loss import score_tokens
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.layout import TileSetting
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.run.sample_prompts import SamplePrompts, read_prompts
from ray_ulysses.trainer.context import AttemptContext

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Continues the prompts of ``run.sample_prompts``."""

    prompts: tuple[tuple[int, ...], ...]
    """Tokens of each prompt."""
    end_tokens: tuple[int, ...]
    most_tokens: int
    """Maximum number of tokens to add to a prompt."""
    context_tokens: int
    """Maximum length of a text, including its prompt."""
    is_first: bool
    """Whether this rank belongs to the first SP group, whose tokens all ranks use."""
    text: SamplePrompts | None
    """The tokenizer, on rank 0."""

    def run(
        self, engine: Any, mesh: SequenceMesh, device: torch.device, tile: TileSetting, beat: Callable[[], object]
    ) -> list[list[int]]:
        """Return each prompt's continuation. All ranks must call this function. The engine's state is unchanged.

        ``tile`` is the number of tokens per rank whose logits exist at a time. ``beat`` is called before each forward.
        """
        engine.eval()
        try:
            return [self._continue(prompt, engine, mesh, device, tile, beat) for prompt in self.prompts]
        finally:
            engine.train()

    def _continue(
        self,
        prompt: tuple[int, ...],
        engine: Any,
        mesh: SequenceMesh,
        device: torch.device,
        tile: TileSetting,
        beat: Callable[[], object],
    ) -> list[int]:
        tokens = [*prompt]
        longest = min(len(prompt) + self.most_tokens, self.context_tokens)
        while len(tokens) < longest:
            beat()
            # Padding up to the longest text keeps the shapes equal.
            row_S = torch.zeros(longest, dtype=torch.int64, device=device)
            row_S[: len(tokens)] = torch.tensor(tokens, device=device)
            batch = shard_batch(row_S, None, [len(tokens)], mesh)
            predictions_BL = score_tokens(engine, batch, tile=tile).predictions_BL
            # Exactly one rank of each SP group has the text's last token.
            places_BS = torch.arange(batch.documents.row_tokens, device=device)[None]
            is_last_BL = held_tokens(places_BS, mesh) == len(tokens) - 1
            found = (predictions_BL * is_last_BL).sum() * self.is_first
            dist.all_reduce(found, group=mesh.group("loss"))
            tokens.append(int(found))
            if tokens[-1] in self.end_tokens:
                break
        return tokens[len(prompt) :]


def open_sampler(context: AttemptContext) -> Sampler | None:
    """Tokenize the prompts on rank 0, and return a sampler on each rank, or None if the run has no samples.

    All ranks must call this function. If rank 0's node can't read the tokenizer, this attempt takes no samples: the
    tokenizer was checked when the command started, and another node must not end the run for it.
    """
    config, layout = context.run.config, context.run.layout
    if config.run.sample_every_steps is None:
        return None
    text = None
    if context.rank == 0:
        try:
            text = read_prompts(config, Corpus.open(config.data_sources[0][0]).info)
        except (UserError, RunError, OSError) as error:
            _log.warning(
                "run.sample_every_steps=%s: node %s can't read the tokenizer, so this attempt takes no samples "
                "(%s); put it where every node can read it",
                config.run.sample_every_steps,
                context.nodes[0],
                error,
            )
    given = context.messenger.broadcast(None if text is None else (text.tokens, text.end_tokens))
    if given is None:
        return None
    return Sampler(
        prompts=given[0],
        end_tokens=given[1],
        most_tokens=config.run.sample_tokens,
        context_tokens=config.data.context_tokens,
        is_first=layout.dp_rank(context.rank) == 0,
        text=text,
    )
