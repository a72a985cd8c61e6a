"""Finds a model's decoder or encoder and its output head, and splits the model's own forward at the end of the decoder.

When a module runs over tiles, its router scores are recorded per tile. Transformers (5.20 to 5.23) collects router
scores with hooks, in a private list that exists while the decoder runs. Only this file accesses that list.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from ray_ulysses.errors import UserError

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


_OFF = "memory.loss_tile: off (causal_lm_loss(..., tile='off'))"
_INSTEAD = f"its loss can't be computed over tiles: set {_OFF}"


class NoTilesError(UserError):
    """Raised if a model's forward can't run over tiles of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """Decoder, output head and forward of a language model. A masked model's encoder is called the decoder here."""

    model: Any
    forward: Callable[..., Any]
    """The ``forward`` function of the model's class."""
    decoder: str
    """Name of the child module that maps token IDs to hidden states."""
    heads: dict[str, nn.Module]
    """Child modules that together map hidden states to logits, by name."""
    bare_heads: dict[str, nn.Module]
    """Stand-ins for the heads without hooks, called once per tile. The heads' own hooks gather weights only once."""

    def decoded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward up to the end of the decoder, and return the decoder's output."""

        def decode(decoder: Any, *args: Any, **kwargs: Any) -> Any:
            raise _Decoded(decoder(*args, **kwargs))

        try:
            self.forward(self._with({self.decoder: self._stand_in(decode)}), *args, **kwargs)
        except _Decoded as reached:
            output = reached.args[0]
        else:
            raise NoTilesError(f"{type(self.model).__name__}.forward does not call {self.decoder!r}; {_INSTEAD}")
        if not is_dataclass(output) or not hasattr(output, "last_hidden_state"):
            raise NoTilesError(
                f"the decoder of {type(self.model).__name__} returns {type(output).__name__}, which has no "
                f"last_hidden_state; {_INSTEAD}"
            )
        return output

    def logits_function(
        self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the forward after the decoder as a function from hidden states ``[1, T, H]`` to logits."""

        def logits_of(hidden_1TH: torch.Tensor) -> torch.Tensor:
            result = self.finished(replace(output, last_hidden_state=hidden_1TH), self.bare_heads, args, kwargs)
            refuse_auxiliary_loss(result)
            logits_1TV: torch.Tensor = result.logits
            return logits_1TV

        return logits_of

    def finished(
        self, output: Any, heads: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the model's own forward with ``output`` in place of the decoder's output."""
        decoder = self._stand_in(lambda decoder, *args, **kwargs: output)
        return self.forward(self._with({self.decoder: decoder, **heads}), *args, **kwargs)

    def _stand_in(self, call: Callable[..., Any]) -> _Decoder:
        return _Decoder(self.model.get_submodule(self.decoder), self.model.get_input_embeddings(), call)

    def _with(self, children: dict[str, Any]) -> Any:
        stand_in = object.__new__(type(self.model))
        # An instance attribute takes precedence over a child module, and does not have to be a module.
        stand_in.__dict__ = {**self.model.__dict__, **children}
        return stand_in


class _Decoder:
    """A stand-in for a decoder that calls another function and exposes the decoder's attributes.

    A descendant that contains the token embedding is replaced as well, because OPT's forward calls
    ``self.model.decoder``.
    """

    def __init__(self, decoder: Any, embeddings: Any, call: Callable[..., Any]) -> None:
        self._decoder, self._embeddings, self._call = decoder, embeddings, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._decoder, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._decoder, name)
        children = found.children() if hasattr(found, "children") else ()
        if any(module is self._embeddings for child in children for module in child.modules()):
            return _Decoder(found, self._embeddings, self._call)
        return found


class _Decoded(Exception):
    """Raised to stop a model's forward at the end of the decoder; carries the decoder's output."""


def refuse_auxiliary_loss(output: Any) -> None:
    """Raise a ``UserError`` if a model's output has an auxiliary loss, which is not a sum over tokens."""
    if getattr(output, "aux_loss", None) is not None:
        raise UserError(
            "the model returned an auxiliary (router) loss for this rank's slice; such losses can't be summed exactly "
            "over the slices of a row; set output_router_logits: false"
        )


