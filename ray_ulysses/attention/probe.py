"""Probes a decoder's forward: records its attention calls and detects other operations that mix tokens.

A copy of the model with noise weights and a replaced attention function is called twice. Attention must go through
Transformers' attention interface, receive the document tables, and use a mask that the engine supports. No other
operation may mix tokens, so that a slice can be processed without the rest of the row. The probe does not rely on a
list of architectures.

Transformers builds a layer's mask from a function of query and key positions, and eager attention uses only this mask.
Evaluating the function on a row longer than any window therefore yields the exact window, regardless of settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ray_ulysses.attention.attachment import Attachment
from ray_ulysses.attention.batch import MODEL_INPUT
from ray_ulysses.attention.dependence import (
    DTYPE,
    Arrangement,
    CallRecorder,
    TokenOperations,
    agree,
    noise_copy,
    noise_like,
)
from ray_ulysses.attention.mixers import find_mixers, given_tables, pass_tables_on, set_forward
from ray_ulysses.attention.rope import take_temperature, without_documents
from ray_ulysses.attention.token_dropout import take_token_dropout
from ray_ulysses.parallel.layout import TILE_TOKENS

TOKENS = 37
"""Row length in tokens while operations are recorded: a prime, so that no other dim of a model has this size."""

PROBE_NAME = "ray_ulysses_probe"
"""Name of the probe's attention and mask functions in Transformers' registries."""

HARMLESS_KEYWORDS = frozenset(
    {
        "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "output_attentions",
        "output_hidden_states", "return_dict", "layer_idx", "num_items_in_batch", "output_router_logits",
        "logits_to_keep", "deterministic",
    }
)  # fmt: skip
"""Keyword arguments of an attention call that do not affect its result."""

_KNOWN_KEYWORDS = HARMLESS_KEYWORDS | {"is_causal"}
_OTHER_ROWS = (2, 23)
_OTHER_ORDER = 29


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """Properties of one attention module, as observed by the probe."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    window: int | None
    """Sliding window of the module's mask in tokens, including the query itself, or None for no window. In
    bidirectional attention, the window is on either side."""
    has_softcap: bool
    local_span: int | None = None
    """Length in tokens of the mask's local spans, or None if the mask has no local spans."""
    causal: bool = True


@dataclass(slots=True)
class ProbeResult:
    """Findings of probing a forward."""

    problems: list[str] = field(default_factory=list)
    """Reasons why the model can't be trained exactly."""
    layers: dict[str, LayerAttention] = field(default_factory=dict)
    """Attention modules, by module name."""
    mixers: set[str] = field(default_factory=set)
    """Names of the supported recurrent layers that were called."""
    num_positions: int | None = None
    """Longest document for the model's smallest position table, or None if the model has no position table."""
    first_position: int = 0
    """Position id of a document's first token, which a model without position ids in its call would use."""

    def bidirectional(self) -> str | None:
        """Return the name of the first attention module with a bidirectional mask, or None if there is none."""
        return next((name for name, layer in self.layers.items() if not layer.causal), None)

    def add(self, problem: str) -> None:
        """Record a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)


class _Lost(Exception):
    """Raised to end a forward if an attention layer did not receive the document tables or all of the row's tokens."""


@dataclass(slots=True)
class _Forward:
    """State of one forward, passed to the probe's attention in place of the document tables."""

    result: ProbeResult
    names: dict[int, str]
    noise: torch.Tensor
    window_tokens: int
    """Row length at which mask functions are evaluated."""


