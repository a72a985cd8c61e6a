"""Chooses how many tokens are processed at once where the result for each token is much wider than its input."""

from __future__ import annotations

from typing import Literal

TileSetting = int | Literal["auto", "off"]
"""Tokens per tile; ``auto`` chooses them by width, ``off`` processes all tokens at once."""

TILE_TOKENS = "_tile_tokens"
"""The attribute of a module whose own ``forward`` goes over tiles: a function that says of how many tokens."""

_MOST_VALUES = 1 << 26
_LEAST_VALUES = 1 << 20
_VALUES_OF_NORM_TILE = 1 << 24
_MOST_LOSS_TOKENS, _MOST_MLP_TOKENS = 512, 4096
_LEAST_LOSS_TILES = 8


def loss_tile_tokens(setting: TileSetting, tokens: int, vocab_size: int) -> int:
    """Return the tokens per tile of the loss; the last tile may have fewer.

    ``auto`` makes tiles of 512 tokens: enough that adding up the gradients of the head takes little of the time, and a
    peak that does not grow with the row. It makes smaller ones where there would be fewer than 8, or where a tile would
    have over 2**26 logits (256 MiB in fp32), and larger ones where a tile would have under 2**20 (4 MiB).

    Args:
        setting: The setting. A tile longer than the row is the whole row: rows differ in length.
        tokens: Tokens that this rank has of a batch.
        vocab_size: Logits per token.
    """
    tile = min(_MOST_LOSS_TOKENS, tokens // _LEAST_LOSS_TILES, _MOST_VALUES // vocab_size)
    return _tile_tokens(setting, tokens, max(tile, _LEAST_VALUES // vocab_size))


def mlp_tile_tokens(setting: TileSetting, tokens: int, width: int) -> int:
    """Return the tokens per tile of an MLP; ``auto`` makes tiles of up to 4,096 tokens and 2**26 values of its width.

    Of so many tokens, adding up the gradients of the weights takes little of the time, whatever the width.

    Args:
        setting: As in :func:`loss_tile_tokens`.
        tokens: Tokens that this rank has of a batch.
        width: Values per token inside the MLP.
    """
    return _tile_tokens(setting, tokens, min(_MOST_MLP_TOKENS, _MOST_VALUES // width))


def norm_tile_vectors(setting: TileSetting, vectors: int, width: int, hidden_size: int) -> int:
    """Return the vectors per tile of a norm; ``auto`` makes tiles of 2**24 values.

    Args:
        setting: As in :func:`loss_tile_tokens`; a number is that of tokens of hidden states with as many values.
        vectors: Vectors that are normalized, each by itself: tokens that this rank has of a batch, or their heads.
        width: Values per vector.
        hidden_size: Values per token of the hidden states.
    """
    if setting == "off":
        return max(1, vectors)
    values = _VALUES_OF_NORM_TILE if setting == "auto" else setting * hidden_size
    return _tile_tokens("auto", vectors, values // width)


def _tile_tokens(setting: TileSetting, tokens: int, automatic: int) -> int:
    tile = tokens if setting == "off" else automatic if setting == "auto" else setting
    return max(1, min(tile, tokens))
