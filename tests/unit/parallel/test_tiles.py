from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.parallel.tiles import tile_tokens


@given(tokens=st.integers(1, 1 << 21), width=st.integers(1, 1 << 19))
def test_a_chosen_tile_is_a_small_part_of_what_is_large(tokens: int, width: int) -> None:
    tile = tile_tokens("auto", tokens, width)
    assert 1 <= tile <= tokens
    assert tile * width <= max(1 << 26, width)
    if tokens * width > 1 << 22:
        assert tile * width < max(tokens * width / 4, width + 1)


@pytest.mark.parametrize(
    ("setting", "tokens", "width", "tile"),
    [
        ("auto", 131_072, 128_256, 523),
        ("auto", 8_192, 32_000, 512),
        ("auto", 256, 264, 256),
        ("off", 8_192, 32_000, 8_192),
        (100, 8_192, 32_000, 100),
        # Rows differ in length: a shorter one is one tile.
        (100, 60, 32_000, 60),
        ("auto", 0, 32_000, 1),
        ("off", 0, 32_000, 1),
        (100, 0, 32_000, 1),
    ],
)
def test_the_tokens_of_a_tile(setting: int | str, tokens: int, width: int, tile: int) -> None:
    assert tile_tokens(setting, tokens, width) == tile  # type: ignore[arg-type]
