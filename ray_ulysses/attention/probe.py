"""Looks through a decoder's forward: what its attention is given, and what depends on other tokens outside of it.

A copy of the model, whose matrices take no memory, is called twice in place of weights and attention. Attention must go
through Transformers' interface with the batch's tables and a mask that the engine can apply; nothing else may put
tokens together, so that each rank's slice is worked on as the whole row would be. No architecture is known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ray_ulysses.attention.batch import MODEL_INPUT
from ray_ulysses.attention.dependence import Arrangement, Passages, agree
from ray_ulysses.attention.masks import MaskFunction, NotAWindow, longer_than_any_window, window_of
from ray_ulysses.attention.rope import without_documents
from ray_ulysses.attention.stand_in import DTYPE, noise_like, stand_in_for
from ray_ulysses.attention.token_operations import TokenOperations

TOKENS = 37
"""Length of the row that operations are watched on: a prime that no model has as a size."""

PROBE_NAME = "ray_ulysses_probe"
"""The name that the probe's attention and mask are registered under with Transformers."""

HARMLESS_KEYWORDS = frozenset(
    {
        "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "output_attentions",
        "output_hidden_states", "return_dict", "layer_idx", "num_items_in_batch", "output_router_logits",
        "logits_to_keep",
    }
)  # fmt: skip
"""Keywords of an attention call that do not change what it computes."""

_JUDGED_KEYWORDS = HARMLESS_KEYWORDS | {"is_causal"}
_OTHER_ROWS = (2, 23)
_OTHER_ORDER = 29


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """What one attention module asks for.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_size: Of queries and keys.
        value_size: Of values.
        window: The sliding window of the mask that Transformers builds for it; ``None``: it sees all earlier tokens.
        has_softcap: Whether its scores are capped.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    window: int | None
    has_softcap: bool


@dataclass(slots=True)
class Sight:
    """What was seen of a forward.

    Attributes:
        problems: Why the model can't be done exactly, in words.
        layers: What each attention module asks for, by its name.
        num_positions: Positions that its smallest table of positions holds; ``None`` if it has no such table.
    """

    problems: list[str] = field(default_factory=list)
    layers: dict[str, LayerAttention] = field(default_factory=dict)
    num_positions: int | None = None

    def add(self, problem: str) -> None:
        """Take down a problem once."""
        if problem not in self.problems:
            self.problems.append(problem)


class _Lost(Exception):
    """The batch's tables did not reach an attention layer."""


@dataclass(slots=True)
class _Forward:
    """What the probe's attention and mask share in one forward; it takes the place of the batch's tables.

    Attributes:
        sight: Where problems go.
        names: Names of the copy's modules by their ids.
        noise: What stand-ins are made of.
        window_tokens: Length of the row that masks are asked about.
    """

    sight: Sight
    names: dict[int, str]
    noise: torch.Tensor
    window_tokens: int


def look_through(model: nn.Module) -> Sight:
    """Look at every attention call, and at what else depends on other tokens, in a forward of a copy of the model.

    Args:
        model: A ``PreTrainedModel`` on any device; it is left as it is.

    Returns:
        What was seen. A forward that fails is a problem too.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(PROBE_NAME, _probe_mask)
    sight, operations = Sight(), TokenOperations(TOKENS)
    copy: Any = None
    # What a model draws, such as noise, must not shift the random numbers of the run.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _default_dtype(DTYPE):
        try:
            copy, noise = stand_in_for(model)
            _prepare(copy)
            _call_twice(copy, noise, sight, operations)
        except _Lost as lost:
            sight.add(str(lost))
        except Exception as error:
            # Whatever a model of another author may raise.
            said = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            sight.add(f"its forward fails on a row without an attention mask ({said})")
    found = [f"an operation outside its attention puts tokens together ({name})" for name in operations.found]
    sight.problems = found + sight.problems
    sight.num_positions = operations.num_positions
    if not sight.problems:
        _find_attention_of_its_own(copy, sight)
    return sight


def _find_attention_of_its_own(copy: nn.Module, sight: Sight) -> None:
    for name, module in copy.named_modules():
        prefix = f"{name}." if name else ""
        seen = any(layer == name or layer.startswith(prefix) for layer in sight.layers)
        if type(module).__name__.endswith("Attention") and not seen:
            sight.add(f"{type(module).__name__} at {name} attends without calling the attention interface")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let what a forward makes, such as ``torch.ones(n)``, go with the copy's tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _prepare(copy: Any) -> None:
    """Make the copy call the probe's attention."""
    earlier = vars(copy).pop("_ray_ulysses_hook", None)
    if earlier is not None:
        earlier.remove()
    without_documents(copy)
    copy.train()
    use_attention(copy, PROBE_NAME)
    if hasattr(copy, "set_experts_implementation"):
        copy.set_experts_implementation("eager")
    first_of_kind: dict[tuple[Any, ...], _Experts] = {}
    for module in copy.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
        if type(module).__name__.endswith("Experts"):
            kind = (type(module), vars(module).get("forward"), *map(type, module.modules()))
            experts = _Experts(module.forward, first_of_kind.get(kind))
            first_of_kind.setdefault(kind, experts)
            module.forward = experts


