from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.parallel.layout import loss_tile_tokens, mlp_tile_tokens, norm_tile_vectors


@given(tokens=st.integers(1, 1 << 21), vocab_size=st.integers(1, 1 << 19))
def test_an_automatic_tile_of_the_loss_is_small(tokens: int, vocab_size: int) -> None:
    tile = loss_tile_tokens("auto", tokens, vocab_size)
    assert 1 <= tile <= tokens
    assert tile * vocab_size <= 1 << 26
    if tokens * vocab_size > 1 << 22:
        assert tile == 1 or tile * vocab_size < tokens * vocab_size / 4


@pytest.mark.parametrize(
    ("found", "tile"),
    [
        (loss_tile_tokens("auto", 131_072, 128_256), 512),
        (loss_tile_tokens("auto", 1_024, 32_000), 128),
        (loss_tile_tokens("auto", 256, 264), 256),
        (loss_tile_tokens("off", 8_192, 32_000), 8_192),
        (loss_tile_tokens(100, 8_192, 32_000), 100),
        (loss_tile_tokens(100, 60, 32_000), 60),
        (loss_tile_tokens("auto", 0, 32_000), 1),
        (mlp_tile_tokens("auto", 16_384, 14_336), 4_096),
        (mlp_tile_tokens("off", 16_384, 14_336), 16_384),
        (mlp_tile_tokens(20_000, 16_384, 14_336), 16_384),
        (norm_tile_vectors("auto", 131_072, 4096, 4096), 4096),
        (norm_tile_vectors("off", 131_072, 4096, 4096), 131_072),
        (norm_tile_vectors(100, 512, 4096, 4096), 100),
        # Heads: as many values as in hidden states.
        (norm_tile_vectors("auto", 131_072 * 32, 128, 4096), 131_072),
        (norm_tile_vectors(100, 131_072 * 32, 128, 4096), 3200),
        (norm_tile_vectors("off", 0, 128, 4096), 1),
    ],
)
def test_a_tile_has_this_size(found: int, tile: int) -> None:
    assert found == tile
