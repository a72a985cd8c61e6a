"""Finds a layer's sliding window or stretches from the mask that Transformers builds for it.

Transformers builds a layer's mask from a function of query and key positions, and eager attention applies nothing else.
Evaluated on a row longer than any window, that function gives the exact window, regardless of the layer's settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(batch, head, query, key) -> bool``, true if a query sees a key; broadcasts, as in ``masking_utils``."""

_LONGEST = 1 << 24
_PAIRS = 1 << 14


class NotAWindow(Exception):
    """A mask is neither causal nor a causal sliding window."""


def longer_than_any_window(settings: Mapping[str, Any]) -> int:
    """Return a length of more than twice every integer in a configuration, ignoring those above 16M."""
    return 2 * max((one for one in _integers(settings) if one <= _LONGEST), default=0) + 257


def _integers(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        return [one for inner in value.values() for one in _integers(inner)]
    if isinstance(value, list | tuple):
        return [one for inner in value for one in _integers(inner)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def window_of(mask_function: MaskFunction, num_tokens: int) -> int | None:
    """Return the sliding window of a mask, as the attention function takes it.

    Args:
        mask_function: The mask as a function.
        num_tokens: Length of the row to evaluate; a window of at least that length counts as none.

    Returns:
        Number of tokens that a token sees, including itself; ``None`` if it sees all earlier tokens.

    Raises:
        NotAWindow: The mask shows later tokens, or a set of earlier ones that is no window.
    """
    last = torch.tensor(num_tokens - 1)
    window = int(_visible(mask_function, last, torch.arange(num_tokens)).sum())
    if window == 0:
        raise NotAWindow

    def expected(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & (keys > queries - window)

    _compare(mask_function, num_tokens, lambda queries: queries - window, expected)
    return None if window == num_tokens else window


def stretch_of(mask_function: MaskFunction, num_tokens: int) -> int:
    """Return the length of the stretches that a mask cuts a sequence into, with causal attention in each.

    Transformers calls them chunks (``attention_chunk_size``).

    Args:
        mask_function: The mask as a function.
        num_tokens: Length of the row to evaluate, longer than two stretches.

    Raises:
        NotAWindow: The mask is another one.
    """
    everywhere = torch.arange(num_tokens)
    stretch = int(_visible(mask_function, everywhere, torch.tensor(0)).sum())
    if stretch == 0:
        raise NotAWindow

    def expected(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & (keys // stretch == queries // stretch)

    _compare(mask_function, num_tokens, lambda queries: queries - queries % stretch, expected)
    return stretch


def _compare(
    mask_function: MaskFunction,
    num_tokens: int,
    edges: Callable[[torch.Tensor], torch.Tensor],
    expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Compare a mask with what is expected of it, at pairs of positions in a row."""
    generator = torch.Generator().manual_seed(3)
    anywhere = torch.randint(0, num_tokens, (_PAIRS,), generator=generator)
    far = torch.randint(0, num_tokens, (_PAIRS,), generator=generator)
    near = torch.randint(-2, 3, (_PAIRS,), generator=generator)
    first = torch.arange(min(num_tokens, 128))
    # Near the diagonal, near the edge, at queries near the edge itself, anywhere, and everywhere in the first part.
    at_edge = edges(anywhere)
    queries = torch.cat([anywhere, anywhere, at_edge + near.flip(0), anywhere, first.repeat_interleave(len(first))])
    keys = torch.cat([anywhere + near, at_edge + near, at_edge + near, far, first.repeat(len(first))])
    inside = (keys >= 0) & (keys < num_tokens) & (queries >= 0) & (queries < num_tokens)
    queries, keys = queries[inside], keys[inside]
    if not torch.equal(_visible(mask_function, queries, keys), expected(queries, keys)):
        raise NotAWindow


def _visible(mask_function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    queries, keys = torch.broadcast_tensors(queries, keys)
    nothing = torch.zeros_like(keys)
    # An unconditional mask may return a single value.
    return torch.as_tensor(mask_function(nothing, nothing, queries, keys)).expand(keys.shape)
