"""Records the attributes of a model's modules before Ulysses attention is attached, so that they can be restored."""

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
    """Marks an attribute that did not exist; a class, since ``deepcopy`` does not copy classes."""


class Attachment:
    """The changes to a model's modules; create it before the first change.

    If the model already has an attachment, the original attributes are taken from it.
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
        """Return the model's attachment, if it has one."""
        found: Attachment | None = vars(model).get(_NAME)
        return found

    def done(self, handle: RemovableHandle) -> None:
        """Record the changes since creation and the registered hook; remove the hook of an earlier attachment."""
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
        """Restore all attributes."""
        self.unhook(model)
        for module, name, was in self._changed:
            if was is _Missing:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = was
        for module in model.modules():
            # Attributes that were set later, such as inspected adapters.
            for name in [name for name in vars(module) if name.startswith(_OURS)]:
                del vars(module)[name]
        model.set_attn_implementation(self._attention)

    def unhook(self, model: nn.Module) -> None:
        """Remove only the hook and the attachment."""
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
    """Name of the group over which heads are exchanged; empty if one rank has all heads."""
    ulysses_rank: int
    ulysses_size: int
    ring: str
    """Name of the ring's group; empty without a ring."""
    head_groups: int
    """Number of groups of KV heads, which are exchanged and attended one after another."""
    announce: Callable[[Demand], None]
    """Logs the kernel of each kind of layer once."""
    position_ids_BL: torch.Tensor | None = None
    """Positions of this rank's tokens in their documents; ``None`` if no layer needs them."""
    local_spans: Mapping[int, Tables] = field(default_factory=dict)
    """Tables for layers that cut documents into local spans, by the span's length in tokens."""
