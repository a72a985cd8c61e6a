"""Computes the loss as a sum over tokens, and the scale that makes an engine's averaged gradient exact.

The loss is the cross-entropy of the logits, plus the z-loss set by ``optimizer.z_loss`` and the load-balancing loss of
:mod:`ray_ulysses.engine.router_loss`. A model whose own forward adds a different loss, such as Bamba's z-loss, is
refused, because that loss would be ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch, held_document_numbers
from ray_ulysses.attention.ulysses import refuse_visible_labels
from ray_ulysses.engine.model_parts import ModelParts, NoTilesError, find_parts, inner_model, refuse_auxiliary_loss
from ray_ulysses.engine.router_loss import SCORES_WANTED, RouterLoss, router_loss_of, router_loss_sum
from ray_ulysses.engine.tiled_loss import TiledLoss, TokenLoss, token_losses
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.layout import TileSetting
from ray_ulysses.parallel.mesh import SequenceMesh

_log = get_logger(__name__)

DocumentLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from the documents' summed log-probabilities and numbers of labels, fp64 ``[D]``, to their summed loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Loss and prediction at each position of this rank's slice."""

    losses_BL: torch.Tensor
    """fp32 cross-entropy in nats, multiplied by the label's weight; 0 where the label is ignored."""
    predictions_BL: torch.Tensor
    """int64 ID of the most probable next token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLoss:
    """Training loss of this rank's slice, as sums over tokens."""

    objective_sum: torch.Tensor
    """fp32 scalar to differentiate at most once: the sum of cross-entropy, z-loss and router loss."""
    loss_sum: torch.Tensor
    """fp32 scalar, detached: cross-entropy in nats, or the token loss."""
    z_loss_sum: torch.Tensor
    """fp32 scalar, detached: z-loss including its coefficient; 0 if the z-loss is disabled."""
    router_loss_sum: torch.Tensor
    """fp32 scalar, detached: this rank's share of the rows' router losses including the coefficient, each row weighted
    by its number of supervised tokens; 0 if the router loss is disabled."""
    num_tokens: torch.Tensor
    """int64 scalar: number of supervised tokens."""
    losses_N: torch.Tensor
    """The terms of `loss_sum`, fp32, detached, [B * L]; 0 where the label is ignored."""


