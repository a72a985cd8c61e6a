"""Counts how the routers of a mixture of experts distribute a step's tokens, and balances routers by their bias.

Forward hooks on the routers count the tokens of each expert and sum the entropy of each token's probabilities. Only
forward passes within `RouterWatch.counting` count, so layers that are recomputed in the backward pass and rows of an
evaluation do not. The sums of a step stay on the device, and are added up over ranks together with the step's losses.

Legend: T tokens of a router's call, N tokens of this rank, E experts, k experts that each token chooses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.compilation import not_compiled

_BIASES = ("e_score_correction_bias", "expert_bias")
_LOG_SCORES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda scores_TE: scores_TE.log_softmax(dim=-1),
    functional.logsigmoid,
    lambda scores_TE: functional.softplus(scores_TE).log() / 2,
    lambda scores_TE: scores_TE.clamp(min=torch.finfo(scores_TE.dtype).tiny).log(),
)
"""Logarithms of the functions that routers apply to their output: softmax, sigmoid, the square root of softplus
(DeepSeek-V4), and nothing if the recorded output already contains probabilities (Gemma 4)."""
_APART = 1e-3
"""Least difference between the errors of two of these logarithms for which the better one is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRouting:
    """How one layer's router distributed the document tokens of a step."""

    layer: int
    """Number of the layer, from 0."""
    imbalance: float
    """Tokens of the busiest expert over the mean of all experts; 1 if balanced."""
    dead: int
    """Number of experts that received no token."""
    entropy: float
    """Mean entropy of the tokens' probabilities over all experts, in nats."""


class RouterWatch:
    """Counts the tokens of each expert of a model, over the micro-batches of a step.

    The watch installs forward hooks, which must happen before the first forward pass. A model is covered if its routers
    are those that Transformers records as ``router_logits``, and if each of their calls returns the scores of all
    experts together with the chosen experts (or with scores that are 0 for experts that were not chosen).

    Args:
        model: The model. The hooks do not call modules, so ZeRO-3's trace does not change.
        bias_rate: ``optimizer.router_bias_rate``, or None to leave biases unchanged.

    Raises:
        UserError: ``bias_rate`` is set, but no router has a bias that balances it.
    """

    def __init__(self, model: nn.Module, bias_rate: float | None = None) -> None:
        refuse_no_bias(model, bias_rate)
        self._rate = bias_rate
        self.is_token_N: torch.Tensor | None = None
        """Whether each of this rank's tokens counts, as bool ``[N]``; None outside of `counting`."""
        self._routers = [
            _Router(watch=self, model=model, name=name, output=output) for name, output in _find_routers(model)
        ]
        self._handles = [model.get_submodule(one.name).register_forward_hook(one) for one in self._routers]
        for router in self._routers:
            if bias_rate is not None and (bias := router.bias) is not None:
                # Updates of 1e-3 would be rounded away in bf16.
                bias.data = bias.data.float()

    @contextmanager
    def counting(self, batch: ShardedBatch) -> Iterator[None]:
        """Count the document tokens of a forward pass within this context; filler rows have none.

        Args:
            batch: This rank's slice.

        Raises:
            UserError: ``bias_rate`` is set, but a router did not report each token exactly once.
        """
        self.is_token_N = (batch.document_lengths_BL > 0).flatten()
        for router in self._routers:
            router.num_seen = 0
        try:
            yield
        finally:
            num_tokens, self.is_token_N = self.is_token_N.numel(), None
        if any(router.num_seen != num_tokens for router in self._routers):
            self._give_up()

    def _give_up(self) -> None:
        """Stop watching a model whose routers can't be read. All ranks have the same model, so all give up."""
        if self._rate is not None:
            raise UserError(
                f"optimizer.router_bias_rate={self._rate}: the routers of this model do not report which experts each "
                "token chooses; remove optimizer.router_bias_rate"
            )
        for handle in self._handles:
            handle.remove()
        self._routers = []

    def take(self) -> list[torch.Tensor]:
        """Return this rank's sums since the previous call, as fp64 vectors whose elements add up over ranks.

        There is one vector ``[E + 1]`` for each router: the tokens of each expert, then the sum of the tokens'
        entropies.
        """
        return [router.take() for router in self._routers]

    def summary(self, sums: list[float]) -> tuple[LayerRouting, ...]:
        """Return each layer's routing from the elements of `take`'s vectors, summed over all ranks."""
        parts = torch.tensor(sums, dtype=torch.float64).split([one.num_experts + 1 for one in self._routers])
        return tuple(router.summary(part) for router, part in zip(self._routers, parts, strict=True))

    @torch.no_grad()
    def balance(self, sums: torch.Tensor) -> None:
        """Update the routers' biases by ``optimizer.router_bias_rate``, after an optimizer step that was applied.

        Each expert's bias grows by the rate if the expert received fewer tokens than the mean over experts, and shrinks
        by the rate if it received more (https://arxiv.org/abs/2408.15664, algorithm 1). The comparison is between
        integers, so that the update is the same on all ranks and for all layouts.

        Args:
            sums: Elements of `take`'s vectors, summed over all ranks.
        """
        if self._rate is None:
            return
        parts = sums.split([one.num_experts + 1 for one in self._routers])
        for router, part in zip(self._routers, parts, strict=True):
            if (bias := router.bias) is not None:
                tokens_E = part[:-1]
                too_few_E = torch.sign(tokens_E.sum() - tokens_E * router.num_experts)
                bias.add_(too_few_E.to(bias.dtype), alpha=self._rate)