def probe_model(model: nn.Module) -> ProbeResult:
    """Run a copy of a model to record its attention calls and to detect all other dependences between tokens.

    If the forward fails, the error is recorded as a problem in the result.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(PROBE_NAME, _probe_mask)
    result, operations = ProbeResult(), TokenOperations(TOKENS)
    copy: Any = None
    # The copy may draw random numbers; do not advance the training run's generators.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), ExitStack() as restored:
        # Give tensors that the forward creates, such as `torch.ones(n)`, the dtype of the copy.
        restored.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(DTYPE)
        # The tensors are too small to benefit from threads.
        restored.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        try:
            copy, noise = noise_copy(model)
            _prepare(copy)
            _call_twice(copy, noise, result, operations)
        except _Lost as lost:
            result.add(str(lost))
        except Exception as error:
            # Model code may raise any exception.
            text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            result.add(f"its forward fails when called without an attention mask ({text})")
    found = [f"an operation outside its attention mixes tokens ({name})" for name in operations.found]
    result.problems = found + result.problems
    if operations.num_positions is not None:
        result.num_positions = operations.num_positions - result.first_position
    if not result.problems:
        _find_private_attention(copy, result)
    return result


def _find_private_attention(copy: nn.Module, result: ProbeResult) -> None:
    # Names of the attention modules that were called, and of the modules that contain them.
    seen = {""} | {
        name for layer in (*result.layers, *result.mixers) for name in accumulate(layer.split("."), "{}.{}".format)
    }
    for name, module in copy.named_modules():
        if type(module).__name__.endswith("Attention") and name not in seen:
            result.add(f"{type(module).__name__} at {name} does not call Transformers' attention interface")


def _prepare(copy: Any) -> None:
    attached = Attachment.of(copy)
    if attached is not None:
        attached.unhook(copy)
    without_documents(copy)
    take_temperature(copy)
    take_token_dropout(copy)
    for name, mixer, layout in find_mixers(copy):
        set_forward(mixer, partial(_probe_mixer, name, layout.is_attention))
    pass_tables_on(copy)
    if getattr(copy, "pooler", None) is not None:
        # A pooler reads the first token, and does not change the hidden states; `engine.heads` runs it on documents.
        copy.pooler = None
    copy.train()
    use_attention(copy, PROBE_NAME)
    if hasattr(copy, "set_experts_implementation"):
        copy.set_experts_implementation("eager")
    first_of_kind: dict[tuple[Any, ...], _Experts] = {}
    for module in copy.modules():
        if hasattr(module, TILE_TOKENS):
            # Undo tiling, which slices the token dim and would be reported.
            vars(module).pop("forward", None)
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            # The router loss mixes tokens; the engine computes it outside the forward, from complete rows.
            module.config.output_router_logits = False
        if type(module).__name__.endswith("Experts"):
            kind = (type(module), vars(module).get("forward"), *map(type, module.modules()))
            experts = _Experts(module.forward, first_of_kind.get(kind))
            first_of_kind.setdefault(kind, experts)
            module.forward = experts


def use_attention(model: Any, name: str) -> None:
    """Set the attention implementation of a model and of the sub-models that it contains.

    Sub-models that exist only in the configuration are left out, because Transformers would warn about them.
    """
    own = {id(module.config) for module in model.modules() if getattr(module, "config", None) is not None}
    parts = [part for part in model.config.sub_configs if id(getattr(model.config, part)) in own]
    model.set_attn_implementation({"": name} | dict.fromkeys(parts, name))


class _Experts:
    """Forward of a layer's experts, which runs only in the first of several identical layers.

    Skipping the other layers saves time: a model may have dozens of layers with hundreds of experts each.
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


def _call_twice(copy: Any, noise: torch.Tensor, result: ProbeResult, operations: TokenOperations) -> None:
    names = {id(module): name for name, module in copy.named_modules()}
    longest = longer_than_any_window(copy.config.to_dict())
    forward = _Forward(result=result, names=names, noise=noise, window_tokens=longest)
    first, second = arrangements = _arrangements(copy.config.get_text_config(decoder=True))
    with operations:
        before = _logits(copy, first, forward)
    if operations.num_positions is not None:
        _find_first_position(copy, first, forward, operations)
    after = _logits(copy, second, forward)
    if agree(before, after, arrangements):
        return
    recorder = CallRecorder(copy, noise)
    for arrangement in arrangements:
        recorder.begin(arrangement)
        _logits(copy, arrangement, forward)
    mixing = recorder.find_mixing(arrangements)
    result.add(
        f"the result of {type(copy).__name__ if mixing is None else f'{mixing.kind} at {mixing.name}'} for a token "
        "depends on other tokens, on the token's index in the row or on random numbers"
    )


def _find_first_position(copy: Any, arrangement: Arrangement, forward: _Forward, operations: TokenOperations) -> None:
    """Compare the entries of the position table that are used with position ids from 0 and without position ids.

    RoBERTa's position ids start after that of its padding token.
    """
    unnumbered = TokenOperations(TOKENS)
    with unnumbered:
        copy(input_ids=arrangement.input_ids_BT, use_cache=False, **{MODEL_INPUT: forward})
    if unnumbered.num_positions is not None and operations.num_positions is not None:
        forward.result.first_position = operations.num_positions - unnumbered.num_positions


def _logits(copy: Any, arrangement: Arrangement, forward: _Forward) -> torch.Tensor:
    inputs = {"input_ids": arrangement.input_ids_BT, "position_ids": arrangement.position_ids_BT}
    output = copy(**inputs, use_cache=False, **{MODEL_INPUT: forward})
    # A model without an output head returns hidden states.
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits


def _arrangements(config: Any) -> tuple[Arrangement, Arrangement]:
    """Return a row of consecutive positions, and a batch with the same pairs shuffled among additional pairs."""
    generator = torch.Generator().manual_seed(_OTHER_ORDER)
    most = int(getattr(config, "vocab_size", None) or 2)
    ids = torch.randint(0, most, (2 * TOKENS,), generator=generator)
    # Avoid the padding id, about which Transformers warns.
    pad = getattr(config, "pad_token_id", None)
    ids = torch.where(ids == (-1 if pad is None else pad), (ids + 1) % most, ids)
    rows, tokens = _OTHER_ROWS
    others = TOKENS + torch.arange(rows * tokens - TOKENS)
    order = torch.cat([torch.arange(TOKENS), others])[torch.randperm(rows * tokens, generator=generator)]
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
    places = [torch.arange(size) for size in (batch_size, 1, q_length, kv_length)]
    visible = mask_function(*torch.meshgrid(*places, indexing="ij"))
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype)
    mask = mask.masked_fill(~torch.as_tensor(visible).expand(mask.shape), lowest)
    mask._mask_function = mask_function  # type: ignore[attr-defined]
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
        raise _Lost(f"{kind} does not receive the model's keyword arguments, which carry the document tables")
    result, tokens = forward.result, query_BHLD.shape[2]
    if key_BKLD.shape[2] != tokens or value_BKLE.shape[2] != tokens:
        raise _Lost(f"{kind} attends to keys other than the row's tokens")
    if dropout:
        result.add(f"{kind} uses attention dropout of {dropout}")
    for problem in refused_keywords(kwargs):
        result.add(f"{kind} {problem}")
    if query_BHLD.shape[0] == 1:
        qkv_BHLD = query_BHLD, key_BKLD, value_BKLE
        _record_layer(module, forward, qkv_BHLD, attention_mask, softcap, kwargs.get("is_causal"))
    # [B, H, L, D] -> [B, L, H, E]. The output depends on the query, key and value of the same token only.
    query_BL, key_BL = (_to_number(tensor, forward.noise) for tensor in (query_BHLD, key_BKLD))
    score_BL = query_BL * (1.0 if scaling is None else scaling) + key_BL
    value_BLKE = value_BKLE.transpose(1, 2)
    out_BLHE = value_BLKE.repeat_interleave(query_BHLD.shape[1] // key_BKLD.shape[1], dim=2)
    return out_BLHE + score_BL[:, :, None, None], None


def _probe_mixer(
    name: str, is_attention: bool, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for a supported recurrent layer: record the call and return the hidden states unchanged."""
    given = given_tables(kwargs)
    if not isinstance(given, _Forward):
        kind = type(module).__name__
        raise _Lost(f"{kind} does not receive the model's keyword arguments, which carry the document tables")
    given.result.mixers.add(name)
    return (hidden_states, None) if is_attention else hidden_states


def refused_keywords(kwargs: Mapping[str, Any]) -> list[str]:
    """Describe unsupported keyword arguments of an attention call, as phrases that follow the module's name."""
    odd = sorted(key for key, value in kwargs.items() if key not in _KNOWN_KEYWORDS and value is not None)
    return [f"passes {', '.join(odd)} to its attention, which no kernel supports"] if odd else []


def _record_layer(
    module: nn.Module,
    forward: _Forward,
    qkv_BHLD: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    softcap: float | None,
    is_causal: bool | None,
) -> None:
    kind, result, (query, key, value) = type(module).__name__, forward.result, qkv_BHLD
    if mask is None:
        result.add(f"{kind} receives no attention mask from its model")
        return
    mask_function = getattr(mask, "_mask_function", None)
    if mask_function is None:
        result.add(f"{kind} builds its own attention mask")
        return
    try:
        found = mask_of(mask_function, forward.window_tokens)
    except NotAWindow:
        result.add(f"the attention mask of {kind} is neither a sliding window nor causal local spans")
        return
    if is_causal is not None and is_causal != found.causal:
        result.add(f"{kind} passes is_causal={is_causal} to its attention, which its mask contradicts")
    layer = LayerAttention(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[3],
        value_size=value.shape[3],
        has_softcap=softcap is not None,
        **found._asdict(),
    )
    name = forward.names[id(module)]
    if result.layers.setdefault(name, layer) != layer:
        result.add(f"{kind} at {name} is called with different head sizes or windows in one forward")


def _to_number(tensor_BHLD: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    flat_BLF = tensor_BHLD.transpose(1, 2).flatten(2)
    width = flat_BLF.shape[2]
    return flat_BLF @ noise_like((width,), 3, noise).to(flat_BLF.dtype) / width


MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(batch, head, query, key) -> bool``, true if the query sees the key; see Transformers' ``masking_utils``."""

_LONGEST = 1 << 24
_PAIRS = 1 << 14


class NotAWindow(Exception):
    """Raised if a mask function does not describe the expected kind of mask."""


class Mask(NamedTuple):
    """The mask of an attention module; see `LayerAttention`."""

    window: int | None = None
    local_span: int | None = None
    causal: bool = True


def mask_of(mask_function: MaskFunction, num_tokens: int) -> Mask:
    """Determine a mask's kind by evaluating the mask on a row of ``num_tokens`` tokens.

    Raises:
        NotAWindow: The mask is neither a window on one or both sides nor causal local spans.
    """
    last = torch.tensor(num_tokens - 1)
    if bool(_visible(mask_function, torch.tensor(0), last)) or bool(_visible(mask_function, last - 1, last)):
        return Mask(window=window_of(mask_function, num_tokens, causal=False), causal=False)
    try:
        return Mask(window=window_of(mask_function, num_tokens))
    except NotAWindow:
        return Mask(local_span=local_span_of(mask_function, num_tokens))


def longer_than_any_window(settings: Mapping[str, Any]) -> int:
    """Return a row length greater than twice every integer in a configuration, ignoring integers above 16M."""
    return 2 * max((one for one in _integers(settings) if one <= _LONGEST), default=0) + 257


def _integers(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        return [one for inner in value.values() for one in _integers(inner)]
    if isinstance(value, list | tuple):
        return [one for inner in value for one in _integers(inner)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def window_of(mask_function: MaskFunction, num_tokens: int, *, causal: bool = True) -> int | None:
    """Determine the sliding window of a mask by evaluating the mask on a row of ``num_tokens`` tokens.

    Returns:
        Number of tokens that each token sees, including itself, or None if each token sees all earlier tokens. In a
        bidirectional mask, each token sees as many later tokens.

    Raises:
        NotAWindow: The mask is not causal, or not bidirectional if ``causal`` is false, or the visible tokens are not a
            window.
    """
    last = torch.tensor(num_tokens - 1)
    window = int(_visible(mask_function, last, torch.arange(num_tokens)).sum())
    if window == 0:
        raise NotAWindow

    def expected(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        is_late = keys > queries if causal else keys >= queries + window
        return (keys > queries - window) & ~is_late

    _compare(mask_function, num_tokens, lambda queries: queries - window, expected)
    if not causal:
        _compare(mask_function, num_tokens, lambda queries: queries + window, expected)
    return None if window == num_tokens else window


def local_span_of(mask_function: MaskFunction, num_tokens: int) -> int:
    """Determine the length of a mask's local spans by evaluating the mask on a row of ``num_tokens`` tokens.

    Attention is causal within each span. Transformers calls the spans chunks (``attention_chunk_size``). The row must
    be longer than two spans.

    Raises:
        NotAWindow: The mask does not consist of local spans.
    """
    everywhere = torch.arange(num_tokens)
    local_span = int(_visible(mask_function, everywhere, torch.tensor(0)).sum())
    if local_span == 0:
        raise NotAWindow

    def expected(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & (keys // local_span == queries // local_span)

    _compare(mask_function, num_tokens, lambda queries: queries - queries % local_span, expected)
    return local_span


def _compare(
    mask_function: MaskFunction,
    num_tokens: int,
    edges: Callable[[torch.Tensor], torch.Tensor],
    expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Raise ``NotAWindow`` if a mask differs from the expected mask at any sampled pair of positions."""
    generator = torch.Generator().manual_seed(3)
    anywhere = torch.randint(0, num_tokens, (_PAIRS,), generator=generator)
    far = torch.randint(0, num_tokens, (_PAIRS,), generator=generator)
    near = torch.randint(-2, 3, (_PAIRS,), generator=generator)
    first = torch.arange(min(num_tokens, 128))
    # In order: near the diagonal, near the window's edge, at the edge itself, anywhere, and all pairs of first tokens.
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
    # A mask function that ignores its arguments may return a scalar.
    return torch.as_tensor(mask_function(nothing, nothing, queries, keys)).expand(keys.shape)
