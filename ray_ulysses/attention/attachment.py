"""Remembers what a model's modules had before Ulysses attention was attached, so that it can be put back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ray_ulysses.attention.documents import PackedDocuments, Tables
    from ray_ulysses.attention.kernels import Demand

_OURS = "_ray_ulysses_"
_NAME = f"{_OURS}attachment"


class _Missing:
    """Stands for an attribute that was not there; a class, since a copy of a model has the same."""


class Attachment:
    """What is changed in a model's modules; made before anything is.

    What was attached to the model before keeps what was noted then.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._handle: RemovableHandle | None = None
        self._before = [(module, dict(vars(module))) for module in model.modules()]
        self._earlier = self.of(model)
        self._changed: list[tuple[nn.Module, str, Any]] = []
        own = {id(getattr(module, "config", None)) for module in model.modules()}
        parts = {part: getattr(model.config, part) for part in model.config.sub_configs}
        self._attention: dict[str, Any] = {"": model.config._attn_implementation} | {
            name: part._attn_implementation for name, part in parts.items() if id(part) in own
        }
        if self._earlier is not None:
            self._attention, self._changed = self._earlier._attention, self._earlier._changed

    @staticmethod
    def of(model: nn.Module) -> Attachment | None:
        """Return what is attached to a model."""
        found: Attachment | None = vars(model).get(_NAME)
        return found

    def done(self, handle: RemovableHandle) -> None:
        """Note what is different now, and the hook that was registered; an earlier one is removed."""
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
        """Put everything back."""
        self.unhook(model)
        for module, name, was in self._changed:
            if was is _Missing:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = was
        for module in model.modules():
            # What was found out about the model since.
            for name in [name for name in vars(module) if name.startswith(_OURS)]:
                del vars(module)[name]
        model.set_attn_implementation(self._attention)

    def unhook(self, model: nn.Module) -> None:
        """Remove the hook alone, and forget what was attached."""
        assert self._handle is not None
        self._handle.remove()
        del vars(model)[_NAME]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """The batch's tables and the settings of every attention layer in one forward."""

    documents: PackedDocuments
    kernel: str
    local_tokens: int
    """Tokens of a row that this rank holds."""
    ulysses: str
    """Name of the group that heads are exchanged over; empty if one rank has all heads."""
    ulysses_rank: int
    ulysses_size: int
    ring: str
    """Name of the ring's group; empty without a ring."""
    head_groups: int
    """Number of parts in which the KV heads are exchanged and attended."""
    announce: Callable[[Demand], None]
    """Logs the kernel of each kind of layer once."""
    position_ids_BL: torch.Tensor | None = None
    """Positions in their documents of this rank's tokens; ``None`` if no layer needs them."""
    local_spans: Mapping[int, Tables] = field(default_factory=dict)
    """Per number of tokens, the tables of layers that cut documents into spans of that length."""
