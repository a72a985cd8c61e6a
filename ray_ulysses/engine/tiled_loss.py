"""Computes the loss over tiles of tokens, so that the logits of a complete row never exist at once.

The model's own forward runs up to the end of the decoder. The output head is then called once with all hidden states
and loops over tiles, so that the engine gathers the head's weights only once. Each tile runs the rest of the model's
forward (scale, soft-cap, bias) and the cross-entropy, and immediately computes the gradients of hidden states and
weights. The backward pass only multiplies these gradients by the gradient of the loss.

Legend: B rows, L tokens of this rank's slice, N = B * L, T tokens of a tile, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.engine.model_parts import ModelParts, replaced_forward
from ray_ulysses.engine.router_loss import SCORES_WANTED, RouterLoss, router_loss_sum
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.compilation import not_compiled
from ray_ulysses.parallel.layout import TileSetting, loss_tile_tokens

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from the labels' log-probabilities, fp32 ``[T]``, and the labels, int64 ``[T]``, to each token's loss."""


@dataclass(slots=True, kw_only=True)
class TiledLoss:
    """One forward pass of a model whose loss, including z-loss and router loss, is computed over tiles."""

    parts: ModelParts
    batch: ShardedBatch
    tile: TileSetting
    wants_predictions: bool = False
    z_loss: float = 0.0
    router_loss: RouterLoss | None = None
    token_loss: TokenLoss | None = None
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function from each token's cross-entropy to its weight, both fp32 ``[N]``. All tiles are computed once before."""
    losses_N: torch.Tensor = field(init=False)
    """fp32 cross-entropy or `token_loss` at each position, set by the forward pass; 0 where the label is ignored."""
    z_losses_N: torch.Tensor | None = field(init=False, default=None)
    """fp32 z-loss at each position, or None if the z-loss is disabled."""
    router_loss_sum: torch.Tensor | None = field(init=False, default=None)
    """fp32 scalar: this rank's share of the router loss, or None if the router loss is disabled."""
    predictions_N: torch.Tensor | None = field(init=False, default=None)
    """int64 IDs of the most probable tokens, or None unless ``wants_predictions`` is set."""
    _logits_of: Callable[[torch.Tensor], torch.Tensor] | None = field(init=False, default=None)

    def run(self, model: Callable[..., Any]) -> torch.Tensor:
        """Call the model or the engine that wraps the model, and return the sum of all losses as an fp32 scalar."""
        heads = list(self.parts.heads.values())
        with ExitStack() as replaced:
            replaced.enter_context(replaced_forward(self.parts.model, self._forward))
            # Each head calls the next one with the same hidden states, so that the hooks of all heads have run.
            forwards: list[Callable[..., Any]] = [*heads[1:], self._head_forward]
            for head, following in zip(heads, forwards, strict=True):
                replaced.enter_context(replaced_forward(head, following))
            loss_sum: torch.Tensor = model(**self.batch.model_inputs(), **self._scores(True))
        return loss_sum

    @partial(not_compiled, recursive=False)
    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.parts.decoded(args, kwargs)
        # Disable router scores for the rest of the forward, which would otherwise compute a router loss per tile.
        self._logits_of = self.parts.logits_function(output, args, {**kwargs, **self._scores(False)})
        # Call the head with its hooks, which gather the weights. The hooks expect a positional tensor argument.
        loss_sum: torch.Tensor = next(iter(self.parts.heads.values()))(output.last_hidden_state)
        if self.router_loss is None:
            return loss_sum
        self.router_loss_sum = router_loss_sum(output, self.router_loss, self.batch)
        return loss_sum + self.router_loss_sum

    def _scores(self, wanted: bool) -> dict[str, bool]:
        return {} if self.router_loss is None else dict.fromkeys(SCORES_WANTED, wanted)

    @not_compiled
    def _head_forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        for name, head in self.parts.heads.items():
            _refuse_ungathered(name, head)
        # Heads may share weights.
        found = dict.fromkeys(weight for head in self.parts.heads.values() for weight in head.parameters())
        weights = [weight for weight in found if weight.requires_grad]
        loss_sum: torch.Tensor = _SumOfTiles.apply(  # type: ignore[no-untyped-call]
            self, torch.is_grad_enabled(), hidden_BLH.flatten(0, 1), *weights
        )
        return loss_sum

    def gradients(
        self, hidden_NH: torch.Tensor, weights: tuple[torch.Tensor, ...], wants_gradients: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Process all tiles, and return the summed loss's gradients. Weight gradients are summed in fp32."""
        labels_N, weights_BL = self.batch.labels_BL.flatten(), self.batch.label_weights_BL
        weights_N, num_tokens = None if weights_BL is None else weights_BL.flatten(), len(labels_N)
        self.losses_N = torch.empty(num_tokens, dtype=torch.float32, device=hidden_NH.device)
        if self.wants_predictions:
            self.predictions_N = torch.empty_like(labels_N)
        if self.z_loss:
            self.z_losses_N = torch.empty_like(self.losses_N)
        d_hidden_NH = torch.empty_like(hidden_NH) if wants_gradients and hidden_NH.requires_grad else None
        d_weights: list[torch.Tensor | None] = [None] * len(weights)
        step = self._tile_tokens(num_tokens)
        parts = [slice(start, start + step) for start in range(0, num_tokens, step)]
        if self.weigh is not None:
            with torch.no_grad():
                for part in parts:
                    self.losses_N[part] = self._losses(hidden_NH[part], part)[0]
                weights_N = self.weigh(self.losses_N)
        for part in parts:
            hidden_TH = hidden_NH[part].detach()
            wanted = [*weights] if d_hidden_NH is None else [hidden_TH.requires_grad_(), *weights]
            with torch.set_grad_enabled(wants_gradients and bool(wanted)):
                losses_T, z_losses_T = self._losses(hidden_TH, part)
                whole_T = losses_T if z_losses_T is None else losses_T + z_losses_T
            scales_T = None if weights_N is None else weights_N[part].to(losses_T.dtype)
            for kept_N, one_T in ((self.losses_N, losses_T), (self.z_losses_N, z_losses_T)):
                if kept_N is not None and one_T is not None:
                    kept_N[part] = one_T.detach() if scales_T is None else one_T.detach() * scales_T
            del losses_T, z_losses_T, one_T
            if not whole_T.requires_grad:
                continue
            ones_T = torch.ones_like(whole_T) if scales_T is None else scales_T
            found = torch.autograd.grad(whole_T, wanted, ones_T, allow_unused=True)
            del whole_T
            if d_hidden_NH is not None:
                d_hidden_NH[part] = found[0]
            add_gradients(d_weights, found[len(wanted) - len(weights) :])
            # Free the gradients before the next tile: the head's gradients are as large as the head.
            del found
        return d_hidden_NH, d_weights

    def _losses(self, hidden_TH: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self._logits_of is not None
        logits_TV = self._logits_of(hidden_TH[None])[0]
        if self.predictions_N is not None:
            self.predictions_N[part] = logits_TV.detach().argmax(dim=-1)
        return token_losses(logits_TV, self.batch.labels_BL.flatten()[part], self.z_loss, self.token_loss)

    def _tile_tokens(self, num_tokens: int) -> int:
        width = getattr(self.parts.model.get_output_embeddings(), "out_features", None)
        return loss_tile_tokens(self.tile, num_tokens, width or self.parts.model.config.get_text_config().vocab_size)


def token_losses(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, z_loss: float = 0.0, token_loss: TokenLoss | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return each token's fp32 cross-entropy, or its ``token_loss``, and its z-loss, which is None if ``z_loss`` is 0.

    The z-loss is ``z_loss * log(Z)**2``, where ``Z`` is the softmax denominator. The z-loss keeps ``log(Z)`` close to 0
    (https://arxiv.org/abs/2204.02311, section 5). All losses are 0 where the label is ignored.
    """
    losses_T, z_losses_T = _cross_entropy(logits_TV.float(), labels_T, z_loss)
    if token_loss is None:
        return losses_T, z_losses_T
    is_counted_T = labels_T != IGNORE_INDEX
    # An ignored token has the log-probability 0, where the gradient of a token's loss may be infinite.
    log_probs_T = torch.where(is_counted_T, -losses_T, -1.0)
    own_T = token_loss(log_probs_T, torch.where(is_counted_T, labels_T, 0))
    return torch.where(is_counted_T, own_T, 0.0), z_losses_T


def _cross_entropy(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not z_loss:
        losses_T = torch.nn.functional.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none")
        return losses_T, None
    # Both losses share one log-sum-exp, so that the backward pass needs only one extra tensor of the logits' size.
    log_z_T = logits_TV.logsumexp(dim=-1)
    is_counted_T = labels_T != IGNORE_INDEX
    of_label_T = logits_TV.gather(-1, torch.where(is_counted_T, labels_T, 0)[:, None])[:, 0]
    zero = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
    losses_T = torch.where(is_counted_T, log_z_T - of_label_T, zero)
    return losses_T, torch.where(is_counted_T, z_loss * log_z_T.square(), zero)


class _SumOfTiles(torch.autograd.Function):
    """The sum of all tiles' losses. Gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, loss: TiledLoss, wants_gradients: bool, hidden_NH: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = loss.gradients(hidden_NH, weights, wants_gradients)
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.step = loss._tile_tokens(len(hidden_NH))
        return loss.losses_N.sum() if loss.z_losses_N is None else loss.losses_N.sum() + loss.z_losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Multiply the stored gradients by the gradient of the loss, in place."""
        if ctx.gradients is None:
            raise RuntimeError(
                "the tiled loss supports only one backward pass; to run a second one (retain_graph=True), set "
                "memory.loss_tile: off (causal_lm_loss(..., tile='off'))"
            )
        (d_hidden_NH, d_weights), ctx.gradients = ctx.gradients, None
        if d_hidden_NH is not None:
            # Multiply in fp32: bf16 would round the scalar.
            for d_hidden_TH in d_hidden_NH.split(ctx.step):
                d_hidden_TH.copy_(d_hidden_TH.float() * d_loss)
        scaled = [
            None if one is None else one.mul_(d_loss).to(dtype)
            for one, dtype in zip(d_weights, ctx.dtypes, strict=True)
        ]
        return None, None, d_hidden_NH, *scaled


def add_gradients(sums: list[torch.Tensor | None], parts: Sequence[torch.Tensor | None]) -> None:
    """Add a tile's gradients to fp32 sums. In bf16, the rounding error would grow with the number of tiles."""
    for place, part in enumerate(parts):
        if part is None:
            continue
        total = sums[place]
        if total is None:
            sums[place] = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
        else:
            total.add_(part)


def _refuse_ungathered(child: str, head: nn.Module) -> None:
    """Raise if ZeRO-3 has not gathered the weights of the head's submodules."""
    for name, weight in head.named_parameters():
        status = getattr(weight, "ds_status", None)
        if status is not None and status.name != "AVAILABLE":
            raise UserError(
                f"ZeRO-3 has not gathered the output head's {name}, but the tiled loss needs all weights of the head; "
                f"before building the engine, call deepspeed.utils.set_z3_leaf_module(model.{child}, True), or use "
                "causal_lm_loss(..., tile='off')"
            )