def inner_model(model: Any) -> Any:
    """Return the outermost ``PreTrainedModel`` inside a model or engine, or None if there is none."""
    from transformers import PreTrainedModel

    if not isinstance(model, nn.Module):
        return None
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def find_parts(model: Any) -> ModelParts:
    """Find a model's decoder and output head.

    Raises:
        NoTilesError: The model has a different structure, or its forward was replaced.
    """
    name, forward = type(model).__name__, own_forward(model)
    embeddings, logits = model.get_input_embeddings(), model.get_output_embeddings()
    children = {name: child for name, child in model.named_children() if any(True for _ in child.parameters())}
    decoders = [name for name, child in children.items() if any(one is embeddings for one in child.modules())]
    heads = {name: child for name, child in children.items() if name not in decoders}
    has_logits = any(one is logits for child in heads.values() for one in child.modules())
    if len(decoders) != 1 or not has_logits or any(True for _ in model.named_parameters(recurse=False)):
        found = ", ".join(children) or "none"
        raise NoTilesError(
            f"{name} does not consist of one decoder and one output head (children with weights: {found}); {_INSTEAD}"
        )
    bare_heads = {name: unhooked(head) for name, head in heads.items()}
    return ModelParts(model=model, forward=forward, decoder=decoders[0], heads=heads, bare_heads=bare_heads)


def own_forward(module: Any, setting: str = _OFF) -> Callable[..., Any]:
    """Return the ``forward`` function of a module's class.

    Raises:
        NoTilesError: The module's ``forward`` was replaced.
    """
    kind = type(module)
    owner = next(one for one in kind.__mro__ if "forward" in vars(one))
    forward = vars(module).get("forward", vars(owner)["forward"])
    forward = getattr(forward, "__func__", forward)
    if "forward" in vars(module) or getattr(forward, "__module__", None) != owner.__module__:
        raise NoTilesError(
            f"the forward of {kind.__name__} was replaced by {getattr(forward, '__module__', forward)} (perhaps with "
            f"a fused kernel), but tiling requires the model's own forward; remove the replacement, or set {setting}"
        )
    own: Callable[..., Any] = forward
    return own


def unhooked(module: nn.Module) -> nn.Module:
    """Return a stand-in that shares a module's parameters but has no hooks on the module or its submodules.

    Only the hooks with which Transformers and `RouterWatch` record the outputs of routers are retained.
    """
    stand_in: nn.Module = object.__new__(type(module))
    children = {name: child if child is None else unhooked(child) for name, child in module._modules.items()}
    none: dict[str, Any] = {name: OrderedDict() for name in _HOOKS}
    hooks = module._forward_hooks.items()
    recorders = {key: hook for key, hook in hooks if getattr(hook, "__module__", None) in _RECORDERS}
    none["_forward_hooks"] = OrderedDict(recorders)
    stand_in.__dict__ = {**module.__dict__, **none, "_modules": children, "_compiled_call_impl": None}
    return stand_in


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward within a block. Hooks of the module still run."""
    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


_RECORDERS = ("transformers.utils.output_capturing", "ray_ulysses.engine.router_health")
"""Modules whose hooks record the outputs of routers: Transformers' collector, and `RouterWatch`."""
_SCORES = "router_logits"


def is_recording() -> bool:
    """Return whether Transformers is currently collecting router scores."""
    return _SCORES in (_collector().get() or {})


def recorded(call: Callable[[], Any]) -> tuple[Any, list[torch.Tensor]]:
    """Call a function, and return its result and router scores. Transformers does not receive the scores."""
    scores: list[torch.Tensor] = []
    token = _collector().set({_SCORES: scores})
    try:
        return call(), scores
    finally:
        _collector().reset(token)


def record(scores: Sequence[torch.Tensor]) -> None:
    """Append scores to the router scores that Transformers is collecting."""
    if scores:
        _collector().get()[_SCORES].extend(scores)


def _collector() -> Any:
    from transformers.utils.output_capturing import _active_collector

    return _active_collector
