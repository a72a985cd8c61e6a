"""Computes the routers' load-balancing loss over complete rows, whose tokens are sharded across ranks.

Transformers' mixture-of-experts models use the loss defined in https://arxiv.org/abs/2101.03961, equations 4 to 6, over
all layers at once: ``coefficient * E * sum over experts of (share of choices) * (mean probability)``. This module
defines the loss for each row over all its document tokens, independent of the number of ranks. The shares of choices
have no gradient, so they are first summed over the ranks that share a row. The loss is then linear in the summed
probabilities, and each rank computes the term for its own tokens.

Legend: B rows, L tokens of this rank's slice, N = B * L, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.engine.model_parts import ModelParts, NoTilesError, find_parts
from ray_ulysses.errors import UserError

SCORES_WANTED = {"output_router_logits": True}
"""Keyword argument that makes a model return router scores."""

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_FOUND = "_ray_ulysses_router_loss"
_MOST_EXPERTS = 4096
_ONLY = 1e4  # Logit of the probe's target token, large enough that the probe's cross-entropy is 0.


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLoss:
    """Parameters of a model's load-balancing loss."""

    num_experts: int
    top_k: int
    """Number of experts that each token chooses."""
    coefficient: float
    """Weight of the router loss relative to the mean cross-entropy."""


def set_router_loss(hf_config: Any, coefficient: float | None) -> Any:
    """Set the router-loss coefficient in a configuration. Call this function before building the model.

    Returns:
        The same configuration.

    Raises:
        UserError: The model has no router loss.
    """
    text = hf_config.get_text_config(decoder=True)
    name = next((one for one in _COEFFICIENTS if hasattr(text, one)), None)
    if coefficient and name is None:
        raise UserError(
            f"optimizer.router_loss={coefficient}: {text.model_type} has no router loss (its configuration lacks "
            f"{' or '.join(_COEFFICIENTS)}); remove optimizer.router_loss"
        )
    if coefficient is not None:
        text.output_router_logits = coefficient > 0
        if name is not None:
            setattr(text, name, coefficient)
    return hf_config


def router_loss_of(model: Any) -> RouterLoss | None:
    """Return the router loss that a model's configuration enables (``output_router_logits``), or None.

    The parameters are inferred by running the model's own forward on synthetic scores, so no list of architectures is
    needed.

    Raises:
        UserError: The model has no router loss, or uses a different formula.
    """
    if model is None or not getattr(model.config.get_text_config(decoder=True), "output_router_logits", False):
        return None
    # Transformers' forward reads the coefficient on every call, so a change invalidates the cached result.
    places = (model, model.config.get_text_config(decoder=True))
    coefficients = [getattr(place, name, None) for place in places for name in _COEFFICIENTS]
    found: RouterLoss | None
    before, found = vars(model).get(_FOUND, (None, None))
    if before != coefficients:
        found = _find(model)
        vars(model)[_FOUND] = (coefficients, found)
    return found