def use_attention(model: Any, name: str) -> None:
    """Make every part of a model that is there call an attention function.

    Transformers warns of each part that its configuration speaks of and that was cut out of it.

    Args:
        model: A ``PreTrainedModel``, or PEFT's model around it.
        name: What the function is registered under.
    """
    own = {id(getattr(module, "config", None)) for module in model.modules()}
    parts = [part for part in model.config.sub_configs if id(getattr(model.config, part)) in own]
    model.set_attn_implementation({"": name} | dict.fromkeys(parts, name))


class _Experts:
    """The forward of a layer's experts; of layers alike, the first one's are run and the others pass tokens on.

    There may be hundreds of experts in each of dozens of layers, with several calls each.
    """

    def __init__(self, forward: Callable[..., Any], first_alike: _Experts | None) -> None:
        self._forward = forward
        self._first_alike = first_alike
        self.keeps_shape = False

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._first_alike is not None and self._first_alike.keeps_shape:
            return hidden
        result = self._forward(hidden, *args, **kwargs)
        self.keeps_shape = isinstance(result, torch.Tensor) and result.shape == hidden.shape
        return result


def _call_twice(copy: Any, noise: torch.Tensor, sight: Sight, operations: TokenOperations) -> None:
    """Call the copy with both arrangements, and again module by module where their results differ."""
    names = {id(module): name for name, module in copy.named_modules()}
    longest = longer_than_any_window(copy.config.to_dict())
    forward = _Forward(sight=sight, names=names, noise=noise, window_tokens=longest)
    first, second = arrangements = _arrangements(copy.config.get_text_config(decoder=True))
    with operations:
        before = _logits(copy, first, forward)
    after = _logits(copy, second, forward)
    if agree(before, after, arrangements):
        return
    passages = Passages(copy, noise)
    for arrangement in arrangements:
        passages.begin(arrangement)
        _logits(copy, arrangement, forward)
    mixing = passages.where_mixed(arrangements)
    sight.add(
        f"what {type(copy).__name__ if mixing is None else f'{mixing.kind} at {mixing.name}'} makes of a token depends "
        "on other tokens, on its place in the row or on chance"
    )


def _logits(copy: Any, arrangement: Arrangement, forward: _Forward) -> torch.Tensor:
    inputs = {"input_ids": arrangement.input_ids_BT, "position_ids": arrangement.position_ids_BT}
    logits: torch.Tensor = copy(**inputs, use_cache=False, **{MODEL_INPUT: forward}).logits
    return logits


def _arrangements(config: Any) -> tuple[Arrangement, Arrangement]:
    """Return a plain row, and the same tokens with the same positions in another order, with others among them."""
    generator = torch.Generator().manual_seed(_OTHER_ORDER)
    most = int(getattr(config, "vocab_size", None) or 2)
    ids = torch.randint(0, most, (2 * TOKENS,), generator=generator)
    # Transformers looks into the ids for padding, and warns.
    pad = getattr(config, "pad_token_id", None)
    ids = torch.where(ids == (-1 if pad is None else pad), (ids + 1) % most, ids)
    rows, tokens = _OTHER_ROWS
    strangers = TOKENS + torch.arange(rows * tokens - TOKENS)
    order = torch.cat([torch.arange(TOKENS), strangers])[torch.randperm(rows * tokens, generator=generator)]
    first = Arrangement.of(torch.arange(TOKENS)[None], ids, TOKENS)
    return first, Arrangement.of(order.view(rows, tokens), ids, TOKENS)