@dataclass(kw_only=True, eq=False, slots=True)
class _Router:
    """Forward hook of one router, and its sums in the current step."""

    watch: RouterWatch
    model: nn.Module
    name: str
    output: int
    """Index of the scores in the router's output."""
    num_seen: int = 0
    """Number of tokens that the router has scored in this micro-batch."""
    num_experts: int = 0
    _top_k: int = 1
    _sums: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    _log_scores: Callable[[torch.Tensor], torch.Tensor] = _LOG_SCORES[0]
    _is_known: bool = False
    """Whether ``_log_scores`` is known to be the router's own function."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias that balances the router. A module may replace a buffer's tensor, so the tensor is not kept."""
        return _bias_of(self.model, self.name)

    @not_compiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Add the routing of a call, which may be one of several tiles."""
        is_token_N = self.watch.is_token_N
        if is_token_N is None:
            return
        with torch.no_grad():
            found = _read(module, output, self.output)
            if found is None:
                return
            scores_TE, weights_Tk, chosen_Tk = found
            is_token_T = is_token_N[self.num_seen : self.num_seen + len(scores_TE)]
            self.num_seen += len(scores_TE)
            if len(is_token_T) < len(scores_TE):
                return
            if not self._is_known:
                # A comparison on the host, in one call of an attempt unless all scores are almost equal.
                self._log_scores, self._is_known = _function_of(scores_TE, weights_Tk, chosen_Tk)
            if not self.num_experts:
                self.num_experts, self._top_k = scores_TE.shape[-1], chosen_Tk.shape[-1]
                self._sums = torch.zeros(self.num_experts + 1, dtype=torch.float64, device=scores_TE.device)
            counted = is_token_T.to(torch.float64)
            self._sums.scatter_add_(0, chosen_Tk.flatten(), counted.repeat_interleave(chosen_Tk.shape[-1]))
            log_TE = self._log_scores(scores_TE).log_softmax(dim=-1)  # Scores that are not from a softmax add up to 1.
            self._sums[-1] -= ((log_TE.exp() * log_TE).sum(dim=-1).double() * counted).sum()

    def take(self) -> torch.Tensor:
        sums = self._sums
        self._sums = torch.zeros_like(sums)
        return sums

    def summary(self, sums: torch.Tensor) -> LayerRouting:
        tokens_E, entropy = sums[:-1], float(sums[-1])
        total, numbered = float(tokens_E.sum()), _LAYER.search(self.name)
        assert numbered is not None
        return LayerRouting(
            layer=int(numbered[1]),
            imbalance=float(tokens_E.max()) * self.num_experts / total,
            dead=int((tokens_E == 0).sum()),
            entropy=entropy * self._top_k / total,
        )


def refuse_no_bias(model: nn.Module, bias_rate: float | None) -> None:
    """Raise an error if a run balances routers by their bias, but no router of the model has one.

    Args:
        model: The model, on any device.
        bias_rate: ``optimizer.router_bias_rate``.

    Raises:
        UserError: No router has such a bias.
    """
    if bias_rate is None or any(_bias_of(model, name) is not None for name, _ in _find_routers(model)):
        return
    raise UserError(
        f"optimizer.router_bias_rate={bias_rate}: the routers of {type(model).__name__} have no bias that balances "
        f"them (a buffer {' or '.join(_BIASES)}); remove optimizer.router_bias_rate, or set optimizer.router_loss"
    )


def _find_routers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the name of each router, and the index of the scores in its output."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import OutputRecorder

    outputs: dict[type[nn.Module], int] = {}
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) if isinstance(module, PreTrainedModel) else None
        recorder = (recorded or {}).get("router_logits")
        if isinstance(recorder, OutputRecorder):
            outputs[recorder.target_class] = recorder.index
    for name, module in model.named_modules():
        if type(module) in outputs and _LAYER.search(name):
            yield name, outputs[type(module)]


_LAYER = re.compile(r"\.(\d+)\.")


def _bias_of(model: nn.Module, router: str) -> torch.Tensor | None:
    """Return the bias that balances a router: a buffer of the router or of the MLP around the router."""
    for owner in (router, router.rpartition(".")[0]):
        buffers = dict(model.get_submodule(owner).named_buffers(recurse=False))
        if (found := next((buffers[name] for name in _BIASES if name in buffers), None)) is not None:
            return found
    return None


def _read(module: Any, output: Any, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return a router's scores ``[T, E]`` in fp32 or fp64, and each token's weights and experts ``[T, k]``, or None."""
    if not isinstance(output, tuple) or not torch.is_tensor(output[index]):
        return None
    scores_TE = output[index].flatten(0, -2)
    scores_TE = scores_TE.to(torch.promote_types(scores_TE.dtype, torch.float32))
    others = [one for place, one in enumerate(output) if place != index and torch.is_tensor(one) and one.dim() == 2]
    chosen_Tk = next((one for one in others if not one.is_floating_point() and len(one) == len(scores_TE)), None)
    weights = next((one for one in others if one.is_floating_point() and len(one) == len(scores_TE)), None)
    if weights is None:
        return None
    if chosen_Tk is None:
        # Llama 4's router returns the weights of all experts: 0 for those that were not chosen.
        weights, chosen_Tk = weights.topk(module.top_k, dim=-1)
    return (scores_TE, weights, chosen_Tk) if weights.shape == chosen_Tk.shape else None


