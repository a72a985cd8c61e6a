"""ESM's token dropout for packed documents and sharded rows.

With ``token_dropout``, ``EsmEmbeddings`` (Transformers 5.23) sets the embeddings of masked tokens to 0, and scales the
others by the share of unmasked tokens in pretraining divided by the share in the row. Here each document has the scale
that it has alone: its masked tokens are counted over all slices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses.attention.batch import ShardedBatch, held_document_numbers
from ray_ulysses.attention.rope import CurrentBatch
from ray_ulysses.parallel.compilation import not_compiled

_TAKEN = "_ray_ulysses_mask_token"
_UNMASKED_IN_PRETRAINING = 1 - 0.15 * 0.8
"""Share of tokens that were not replaced by the mask token when ESM was trained, as in ``EsmEmbeddings``."""


def take_token_dropout(model: nn.Module) -> list[Any]:
    """Turn off token dropout inside the modules that have it, for :func:`drop_by_document`; return these modules."""
    found: list[Any] = []
    module: Any
    for module in model.modules():
        if getattr(module, "token_dropout", False) is True and hasattr(module, "word_embeddings"):
            # On a second call, token dropout is already off, so the token recorded by the first call remains.
            setattr(module, _TAKEN, int(module.mask_token_id))
            module.token_dropout = False
        if hasattr(module, _TAKEN):
            # A copy's lookup would refer to the original model.
            vars(module.word_embeddings).pop("forward", None)
            found.append(module)
    return found


def drop_by_document(model: nn.Module, current: CurrentBatch) -> None:
    """Make a model with token dropout scale embeddings by the masked tokens of each document."""
    for module in take_token_dropout(model):
        plain = module.word_embeddings.forward
        module.word_embeddings.forward = partial(_embedded, plain, getattr(module, _TAKEN), current)


@not_compiled
def _embedded(plain: Any, mask_token: int, current: CurrentBatch, ids_BL: torch.Tensor) -> torch.Tensor:
    assert current.batch is not None
    is_masked_BL, embeddings_BLH = ids_BL == mask_token, plain(ids_BL)
    unmasked_BL1 = _unmasked_shares(current.batch, is_masked_BL).unsqueeze(-1)
    embeddings_BLH = embeddings_BLH.masked_fill(is_masked_BL.unsqueeze(-1), 0.0)
    scaled: torch.Tensor = (embeddings_BLH * _UNMASKED_IN_PRETRAINING / unmasked_BL1).to(embeddings_BLH.dtype)
    return scaled


def _unmasked_shares(batch: ShardedBatch, is_masked_BL: torch.Tensor) -> torch.Tensor:
    """Return the share of unmasked tokens in each token's document, fp32 ``[B, L]``; 1 if all tokens are masked."""
    numbers_BL = held_document_numbers(batch.documents, batch.mesh).to(is_masked_BL.device)
    lengths_BL = batch.document_lengths_BL.clamp(min=1)
    counts_D = torch.zeros(sum(map(len, batch.documents.lengths)) + 1, device=is_masked_BL.device)
    counts_D.index_add_(0, numbers_BL.flatten(), is_masked_BL.flatten().float())
    if batch.mesh.sp_size > 1:
        dist.all_reduce(counts_D, group=batch.mesh.group("sp"))
    # The last count is of padding.
    counts_D[-1] = 0
    shares_BL = 1 - counts_D[numbers_BL] / lengths_BL
    return torch.where(shares_BL == 0, 1.0, shares_BL)
