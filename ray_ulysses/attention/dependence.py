"""Which results of a forward depend on more than their own token, found by changing the others.

A decoder without its attention maps each pair of a token and its position to a result. Called twice, with the same
pairs in other rows, places, numbers and company, it must give each pair the same result, in the whole and in every
module. What does not was mixed along the sequence or the batch, counted from the row's start or its length, or drawn
at random, by whatever operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from ray_ulysses.attention.stand_in import noise_like

_WIDTH = 6
# Rounding is 1e-16, and 1e-7 in the single elements that a cast to fp32 happens to round the other way.
_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Where the pairs of a token and its position are in a batch.

    Attributes:
        pairs_BT: Number of each pair in the row.
        input_ids_BT: Its token.
        position_ids_BT: Its position.
    """

    pairs_BT: torch.Tensor
    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor

    @classmethod
    def of(cls, pairs_BT: torch.Tensor, ids_P: torch.Tensor, num_positions: int) -> Self:
        """Lay out pairs; the position of a pair is its number modulo the number of positions."""
        return cls(pairs_BT=pairs_BT, input_ids_BT=ids_P[pairs_BT], position_ids_BT=pairs_BT % num_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """What went into a module and came out of it, in short.

    Attributes:
        name: The module's name.
        kind: Its class.
        given_BTW: Its first input.
        result_BTW: Its first output.
    """

    name: str
    kind: str
    given_BTW: torch.Tensor | None
    result_BTW: torch.Tensor | None


class Passages:
    """Takes down each call of each module, as a projection of its first input and output onto noise.

    Attributes:
        calls: Per arrangement, in the order in which calls ended: a module comes before the one that it is part of.
    """

    def __init__(self, model: nn.Module, noise: torch.Tensor) -> None:
        """Watch every module of a model from now on."""
        self.calls: list[list[Passage]] = []
        self._shape: tuple[int, int] = (0, 0)
        self._noise = noise
        self._given: list[torch.Tensor | None] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def begin(self, arrangement: Arrangement) -> None:
        """Start a list of calls, before the model is called with an arrangement."""
        self.calls.append([])
        self._shape = tuple(arrangement.pairs_BT.shape)  # type: ignore[assignment]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given.append(self._in_short((*args, *kwargs.values())))

    def _after(self, name: str) -> Any:
        def take_down(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A model's output is a mapping; hidden states of others are the first of a tuple.
            values = tuple(output.values()) if isinstance(output, dict) else output
            self.calls[-1].append(
                Passage(
                    name=name,
                    kind=type(module).__name__,
                    given_BTW=self._given.pop(),
                    result_BTW=self._in_short(tuple(values) if isinstance(values, list | tuple) else (values,)),
                )
            )

        return take_down

    def _in_short(self, values: tuple[Any, ...]) -> torch.Tensor | None:
        """Return ``[B, T, W]`` of the first tensor of a row's tokens, or ``None`` where there is none."""
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
            short_BTW: torch.Tensor = flat_BTF.double() @ noise_like((flat_BTF.shape[2], _WIDTH), 1, self._noise)
            return short_BTW
        return None

    def where_mixed(self, places: Sequence[Arrangement]) -> Passage | None:
        """Return the innermost module that was given the same for each pair and made something else of it.

        Args:
            places: Both arrangements; in the first every pair is once.

        Returns:
            Its call with the second arrangement, or ``None`` if there is none.
        """
        before, after = self.calls
        earlier = dict(_numbered(before))
        for place, call in _numbered(after):
            other = earlier.get(place)
            # Tokens that are sorted among experts are in no rows, and judged where they are back in them.
            if other is None or other.result_BTW is None or call.result_BTW is None:
                continue
            given = (other.given_BTW, call.given_BTW)
            is_given_the_same = given[0] is None or given[1] is None or agree(given[0], given[1], places)
            if is_given_the_same and not agree(other.result_BTW, call.result_BTW, places):
                return call
        return None


def _numbered(calls: list[Passage]) -> list[tuple[tuple[str, int], Passage]]:
    """Return each call with the module's name and the number of its call."""
    counts: Counter[str] = Counter()
    numbered = []
    for call in calls:
        numbered.append(((call.name, counts[call.name]), call))
        counts[call.name] += 1
    return numbered


def agree(first_BTF: torch.Tensor, second_BTF: torch.Tensor, places: Sequence[Arrangement]) -> bool:
    """Return whether each pair of both arrangements has the same result.

    Args:
        first_BTF: Results of the first arrangement, in which every pair is once.
        second_BTF: Results of the second.
        places: Both arrangements.
    """
    first, second = places
    if first_BTF.shape[:2] != first.pairs_BT.shape or second_BTF.shape[:2] != second.pairs_BT.shape:
        return False
    by_pair_PF = torch.empty_like(first_BTF.flatten(0, 1))
    by_pair_PF[first.pairs_BT.flatten()] = first_BTF.flatten(0, 1)
    known_BT = second.pairs_BT < len(by_pair_PF)
    wanted, found = by_pair_PF[second.pairs_BT[known_BT]], second_BTF[known_BT]
    # Not a number where one is expected is no agreement.
    return bool(((found - wanted).norm(dim=-1) <= _TOLERANCE * wanted.norm(dim=-1)).all())
