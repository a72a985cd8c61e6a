"""Looks through a decoder's forward: which operations put tokens together outside its attention.

A copy of the model is built on the meta device from its configuration and called with one row of ``TOKENS`` tokens.
Nothing is computed: what counts is that attention goes through Transformers' interface with the batch's tables, and
that no other operation works along a dim of ``TOKENS``, so that each rank's slice is worked on as the whole row would
be. It holds for architectures that nobody has named.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ray_ulysses.attention.batch import MODEL_INPUT

TOKENS = 37
"""Length of the row that is looked at: a prime that no model has as a size."""

PROBE_NAME = "ray_ulysses_probe"
"""The name that the probe's attention is registered under with Transformers."""

HARMLESS_KEYWORDS = frozenset(
    {
        "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "output_attentions",
        "output_hidden_states", "return_dict", "layer_idx", "is_causal", "num_items_in_batch", "output_router_logits",
        "logits_to_keep",
    }
)  # fmt: skip
"""Keywords of an attention call that do not change what it computes."""

_ALONG_DIM = frozenset(
    {
        "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip", "roll", "sort", "topk", "_softmax",
        "_log_softmax", "select", "slice", "unbind", "split", "split_with_sizes",
    }
)  # fmt: skip
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "dot", "mv"})
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "mkldnn_convolution", "fft_fft", "_fft_r2c", "_fft_c2c"})


@dataclass(slots=True)
class Sight:
    """What was seen of a forward.

    Attributes:
        problems: What puts tokens together outside the attention interface, in words.
        num_heads: Query heads of the attention layer with the fewest; 0 if none was seen.
        unseen: Why the forward could not be looked through to its end, or nothing.
        called: Ids of the attention modules that called the interface.
    """

    problems: list[str] = field(default_factory=list)
    num_heads: int = 0
    unseen: str = ""
    called: set[int] = field(default_factory=set)

    def add(self, problem: str) -> None:
        """Take down a problem once."""
        if problem not in self.problems:
            self.problems.append(problem)


class _Lost(Exception):
    """The batch's tables did not reach an attention layer."""


def look_through(model: nn.Module) -> Sight:
    """Look at every operation of a forward of the model's class and configuration.

    Args:
        model: A ``PreTrainedModel`` on any device; it is left as it is.

    Returns:
        What was seen; a forward that depends on the values of tensors can't be looked through.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PROBE_NAME, _probe_attention)
    sight = Sight()
    try:
        with torch.device("meta"), torch.no_grad():
            copy: Any = type(model)(deepcopy(model.config))
            copy.set_attn_implementation(PROBE_NAME)
            for module in copy.modules():
                # Experts sort tokens by expert and put them back: each is worked on by itself.
                if type(module).__name__.endswith("Experts"):
                    module.forward = _pass_on
                # Transformers 5.23 looks into the ids for padding, which the meta device has none of.
                if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                    module.warn_if_padding_and_no_attention_mask = _say_nothing
            ids_BL = torch.zeros(1, TOKENS, dtype=torch.int64)
            with _Watch(sight):
                copy(input_ids=ids_BL, position_ids=ids_BL.clone(), use_cache=False, **{MODEL_INPUT: sight})
    except _Lost as lost:
        sight.add(str(lost))
        return sight
    except Exception as error:
        # Whatever a model of another author may raise: it needs values (item, nonzero, tolist), or a mask.
        said = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        if isinstance(error, RuntimeError) and "meta" in said:
            sight.unseen = said
        else:
            sight.add(f"its forward fails on a row without an attention mask ({said})")
        return sight
    for name, module in copy.named_modules():
        if type(module).__name__.endswith("Attention") and not any(id(m) in sight.called for m in module.modules()):
            sight.add(f"{type(module).__name__} at {name} attends without calling the attention interface")
    return sight


def _pass_on(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _probe_attention(
    module: nn.Module,
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    name = type(module).__name__
    sight = kwargs.pop(MODEL_INPUT, None)
    if not isinstance(sight, Sight):
        raise _Lost(f"{name} is not handed the model's keywords, so the batch's tables can't reach its attention")
    sight.called.add(id(module))
    if attention_mask is not None:
        sight.add(f"{name} makes an attention mask of its own")
    if key_BKLD.shape[2] != TOKENS or value_BKLE.shape[2] != TOKENS or query_BHLD.shape[2] != TOKENS:
        sight.add(f"{name} attends to other keys than the row's tokens")
    odd = sorted(key for key, value in kwargs.items() if key not in HARMLESS_KEYWORDS and value is not None)
    if odd:
        sight.add(f"{name} asks its attention for {', '.join(odd)}, which no kernel here does exactly")
    heads = query_BHLD.shape[1]
    sight.num_heads = min(heads, sight.num_heads or heads)
    # [B, H, L, D] -> [B, L, H, E]
    return query_BHLD.new_empty(query_BHLD.shape[0], query_BHLD.shape[2], heads, value_BKLE.shape[-1]), None


class _Watch(TorchDispatchMode):
    """Takes down every operation that works along the dim of the tokens."""

    def __init__(self, sight: Sight) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sight = sight

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if _mixes_tokens(func, name, args, kwargs or {}, result):
            self._sight.add(f"an operation outside its attention puts tokens together ({name})")
        return result


def _mixes_tokens(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> bool:
    if name == "arange":
        return isinstance(result, torch.Tensor) and result.numel() == TOKENS
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor):
        return False
    if name in _CONVOLUTIONS or "scaled_dot_product" in name:
        return True
    if name in _PRODUCTS:
        left = args[1] if name in ("addmm", "baddbmm") else first
        return bool(left.dim()) and left.shape[-1] == TOKENS
    if name == "constant_pad_nd":
        return _tokens_dims(first) != _tokens_dims(result)
    if name not in _ALONG_DIM:
        return False
    if name in ("slice", "select", "unbind", "split", "split_with_sizes"):
        return _loses_tokens(first, result)
    return any(first.shape[dim] == TOKENS for dim in _dims(func, args, kwargs) if first.dim())


def _loses_tokens(tensor: torch.Tensor, result: Any) -> bool:
    parts = result if isinstance(result, list | tuple) else [result]
    return any(len(_tokens_dims(part)) < len(_tokens_dims(tensor)) for part in parts)


def _tokens_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(tensor.shape) if size == TOKENS)


def _dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the dims that an operation works along, from its arguments ``dim`` or ``dims``."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            default = argument.default_value if argument.has_default_value() else ()
            given = args[place] if place < len(args) else kwargs.get(argument.name, default)
            return tuple(given) if isinstance(given, list | tuple) else (given,)
    return ()