def _probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    dtype: torch.dtype = DTYPE,
    **kwargs: Any,
) -> torch.Tensor:
    """Return an additive mask as eager attention takes it, which knows the function that it was made by."""
    places = [torch.arange(size) for size in (batch_size, 1, q_length, kv_length)]
    visible = mask_function(*torch.meshgrid(*places, indexing="ij"))
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype)
    mask = mask.masked_fill(~torch.as_tensor(visible).expand(mask.shape), lowest)
    mask._made_by = mask_function  # type: ignore[attr-defined]
    return mask


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
    kind = type(module).__name__
    forward = kwargs.pop(MODEL_INPUT, None)
    if not isinstance(forward, _Forward):
        raise _Lost(f"{kind} is not handed the model's keywords, so the batch's tables can't reach its attention")
    sight, tokens = forward.sight, query_BHLD.shape[2]
    if key_BKLD.shape[2] != tokens or value_BKLE.shape[2] != tokens:
        raise _Lost(f"{kind} attends to other keys than the row's tokens")
    if dropout:
        sight.add(f"{kind} asks its attention for a dropout of {dropout}")
    for problem in refused_keywords(kwargs):
        sight.add(f"{kind} {problem}")
    if query_BHLD.shape[0] == 1:
        _take_down(module, forward, (query_BHLD, key_BKLD, value_BKLE), attention_mask, softcap)
    # [B, H, L, D] -> [B, L, H, E], from each token's own query, key and value.
    query_BL, key_BL = (_to_number(tensor, forward.noise) for tensor in (query_BHLD, key_BKLD))
    score_BL = query_BL * (1.0 if scaling is None else scaling) + key_BL
    value_BLKE = value_BKLE.transpose(1, 2)
    out_BLHE = value_BLKE.repeat_interleave(query_BHLD.shape[1] // key_BKLD.shape[1], dim=2)
    return out_BLHE + score_BL[:, :, None, None], None


def refused_keywords(kwargs: Mapping[str, Any]) -> list[str]:
    """Return why an attention call's keywords can't be done exactly, in words that follow the module's name."""
    odd = sorted(key for key, value in kwargs.items() if key not in _JUDGED_KEYWORDS and value is not None)
    problems = [f"asks its attention for {', '.join(odd)}, which no kernel here does exactly"] if odd else []
    if kwargs.get("is_causal") is False:
        problems.append("asks its attention for is_causal=False; only causal attention is supported")
    return problems


def _take_down(
    module: nn.Module,
    forward: _Forward,
    qkv_BHLD: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    softcap: float | None,
) -> None:
    """Take down what a module asks for on the plain row."""
    kind, sight, (query, key, value) = type(module).__name__, forward.sight, qkv_BHLD
    if mask is None:
        sight.add(f"{kind} is handed no causal mask by its model")
        return
    made_by = getattr(mask, "_made_by", None)
    if made_by is None:
        sight.add(f"{kind} makes an attention mask of its own")
        return
    try:
        window = window_of(made_by, forward.window_tokens)
    except NotAWindow:
        sight.add(f"the attention mask of {kind} is neither causal nor a causal sliding window")
        return
    layer = LayerAttention(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[3],
        value_size=value.shape[3],
        window=window,
        has_softcap=softcap is not None,
    )
    name = forward.names[id(module)]
    if sight.layers.setdefault(name, layer) != layer:
        sight.add(f"{kind} at {name} is called with different heads or windows in one forward")


def _to_number(tensor_BHLD: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return ``[B, L]``: one number of each token that all of its heads are in."""
    flat_BLF = tensor_BHLD.transpose(1, 2).flatten(2)
    width = flat_BLF.shape[2]
    return flat_BLF @ noise_like((width,), 3, noise).to(flat_BLF.dtype) / width
