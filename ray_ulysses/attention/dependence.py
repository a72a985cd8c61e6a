"""Finds results of a forward that depend on more than their own token, by changing the other tokens.

Without attention, a decoder maps each pair of a token and its position to a result. Called twice with the same pairs in
different rows and places and among different other tokens, the model and every module must return the same result for
each pair. Otherwise the result was mixed along the sequence or the batch, depends on the row's start or length, or is
random, regardless of the operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from ray_ulysses.attention.noise_model import noise_like

_WIDTH = 6
# Rounding errors are 1e-16, and 1e-7 in single elements that a cast to fp32 rounds the other way.
_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """The pairs of a token and its position in a batch."""

    pairs_BT: torch.Tensor
    """Index of each pair."""
    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor

    @classmethod
    def of(cls, pairs_BT: torch.Tensor, ids_P: torch.Tensor, num_positions: int) -> Self:
        """Arrange pairs; the position of a pair is its index modulo the number of positions."""
        return cls(pairs_BT=pairs_BT, input_ids_BT=ids_P[pairs_BT], position_ids_BT=pairs_BT % num_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """The input and output of a module, projected to a few dims."""

    name: str
    kind: str
    input_BTW: torch.Tensor | None
    output_BTW: torch.Tensor | None


class CallRecorder:
    """Records every call of every module, projecting its first input and output onto noise.

    Attributes:
        calls: Per arrangement, in the order in which calls ended, so that a module precedes its parent.
    """

    def __init__(self, model: nn.Module, noise: torch.Tensor) -> None:
        """Register hooks on every module of a model."""
        self.calls: list[list[ModuleCall]] = []
        self._shape: tuple[int, int] = (0, 0)
        self._noise = noise
        self._inputs: list[torch.Tensor | None] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def begin(self, arrangement: Arrangement) -> None:
        """Start recording the calls of an arrangement."""
        self.calls.append([])
        self._shape = tuple(arrangement.pairs_BT.shape)  # type: ignore[assignment]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.append(self._projected((*args, *kwargs.values())))

    def _after(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A model's output is a mapping; a layer's hidden states are the first of a tuple.
            values = tuple(output.values()) if isinstance(output, dict) else output
            self.calls[-1].append(
                ModuleCall(
                    name=name,
                    kind=type(module).__name__,
                    input_BTW=self._inputs.pop(),
                    output_BTW=self._projected(tuple(values) if isinstance(values, list | tuple) else (values,)),
                )
            )

        return record

    def _projected(self, values: tuple[Any, ...]) -> torch.Tensor | None:
        """Return ``[B, T, W]`` of the first tensor with one entry per token, or ``None``."""
        rows, tokens = self._shape
        for tensor in values:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or not tensor.is_floating_point():
                continue
            if tensor.shape[:2] != (rows, tokens):
                if tensor.shape[0] != rows * tokens:
                    continue
                # [B * T, F] -> [B, T, F]
                tensor = tensor.unflatten(0, (rows, tokens))
            flat_BTF = tensor.detach().flatten(2) if tensor.dim() > 2 else tensor.detach().unsqueeze(-1)
            projected_BTW: torch.Tensor = flat_BTF.double() @ noise_like((flat_BTF.shape[2], _WIDTH), 1, self._noise)
            return projected_BTW
        return None

    def find_mixing(self, places: Sequence[Arrangement]) -> ModuleCall | None:
        """Return the innermost module whose outputs differ for some pair although its inputs agree.

        Returns:
            Its call with the second arrangement, or ``None`` if there is none.
        """
        before, after = self.calls
        earlier = dict(_numbered(before))
        for place, call in _numbered(after):
            other = earlier.get(place)
            # Tokens sorted by expert are not in rows; they are compared once they are back in rows.
            if other is None or other.output_BTW is None or call.output_BTW is None:
                continue
            before_BTW, after_BTW = other.input_BTW, call.input_BTW
            inputs_agree = before_BTW is None or after_BTW is None or agree(before_BTW, after_BTW, places)
            if inputs_agree and not agree(other.output_BTW, call.output_BTW, places):
                return call
        return None


def _numbered(calls: list[ModuleCall]) -> list[tuple[tuple[str, int], ModuleCall]]:
    """Return each call, keyed by the module's name and the index of its call."""
    counts: Counter[str] = Counter()
    numbered = []
    for call in calls:
        numbered.append(((call.name, counts[call.name]), call))
        counts[call.name] += 1
    return numbered


def agree(first_BTF: torch.Tensor, second_BTF: torch.Tensor, places: Sequence[Arrangement]) -> bool:
    """Return whether each pair has the same result in both arrangements."""
    first, second = places
    if first_BTF.shape[:2] != first.pairs_BT.shape or second_BTF.shape[:2] != second.pairs_BT.shape:
        return False
    by_pair_PF = torch.empty_like(first_BTF.flatten(0, 1))
    by_pair_PF[first.pairs_BT.flatten()] = first_BTF.flatten(0, 1)
    known_BT = second.pairs_BT < len(by_pair_PF)
    wanted, found = by_pair_PF[second.pairs_BT[known_BT]], second_BTF[known_BT]
    # NaN does not agree with anything.
    return bool(((found - wanted).norm(dim=-1) <= _TOLERANCE * wanted.norm(dim=-1)).all())