def _function_of(
    scores_TE: torch.Tensor, weights_Tk: torch.Tensor, chosen_Tk: torch.Tensor
) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
    """Return the logarithm of the function that turns a router's scores into weights, and whether no other one fits.

    Routers may scale their weights, and divide them by their sum, so only the ratios of a token's weights are compared.
    Every function fits scores that are almost equal, as in a router whose weights are initialized with zeros.
    """
    weights = weights_Tk.to(scores_TE.dtype).clamp(min=torch.finfo(scores_TE.dtype).tiny).log()
    if weights.shape[-1] == 1 and not weights.any():
        return _LOG_SCORES[0], True  # A single weight that is divided by itself reveals nothing.

    def error(log_scores: Callable[[torch.Tensor], torch.Tensor]) -> float:
        apart_Tk = log_scores(scores_TE).gather(1, chosen_Tk) - weights
        # The weight of a single expert has no ratio.
        apart_Tk = apart_Tk - apart_Tk.mean(dim=-1, keepdim=True) if apart_Tk.shape[-1] > 1 else apart_Tk
        found = float(apart_Tk.abs().mean())
        return math.inf if math.isnan(found) else found

    errors = [error(one) for one in _LOG_SCORES]
    best, second = sorted(errors)[:2]
    return _LOG_SCORES[errors.index(best)], second - best > _APART
