"""Finds the longest context that fits, as configured and with changed settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.config.stages import stage_configs
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.fit import Found, fits_with, is_allowed, leaner, nearest, product, with_settings
from ray_ulysses.planner.memory import configured_memory, fits
from ray_ulysses.planner.settings import pad_multiple

_MOST_TOKENS = 1 << 32


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestContexts:
    """The longest contexts that fit."""

    configured: int
    """As configured, in tokens; 0 if none fits."""
    changed: Found | None
    """With the cheapest changes that allow for the longest of all; None if none fits."""
    multiple: int
    """What both are multiples of, in tokens."""


def longest_contexts(
    config: Config, shape: ModelShape, choices: Mapping[str, Mapping[Any, int]] | None = None
) -> LongestContexts:
    """Return the longest contexts that fit on the configured workers; the configured context does not matter.

    Args:
        config: The configuration.
        shape: The model.
        choices: The settings that it leaves to the planner, and the values of each.
    """
    multiple = pad_multiple(config, shape)
    options = (with_settings(config, one.settings) for one in product(choices or {}))
    configured = max((longest_context(one, shape) for one in options if is_allowed(config, one)), default=0)
    least, most = _bounds(config, multiple)
    # At some context the host is full.
    best, is_host_full = configured, config.memory.host_gib is not None
    # The leanest first: few of the others then reach any further.
    for candidate in sorted(leaner(config, shape, is_host_full=is_host_full), key=lambda one: -one.cost):
        longer = max(best + multiple, least * multiple)
        if longer > most * multiple:
            break
        if fits_with(config, shape, {**candidate.settings, "data.context_tokens": longer}):
            best = longest_context(with_settings(config, candidate.settings), shape, above=best)
    changed = nearest(with_settings(config, {"data.context_tokens": best}), shape) if best else None
    return LongestContexts(configured=configured, changed=changed, multiple=multiple)


def longest_context(config: Config, shape: ModelShape, *, above: int = 0) -> int:
    """Return the longest context with which each stage fits as configured, in tokens, a multiple of the padding.

    Args:
        config: The configuration; its own context does not matter, but those that its stages set do.
        shape: The model.
        above: A context that is known to fit; 0 for none.
    """
    multiple = pad_multiple(config, shape)
    least, most = _bounds(config, multiple)

    def does_fit(number: int) -> bool:
        changed = with_settings(config, {"data.context_tokens": number * multiple})
        return all(fits(own, configured_memory(own, shape)) for own in stage_configs(changed))

    low = max(above // multiple, least - 1)
    high = low + 1
    while high <= most and does_fit(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does_fit(middle) else (low, middle)
    return low * multiple if low >= least else 0


def _bounds(config: Config, multiple: int) -> tuple[int, int]:
    """Return the fewest and the most multiples that a run's context may have: no stage's own is above it."""
    own = [stage.context_tokens for stage in config.stages]
    least = -(-max((tokens for tokens in own if tokens is not None), default=0) // multiple)
    # Where each stage has its own, a longer context would change nothing.
    return least, least if own and None not in own else _MOST_TOKENS // multiple