def causal_lm_loss(
    model: Callable[..., Any], batch: ShardedBatch, *, tile: TileSetting = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward pass and return this rank's summed loss and number of supervised tokens.

    The loss is `training_loss` without a z-loss: the cross-entropy, plus the router loss if the model's configuration
    sets ``output_router_logits``. If the batch's labels are not shifted, it is the loss of a masked language model. All
    ranks of ``sp`` must call this function.

    Returns:
        ``loss_sum``: fp32 scalar in nats, differentiable once. ``num_tokens``: int64 scalar.

    Raises:
        UserError: See :func:`training_loss`.
    """
    found = training_loss(model, batch, tile=tile)
    return found.objective_sum, found.num_tokens


def training_loss(
    model: Callable[..., Any],
    batch: ShardedBatch,
    *,
    tile: TileSetting = "auto",
    z_loss: float = 0.0,
    token_loss: TokenLoss | None = None,
    document_loss: DocumentLoss | None = None,
) -> TrainingLoss:
    """Run the forward pass and return the loss of this rank's slice, as sums over tokens.

    All ranks of ``sp`` must call this function. If a rank has only ignored labels, its loss is 0 but can still be
    differentiated, so that the rank joins all collectives. Logits are computed over tiles of tokens, and the output
    head's gradients are computed during the forward pass; ranks may have different numbers of tiles.

    If the model's configuration sets ``output_router_logits``, the routers' load-balancing loss is added. The
    load-balancing loss is defined per row, over all document tokens; see :mod:`ray_ulysses.engine.router_loss`.

    Args:
        model: The model, or the engine that wraps the model.
        batch: This rank's slice.
        tile: Number of tokens whose logits exist at a time; see `parallel.layout.loss_tile_tokens`. With ``auto``, a
            single tile is used if the model has a structure other than a decoder and an output head, or if its forward
            was replaced.
        z_loss: Coefficient of the z-loss; see :func:`ray_ulysses.engine.tiled_loss.token_losses`.
        token_loss: Loss of each token in place of the cross-entropy.
        document_loss: Loss in place of the cross-entropy, as a function of each document's summed log-probability. Only
            the gradient of ``objective_sum`` is this loss's, and the values have no meaning. Excludes ``z_loss``,
            ``token_loss`` and label weights.

    Raises:
        UserError: The model's own forward adds another loss, the loss can't be tiled, or a wrapper rounds the loss.
    """
    num_tokens = (batch.labels_BL != IGNORE_INDEX).sum()
    refuse_visible_labels(inner_model(model), batch)
    refuse_own_loss(inner_model(model))
    router_loss = router_loss_of(inner_model(model))
    assert document_loss is None or not (z_loss or token_loss or batch.label_weights_BL is not None)
    weigh = None if document_loss is None else partial(_token_weights, batch, document_loss)
    parts = _tiled_parts(model, tile)
    if parts is not None:
        tiled = TiledLoss(
            parts=parts, batch=batch, tile=tile, z_loss=z_loss, router_loss=router_loss, token_loss=token_loss,
            weigh=weigh,
        )  # fmt: skip
        objective_sum = tiled.run(model)
        _refuse_rounded(objective_sum)
        losses_N, z_losses_N, router_sum = tiled.losses_N, tiled.z_losses_N, tiled.router_loss_sum
    else:
        outputs = _whole_outputs(model, batch, router_loss)
        losses_N, z_losses_N = _whole_losses(outputs.logits, batch, z_loss, token_loss)
        losses_N = losses_N if weigh is None else losses_N * weigh(losses_N.detach())
        objective_sum = losses_N.sum() if z_losses_N is None else losses_N.sum() + z_losses_N.sum()
        router_sum = None if router_loss is None else router_loss_sum(outputs, router_loss, batch)
        objective_sum = objective_sum if router_sum is None else objective_sum + router_sum
    losses_N = losses_N.detach()
    loss_sum = losses_N.sum()
    return TrainingLoss(
        objective_sum=objective_sum,
        loss_sum=loss_sum,
        z_loss_sum=torch.zeros_like(loss_sum) if z_losses_N is None else z_losses_N.detach().sum(),
        router_loss_sum=torch.zeros_like(loss_sum) if router_sum is None else router_sum.detach(),
        num_tokens=num_tokens,
        losses_N=losses_N.flatten(),
    )


def _token_weights(batch: ShardedBatch, document_loss: DocumentLoss, losses_N: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss of all documents by each token's cross-entropy, fp32 ``[N]``."""
    log_probs_D, tokens_D, numbers_N = document_sums(batch, losses_N)
    with torch.enable_grad():
        log_probs_D.requires_grad_()
        (d_log_probs_D,) = torch.autograd.grad(document_loss(log_probs_D, tokens_D), log_probs_D)
    padded_D = torch.nn.functional.pad(-d_log_probs_D, (0, 1))
    return padded_D.float()[numbers_N]


def document_sums(batch: ShardedBatch, losses_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum a slice's cross-entropy by document. All ranks of ``sp`` must call this function.

    Returns:
        Log-probabilities and numbers of labels of all documents of the rows, fp64 ``[D]``, and the number of each
        token's document, int64 ``[N]``; padding has the number ``D``.
    """
    numbers_N = held_document_numbers(batch.documents, batch.mesh).flatten().to(losses_N.device)
    num_documents = sum(map(len, batch.documents.lengths))
    sums_2D = losses_N.new_zeros(2, num_documents + 1, dtype=torch.float64)
    sums_2D[0].index_add_(0, numbers_N, -losses_N.double())
    sums_2D[1].index_add_(0, numbers_N, (batch.labels_BL.flatten() != IGNORE_INDEX).double())
    if batch.mesh.sp_size > 1:
        dist.all_reduce(sums_2D, group=batch.mesh.group("sp"))
    return sums_2D[0, :-1].clone(), sums_2D[1, :-1], numbers_N


def _refuse_rounded(loss_sum: torch.Tensor) -> None:
    """Raise if a wrapper cast the loss to a lower precision, which would also round the gradient's scale."""
    if torch.finfo(loss_sum.dtype).bits < 32:
        raise UserError(
            f"the wrapper around the model casts the loss to {loss_sum.dtype}, which rounds the loss and the scale of "
            "every gradient; remove output_dtype from FSDP2's MixedPrecisionPolicy, or use "
            "causal_lm_loss(..., tile='off')"
        )


def score_tokens(model: Callable[..., Any], batch: ShardedBatch, *, tile: TileSetting = "auto") -> TokenScores:
    """Return each position's loss and prediction, without gradients. All ranks of ``sp`` must call this function."""
    refuse_visible_labels(inner_model(model), batch)
    with torch.no_grad():
        parts = _tiled_parts(model, tile)
        if parts is None:
            logits_BLV = _whole_outputs(model, batch).logits
            losses, predictions = _whole_losses(logits_BLV, batch)[0], logits_BLV.argmax(dim=-1)
        else:
            tiled = TiledLoss(parts=parts, batch=batch, tile=tile, wants_predictions=True)
            tiled.run(model)
            assert tiled.predictions_N is not None
            losses, predictions = tiled.losses_N, tiled.predictions_N
    shape = batch.labels_BL.shape
    return TokenScores(losses_BL=losses.view(shape), predictions_BL=predictions.view(shape))


def _tiled_parts(model: Any, tile: TileSetting) -> ModelParts | None:
    """Return the model's parts if the loss can be tiled, or None to compute all logits at once."""
    inner = None if tile == "off" else inner_model(model)
    if inner is None:
        return None
    try:
        return find_parts(inner)
    except NoTilesError as error:
        if tile != "auto":
            raise
        _warn_once(type(inner).__name__, str(error))
        return None


@cache
def _warn_once(name: str, reason: str) -> None:
    _log.warning("the logits of %s are computed for all tokens at once: %s", name, reason)


def _whole_outputs(model: Callable[..., Any], batch: ShardedBatch, router_loss: RouterLoss | None = None) -> Any:
    outputs = model(**batch.model_inputs(), **({} if router_loss is None else SCORES_WANTED))
    if router_loss is None:
        refuse_auxiliary_loss(outputs)
    return outputs


def _whole_losses(
    logits_BLV: torch.Tensor, batch: ShardedBatch, z_loss: float = 0.0, token_loss: TokenLoss | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the fp32 loss at each position, ``[B * L]``, and the z-loss, which is None if disabled."""
    losses_N, z_losses_N = token_losses(logits_BLV.flatten(0, 1), batch.labels_BL.flatten(), z_loss, token_loss)
    if batch.label_weights_BL is None:
        return losses_N, z_losses_N
    weights_N = batch.label_weights_BL.flatten()
    return losses_N * weights_N, None if z_losses_N is None else z_losses_N * weights_N


def loss_scale(
    global_tokens: float | torch.Tensor, mesh: SequenceMesh, zero_stage: int = 3, accumulation: int = 1
) -> float | torch.Tensor:
    """Return the factor for ``loss_sum`` that makes an engine's gradient equal the single-process gradient.

    The exact gradient is the gradient of ``loss_sum / global_tokens``, summed over ranks and micro-batches. An engine
    averages over its data-parallel world and divides by the number of accumulation steps, so the factor is ``world_size
    * accumulation / global_tokens``. The factor is the same for every ZeRO stage if the engine averages over all ranks,
    as DeepSpeed does without ``mpu`` and ``sequence_parallel_size``. (DeepSpeed's own Ulysses implementation divides by
    ``world / sp`` in some stages and by ``world`` in others.) Use stage 0 for DDP.

    Args:
        global_tokens: Number of supervised tokens in the optimizer step, over ``sp``, ``dp`` and accumulation. For a
            weighted mean, the sum of the tokens' weights.
        mesh: The mesh; the engine averages over ``mesh.world_size`` ranks.
        zero_stage: ZeRO stage of the engine, 0 to 3.
        accumulation: Number of accumulation steps by which the engine divides; 1 if the engine does not divide
            (``scale_wrt_gas=False``).

    Returns:
        A float, or a tensor if ``global_tokens`` is a tensor (without host synchronization). The scale is 0 for a step
        without supervised tokens.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise UserError(f"zero_stage={zero_stage!r} is not a ZeRO stage; use 0, 1, 2 or 3")
    if accumulation < 1:
        raise UserError(f"accumulation={accumulation!r}, the number of micro-batches per step, must be at least 1")
    factor = float(mesh.world_size * accumulation)
    if isinstance(global_tokens, torch.Tensor):
        tokens = global_tokens.to(torch.float64 if global_tokens.device.type == "cpu" else torch.float32)
        # A sum of label weights may be less than 1, so clamping it to 1 would be wrong.
        return torch.where(tokens > 0, factor / torch.where(tokens > 0, tokens, 1), 0.0)
    if global_tokens < 0:
        raise UserError(f"global_tokens={global_tokens} must not be negative")
    return factor / global_tokens if global_tokens else 0.0


_CHECKED = "_ray_ulysses_own_loss"
_TOKENS = 13
_WORDS = ("loss", "coef")
_MOST_FIELDS = 8


def refuse_own_loss(model: Any) -> None:
    """Raise an error if a model's forward adds a loss other than the logits' cross-entropy and the router loss.

    The model's forward is called once with synthetic logits in place of the decoder and head, so no list of
    architectures is needed. The check is skipped if the forward can't be called this way. If DeepSpeed has partitioned
    the parameters, the check is skipped as well, because module calls outside a step would change ZeRO-3's trace.

    Args:
        model: A ``PreTrainedModel`` on any device, initialized or not, or None to skip the check.

    Raises:
        UserError: The forward adds such a loss. The error lists the model's loss settings and the values to set.
    """
    if model is None or vars(model).get(_CHECKED) or any(hasattr(one, "ds_id") for one in model.parameters()):
        return
    found = _losses(model)
    if found is None or abs(found[0] - found[1]) <= 2e-6 * abs(found[1]):
        vars(model)[_CHECKED] = True
        return
    config = model.config.get_text_config(decoder=True)
    settings = {name: value for name, value in config.to_dict().items() if _is_of_a_loss(name, value)}
    said = ", ".join(f"{name}={value}" for name, value in settings.items()) or "no setting for this loss was found"
    zeros = ", ".join(f"{name}: 0.0" for name in settings) or "its coefficient to 0"
    raise UserError(
        f"the forward of {type(model).__name__} adds its own loss to the cross-entropy ({said}). That loss is a mean "
        f"over a rank's slice and would be ignored; set {zeros} in model.config or, for pretrained weights, in the "
        "config.json of model.path. To train with a z-loss per supervised token, set optimizer.z_loss"
    )


def _is_of_a_loss(name: str, value: Any) -> bool:
    # Router-loss coefficients ("aux") have no effect in this probe, which disables output_router_logits.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0 and any(word in name for word in _WORDS) and "aux" not in name


def _losses(model: Any) -> tuple[float, float] | None:
    """Return the forward's loss for synthetic logits, and the logits' cross-entropy; None if there is no loss."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    config = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(3)
    # Logits far from 0 make a z-loss with a coefficient of 1e-5 detectable.
    logits_1NV = 10 + 3 * torch.randn(1, _TOKENS, config.vocab_size, generator=generator)
    ids_1N = torch.randint(0, config.vocab_size, (1, _TOKENS), generator=generator)
    inputs: dict[str, Any] = {"input_ids": ids_1N, "labels": ids_1N}
    if hasattr(config, "output_router_logits"):
        inputs["output_router_logits"] = False
    # Some forwards read the router_logits field of the decoder's output.
    output = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, _TOKENS, config.hidden_size))

    def head(*_: Any) -> torch.Tensor:
        return logits_1NV

    # A few forwards read the dtype of the head's weight.
    vars(head)["weight"] = logits_1NV
    try:
        with torch.no_grad():
            result = _finished(find_parts(model), output, head, inputs)
            logits_NV = result.logits[0].float()
    except Exception:
        # Catch everything: the model may be built differently, or its forward may read values missing from `output`.
        return None
    if not torch.is_tensor(result.loss):
        return None
    cross_entropy = torch.nn.functional.cross_entropy
    # A masked language model's labels are not shifted.
    own = [float(cross_entropy(logits_NV[:-1], ids_1N[0, 1:])), float(cross_entropy(logits_NV, ids_1N[0]))]
    return float(result.loss), min(own, key=lambda one: abs(one - float(result.loss)))


def _finished(parts: ModelParts, output: Any, head: Any, inputs: dict[str, Any]) -> Any:
    for _ in range(_MOST_FIELDS):
        try:
            return parts.finished(output, dict.fromkeys(parts.heads, head), (), inputs)
        except AttributeError as error:
            if error.obj is not output or error.name is None:
                raise
            object.__setattr__(output, error.name, None)
    raise AttributeError(f"the forward reads more than {_MOST_FIELDS} outputs of its decoder")
