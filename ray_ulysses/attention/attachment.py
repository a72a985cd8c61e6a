"""Records the changes that `apply_ulysses` makes to a model, so that `remove_ulysses` can undo them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ray_ulysses.attention.documents import PackedDocuments, Tables
from ray_ulysses.attention.kernels import Demand

_OURS = "_ray_ulysses_"
_NAME = f"{_OURS}attachment"


class _Missing:
    """Marker for an attribute that did not exist. The marker is a class because ``deepcopy`` does not copy classes."""


class Attachment:
    """A record of the changes to a model's modules. It must be created before the first change.

    If the model already has an attachment, the new one takes over the original values recorded there.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._handle: RemovableHandle | None = None
        self._before = [(module, dict(vars(module))) for module in model.modules()]
        self._earlier = self.of(model)
        self._changed: list[tuple[nn.Module, str, Any]] = []
        own = {id(module.config) for module in model.modules() if getattr(module, "config", None) is not None}
        parts = {part: getattr(model.config, part) for part in model.config.sub_configs}
        self._attention: dict[str, Any] = {"": model.config._attn_implementation} | {
            name: part._attn_implementation for name, part in parts.items() if id(part) in own
        }
        if self._earlier is not None:
            self._attention, self._changed = self._earlier._attention, self._earlier._changed

    @staticmethod
    def of(model: nn.Module) -> Attachment | None:
        """Return the model's attachment, or None if Ulysses attention is not applied to the model."""
        found: Attachment | None = vars(model).get(_NAME)
        return found

    def done(self, handle: RemovableHandle) -> None:
        """Record the new hook and all attributes changed since this object was created, and remove any earlier hook."""
        noted = {(id(module), name) for module, name, _ in self._changed}
        for module, before in self._before:
            now = vars(module)
            for name in now.keys() | before.keys():
                was = before.get(name, _Missing)
                if now.get(name, _Missing) is not was and (id(module), name) not in noted:
                    self._changed.append((module, name, was))
        if self._earlier is not None and self._earlier._handle is not None:
            self._earlier._handle.remove()
        self._before, self._earlier, self._handle = [], None, handle
        vars(self._model)[_NAME] = self

    def undo(self, model: Any) -> None:
        """Restore the model's original attributes and attention implementations, and remove the hook."""
        self.unhook(model)
        for module, name, was in self._changed:
            if was is _Missing:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = was
        for module in model.modules():
            # Some attributes, such as the inspected adapters, are set after done() was called.
            for name in [name for name in vars(module) if name.startswith(_OURS)]:
                del vars(module)[name]
        model.set_attn_implementation(self._attention)

    def unhook(self, model: nn.Module) -> None:
        """Remove the hook and this record from the model, but do not restore the changed attributes."""
        assert self._handle is not None
        self._handle.remove()
        del vars(model)[_NAME]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """Document tables and attention settings for one forward pass, shared by all layers."""

    documents: PackedDocuments
    kernel: str
    local_tokens: int
    """Number of tokens per row on this rank."""
    ulysses: str
    """Name of the process group that exchanges heads; empty if every rank has all heads."""
    ulysses_rank: int
    ulysses_size: int
    ring: str
    """Name of the ring's process group; empty if there is no ring."""
    head_groups: int
    """Number of KV head groups, which are exchanged and attended to one after another."""
    announce: Callable[[Demand], None]
    """Callback that logs the kernel chosen for a `Demand`, once per distinct demand."""
    position_ids_BL: torch.Tensor | None = None
    """Position of each local token within its document, or None if no layer uses document positions."""
    local_spans: Mapping[int, Tables] = field(default_factory=dict)
    """Tables for layers with local spans (chunked attention), keyed by the span length in tokens."""
