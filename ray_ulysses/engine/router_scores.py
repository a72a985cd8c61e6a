"""What routers say of tokens, where it is recorded tile by tile.

Transformers (5.20 to 5.23) collects the scores of routers with hooks on them, in a list that exists while its decoder
runs. This is the only file that knows of that list, which has no public name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_HOME = "transformers.utils.output_capturing"
_SCORES = "router_logits"


def is_recording() -> bool:
    """Return whether the scores of routers that run now are collected."""
    return _SCORES in (_collector().get() or {})


def recorded(call: Callable[[], Any]) -> tuple[Any, list[torch.Tensor]]:
    """Call a function; return its result, and the scores of routers inside it instead of collecting them."""
    scores: list[torch.Tensor] = []
    token = _collector().set({_SCORES: scores})
    try:
        return call(), scores
    finally:
        _collector().reset(token)


def record(scores: Sequence[torch.Tensor]) -> None:
    """Add scores to those that are collected now."""
    if scores:
        _collector().get()[_SCORES].extend(scores)


def is_recorder(hook: Any) -> bool:
    """Return whether a forward hook of a module is Transformers' own that collects its result."""
    return getattr(hook, "__module__", None) == _HOME


def _collector() -> Any:
    from transformers.utils.output_capturing import _active_collector

    return _active_collector
