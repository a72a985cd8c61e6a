"""Chooses how many tokens are processed at once where the result for each token is much wider than its input."""

from __future__ import annotations

from typing import Literal

TileSetting = int | Literal["auto", "off"]
"""Tokens per tile; ``auto`` chooses them by width, ``off`` processes all tokens at once."""

_MOST_VALUES = 1 << 26
_LEAST_VALUES = 1 << 20
_LEAST_TILES = 16


def tile_tokens(setting: TileSetting, tokens: int, width: int, *, least_tiles: int = _LEAST_TILES) -> int:
    """Return the tokens per tile; the last tile may have fewer.

    ``auto`` makes 16 tiles, more where a tile would have over 2**26 values (256 MiB in fp32), and fewer where it would
    have under 2**20 (4 MiB), for which tiling is not worth its overhead.

    Args:
        setting: The setting. A tile longer than the row is the whole row: rows differ in length.
        tokens: Tokens that this rank has of a batch.
        width: Values per token of the result that should not exist for all tokens at once.
        least_tiles: Other than 16.
    """
    if setting == "off" or tokens == 0:
        return max(1, tokens)
    if setting != "auto":
        return min(setting, tokens)
    values = min(_MOST_VALUES, max(_LEAST_VALUES, tokens * width // least_tiles))
    return min(tokens, max(1, values // width))