def router_loss_sum(output: Any, loss: RouterLoss, batch: ShardedBatch) -> torch.Tensor:
    """Return this rank's share of its rows' router losses, as an fp32 scalar.

    All ranks of ``sp`` must call this function. Over ``sp``, the results add up to each row's loss times the row's
    number of supervised tokens or, if the batch has label weights, times the sum of the row's label weights.

    Args:
        output: Output of the model or of its decoder. ``router_logits`` contains one ``[N, E]`` tensor of scores per
            layer.
        loss: The model's router loss.
        batch: This rank's slice.

    Raises:
        UserError: A router did not score each token exactly once.
    """
    scores: Sequence[torch.Tensor] = getattr(output, "router_logits", None) or ()
    is_token_BL = batch.document_lengths_BL > 0
    shapes = {tuple(one.flatten(0, -2).shape) for one in scores}
    wanted = (is_token_BL.numel(), loss.num_experts)
    if shapes != {wanted}:
        found = ", ".join(map(str, sorted(shapes))) or "nothing"
        raise UserError(
            f"the routers returned scores of shape {found} instead of {wanted} (tokens, experts), so the router loss "
            "can't be computed; set optimizer.router_loss: 0.0"
        )
    counts_BE = _choices(scores, loss.top_k, is_token_BL)
    num_supervised_B = (batch.labels_BL != IGNORE_INDEX).sum(dim=1, keepdim=True)
    # [B, E + 2] integers, so that the sum over ranks is exact.
    sums = torch.cat([counts_BE, is_token_BL.sum(dim=1, keepdim=True), num_supervised_B], dim=1)
    if batch.mesh.sp_size > 1:
        dist.all_reduce(sums, group=batch.mesh.group("sp"))
    *_, num_tokens_B, num_supervised_B = sums.split([loss.num_experts, 1, 1], dim=1)
    if batch.label_weights_BL is not None:
        num_supervised_B = torch.where(batch.labels_BL != IGNORE_INDEX, batch.label_weights_BL.double(), 0.0)
        num_supervised_B = num_supervised_B.sum(dim=1, keepdim=True)
        if batch.mesh.sp_size > 1:
            dist.all_reduce(num_supervised_B, group=batch.mesh.group("sp"))
    return _weighted(scores, loss, is_token_BL, sums[:, : loss.num_experts], num_tokens_B, num_supervised_B)


def _choices(scores: Sequence[torch.Tensor], top_k: int, is_token_BL: torch.Tensor) -> torch.Tensor:
    """Return how often each row's tokens choose each expert, over all layers; int64 ``[B, E]``."""
    num_rows = len(is_token_BL)
    counts_BE = torch.zeros(num_rows, scores[0].shape[-1], dtype=torch.int64, device=scores[0].device)
    counted = is_token_BL.long().repeat_interleave(top_k, dim=1)
    with torch.no_grad():
        for one in scores:
            # Like Transformers, rank probabilities rather than scores: low scores may tie at probability 0.
            chosen_Nk = _probabilities(one.flatten(0, -2)).topk(top_k, dim=-1).indices
            counts_BE.scatter_add_(1, chosen_Nk.view(num_rows, -1), counted)
    return counts_BE


