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
    ("setting", "tokens", "vocab_size", "tile"),
    [
        ("auto", 131_072, 128_256, 512),
        ("auto", 1_024, 32_000, 128),
        ("auto", 256, 264, 256),
        ("off", 8_192, 32_000, 8_192),
        (100, 8_192, 32_000, 100),
        # Rows differ in length: a shorter one is one tile.
        (100, 60, 32_000, 60),
        ("auto", 0, 32_000, 1),
    ],
)
def test_the_tokens_of_a_tile_of_the_loss(setting: int | str, tokens: int, vocab_size: int, tile: int) -> None:
    assert loss_tile_tokens(setting, tokens, vocab_size) == tile  # type: ignore[arg-type]


@pytest.mark.parametrize(("setting", "tile"), [("auto", 4_096), ("off", 16_384), (100, 100), (20_000, 16_384)], ids=str)
def test_the_tokens_of_a_tile_of_an_mlp(setting: int | str, tile: int) -> None:
    assert mlp_tile_tokens(setting, 16_384, 14_336) == tile  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "vectors", "width", "tile"),
    [
        ("auto", 131_072, 4096, 4096),
        ("auto", 4096, 4096, 4096),
        ("off", 131_072, 4096, 131_072),
        (100, 512, 4096, 100),
        # Heads: as many values as of hidden states.
        ("auto", 131_072 * 32, 128, 131_072),
        (100, 131_072 * 32, 128, 3200),
        ("off", 0, 128, 1),
    ],
)
def test_a_tile_of_a_norm_has_this_number_of_vectors(setting: int | str, vectors: int, width: int, tile: int) -> None:
    assert norm_tile_vectors(setting, vectors, width, 4096) == tile  # type: ignore[arg-type]