def _weighted(
    scores: Sequence[torch.Tensor],
    loss: RouterLoss,
    is_token_BL: torch.Tensor,
    counts_BE: torch.Tensor,
    num_tokens_B1: torch.Tensor,
    num_supervised_B1: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of this rank's probabilities, each multiplied by its expert's share of choices."""
    tokens_B1 = num_tokens_B1.clamp(min=1).double() * len(scores)
    factor_B1 = loss.coefficient * loss.num_experts * num_supervised_B1.double()
    weights_BE = factor_B1 * (counts_BE / tokens_B1) / tokens_B1
    weights_NE = weights_BE.repeat_interleave(is_token_BL.shape[1], dim=0) if len(weights_BE) > 1 else weights_BE
    is_token_N1 = is_token_BL.reshape(-1, 1)
    parts = [_WeightedProbabilities.apply(one.flatten(0, -2), weights_NE, is_token_N1) for one in scores]  # type: ignore[no-untyped-call]
    return torch.stack(parts).sum()


def _probabilities(scores_NE: torch.Tensor) -> torch.Tensor:
    return scores_NE.to(torch.promote_types(scores_NE.dtype, torch.float32)).softmax(dim=-1)


class _WeightedProbabilities(torch.autograd.Function):
    """The weighted sum of a layer's probabilities. The scores, not the fp32 probabilities, are saved for backward."""

    @staticmethod
    def forward(ctx: Any, scores_NE: torch.Tensor, weights_NE: torch.Tensor, is_token_N1: torch.Tensor) -> torch.Tensor:
        probabilities_NE = _probabilities(scores_NE)
        weights_NE = weights_NE.to(probabilities_NE.dtype)
        ctx.save_for_backward(scores_NE, weights_NE, is_token_N1)
        return (probabilities_NE.mul_(weights_NE).sum(dim=-1, keepdim=True) * is_token_N1).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient with respect to the scores, using the softmax derivative ``p * (w - sum(p * w))``."""
        scores_NE, weights_NE, is_token_N1 = ctx.saved_tensors
        probabilities_NE = _probabilities(scores_NE)
        mean_N1 = (probabilities_NE * weights_NE).sum(dim=-1, keepdim=True)
        d_scores_NE = probabilities_NE.mul_(weights_NE - mean_N1).mul_(is_token_N1 * d_sum)
        return d_scores_NE.to(scores_NE.dtype), None, None


def _find(model: Any) -> RouterLoss:
    """Find the router-loss parameters that reproduce the model's own router loss for two sets of scores."""
    config = model.config.get_text_config(decoder=True)
    kind = f"{config.model_type} sets output_router_logits=True"
    way_out = "set optimizer.router_loss: 0.0, or output_router_logits: false in its configuration"
    try:
        parts = find_parts(model)
    except NoTilesError as error:
        raise UserError(
            f"{kind}, but the router loss requires a model that consists of one decoder and one output head and whose "
            f"forward was not replaced ({error}); {way_out}"
        ) from error
    has_loss = False
    # The number of experts is an integer attribute of the model or of its configuration.
    values = (*vars(model).values(), *vars(config).values())
    for num_experts in sorted({value for value in values if type(value) is int and 1 < value <= _MOST_EXPERTS}):
        try:
            small, large = _own_loss(parts, num_experts, 2, 11), _own_loss(parts, num_experts, 3, 17)
        except Exception:
            # Catch everything: a wrong number of experts can raise any exception.
            has_loss = True
            continue
        if small is None or large is None:
            continue
        has_loss = True
        for top_k in range(1, num_experts + 1):
            loss = RouterLoss(num_experts=num_experts, top_k=top_k, coefficient=1.0)
            if all(abs(_alone(one.scores, loss) - one.loss) <= 1e-5 * abs(one.loss) for one in (small, large)):
                # Round to fp32 precision, in which the forward multiplies.
                coefficient = float(f"{small.added / small.loss:.7g}") if small.loss else 0.0
                return RouterLoss(num_experts=num_experts, top_k=top_k, coefficient=coefficient)
    if has_loss:
        raise UserError(
            f"{kind}, but its router loss differs from the Switch Transformers loss over all layers, the only router "
            f"loss that can be computed exactly over the slices of a row; {way_out}"
        )
    raise UserError(f"{kind}, but the forward of {type(model).__name__} computes no router loss; {way_out}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """Synthetic router scores, the model's router loss for these scores, and this loss times the coefficient."""

    scores: tuple[torch.Tensor, ...]
    loss: float
    added: float


def _own_loss(parts: ModelParts, num_experts: int, num_layers: int, num_tokens: int) -> _Probe | None:
    """Run a model's forward on synthetic router scores; return None if the model has no router loss."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    generator = torch.Generator().manual_seed(num_layers)
    scores = tuple(torch.randn(num_tokens, num_experts, generator=generator) for _ in range(num_layers))
    config = parts.model.config.get_text_config(decoder=True)
    output = MoeModelOutputWithPast(
        last_hidden_state=torch.zeros(1, num_tokens, config.hidden_size),
        router_logits=scores,  # type: ignore[arg-type]
    )
    logits_1NV = torch.zeros(1, num_tokens, config.vocab_size)
    logits_1NV[..., 0] = _ONLY
    ids_1N = torch.zeros(1, num_tokens, dtype=torch.int64)
    inputs = {"input_ids": ids_1N, "labels": ids_1N, **SCORES_WANTED}
    with torch.no_grad():
        result = parts.finished(output, dict.fromkeys(parts.heads, lambda hidden: logits_1NV), (), inputs)
    loss = getattr(result, "aux_loss", None)
    return _Probe(scores=scores, loss=float(loss), added=float(result.loss)) if torch.is_tensor(loss) else None


def _alone(scores: Sequence[torch.Tensor], loss: RouterLoss) -> float:
    is_token_BL = torch.ones(1, len(scores[0]), dtype=torch.bool)
    one = torch.ones(1, 1, dtype=torch.int64)
    counts_BE = _choices(scores, loss.top_k, is_token_BL)
    return float(_weighted(scores, loss, is_token_BL, counts_BE, one * is_token_BL.shape[1], one))
