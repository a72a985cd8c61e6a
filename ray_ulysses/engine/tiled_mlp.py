"""Runs MLPs and norms over tiles of tokens, so that their large intermediate tensors never exist for a complete row.

The forward pass saves only the MLP's input, in a separate autograd node before the tiles. Under gradient checkpointing,
a layer's recomputation stops at that node, so the backward pass recomputes the MLP once instead of twice: a layer needs
12 projection matrix products, compared with 11 without tiles. Weight gradients are summed over tiles in fp32 and added
to the parameter once. Norms of hidden states, queries and keys are tiled in the same way, because the backward pass of
Transformers' norms creates five fp32 values per input value, several times the memory that the rest of a layer uses.

Legend: N tokens of this rank, T tokens of a tile, H hidden size, E experts.
"""

from __future__ import annotations

import contextlib
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ray_ulysses.attention.mixer_layouts import layout_of
from ray_ulysses.engine.model_parts import NoTilesError, is_recording, own_forward, record, recorded, unhooked
from ray_ulysses.engine.quantized_base import held_weights, weight_shapes
from ray_ulysses.engine.tiled_loss import add_gradients
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.compilation import not_compiled
from ray_ulysses.parallel.layout import TILE_TOKENS, TileSetting, mlp_tile_tokens, norm_tile_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OFF = "memory.mlp_tile: off"
_log = get_logger(__name__)


def tile_mlps(model: nn.Module, tile: TileSetting, most_tokens: int | None = None, *, compiled: bool = False) -> None:
    """Tile a model's norms and MLPs, both dense and experts. Call this function before building the engine.

    A tiled MLP uses tiles for every row, even for short rows. Tiling changes the order in which weights receive
    gradients, and ZeRO-2 requires the same order on all ranks, whose rows may have different lengths.

    Args:
        model: A ``PreTrainedModel``.
        tile: Tokens per tile; see :func:`ray_ulysses.parallel.layout.mlp_tile_tokens` and ``norm_tile_vectors``.
        most_tokens: Maximum number of tokens per batch on any rank, or None if unknown. MLPs that would process all of
            these tokens in one tile are left unchanged.
        compiled: Whether the backward pass of dense MLPs recomputes full tiles in code that is compiled with
            ``torch.compile``, which fuses the operations between matrix products. The forward pass is not compiled:
            selective checkpointing runs it in a dispatch mode, in which ``torch.compile`` gives up a function for good.
            Not yet tested on a GPU.

    Raises:
        UserError: No layer has an MLP that can be tiled. If ``tile`` is ``auto``, no error is raised.
    """
    if tile == "off":
        return
    found = list(find_mlps(model))
    if not found and tile != "auto":
        raise UserError(
            f"memory.mlp_tile={tile}: no layer of {type(model).__name__} has an MLP as a separate module; set {_OFF}"
        )
    for mlp in found:
        if most_tokens is not None and mlp_tile_tokens(tile, most_tokens, mlp_width(mlp)) >= most_tokens:
            continue
        try:
            own_forward(mlp, _OFF)
        except NoTilesError:
            if tile != "auto":
                raise
            continue
        # Make ZeRO-3 gather all weights of the MLP once for all tiles.
        mlp._z3_leaf = True  # type: ignore[assignment]
        is_dense = all(len(shape) == 2 for shape in _matrices(mlp))
        _go_over_tiles(mlp, partial(_mlp_tile, tile, mlp_width(mlp)), tile, compiled=compiled and is_dense)
    hidden_size = _hidden_size(model)
    for norm in find_norms(model):
        # Norms replaced by a fused kernel do not need tiling.
        with contextlib.suppress(NoTilesError):
            own_forward(norm, _OFF)
            _go_over_tiles(norm, partial(_norm_tile, tile, hidden_size), "auto")


def _go_over_tiles(
    module: Any, tile_tokens: Callable[[int, int], int], setting: TileSetting, *, compiled: bool = False
) -> None:
    """Replace a module's forward with a tiled one. ``tile_tokens`` computes the tile size from row length and width."""
    # The attribute lacks the prefix of Ulysses' attributes, because removing Ulysses must not remove tiling.
    setattr(module, TILE_TOKENS, tile_tokens)
    module._tile_setting, module._compiles_tiles = setting, compiled
    module.forward = MethodType(_forward, module)


def _mlp_tile(setting: TileSetting, inner_width: int, tokens: int, _width: int) -> int:
    return mlp_tile_tokens(setting, tokens, inner_width)


def _norm_tile(setting: TileSetting, hidden_size: int | None, vectors: int, width: int) -> int:
    return norm_tile_vectors(setting, vectors, width, hidden_size or width)


def _hidden_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    return None if config is None else getattr(config.get_text_config(decoder=True), "hidden_size", None)


def find_mlps(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each layer's MLP: a child with several matrices that is neither attention nor a recurrent layer."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for child in layer.children():
                is_attention = any(type(one).__name__.endswith("Attention") for one in child.modules())
                is_other = is_attention or layout_of(child) is not None
                if not is_other and len(_matrices(child)) > 1 and next(child.children(), None) is not None:
                    yield child


def find_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the norms that normalize each vector separately: in layers, in attention and after the last layer.

    Torch's own norms are excluded, because they are already fused. Norms with separate weights per head are excluded
    too.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for parent in model.modules():
        children = list(parent.children())
        is_layer = isinstance(parent, GradientCheckpointingLayer) or type(parent).__name__.endswith("Attention")
        if is_layer or any(isinstance(one, nn.ModuleList) for one in children):
            for child in children:
                # PEFT wraps norms that are trained in full, and some layers have a list of norms.
                several = getattr(child, "modules_to_save", child)
                is_several = isinstance(several, nn.ModuleDict | nn.ModuleList)
                yield from filter(_is_norm, several.children() if is_several else [child])


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    # Group and batch norms mix vectors.
    is_plain = name.endswith("Norm") and not name.endswith(("GroupNorm", "BatchNorm"))
    is_plain = is_plain and next(module.children(), None) is None
    is_fused = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    return is_plain and not is_fused and not _matrices(module)


def _matrices(module: nn.Module) -> list[tuple[int, ...]]:
    return [shape for shape in weight_shapes(module) if len(shape) > 1]


def mlp_width(mlp: nn.Module) -> int:
    """Return the approximate number of intermediate values per token in an MLP."""
    shapes = _matrices(mlp)
    chosen = int(getattr(getattr(mlp, "config", None), "num_experts_per_tok", None) or getattr(mlp, "top_k", None) or 1)
    return max(max(shape[-2:]) for shape in shapes) * (chosen if any(len(shape) > 2 for shape in shapes) else 1)


@not_compiled
def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    own = type(self).forward
    hidden = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2:
        return own(self, *args, **kwargs)
    num_tokens = hidden.shape[:-1].numel()
    tile = getattr(self, TILE_TOKENS)(num_tokens, hidden.shape[-1])
    if tile >= num_tokens and not _has_order(self):
        return own(self, hidden)
    # [..., H] -> [1, N, H], a shape that every MLP accepts, in memory order because queries may be transposed.
    order = sorted(range(hidden.dim() - 1), key=hidden.stride, reverse=True)
    in_memory = hidden.permute(*order, -1)
    hidden_1NH = in_memory.reshape(1, num_tokens, hidden.shape[-1])
    bare = _Bare(self)
    try:
        result = (_with_gradients if torch.is_grad_enabled() else _Bare.all_tiles)(bare, hidden_1NH, tile)
    except NoTilesError:
        if self._tile_setting != "auto":
            raise
        del self.forward
        _log.warning("%s can't be tiled, so a step needs more memory than planned", type(self).__name__)
        return own(self, hidden)
    # Do not keep the scores in `bare`: their graph references `bare`, so that would be a reference cycle.
    scores, bare.scores = bare.scores, []
    record(scores)
    result = result.view_as(in_memory).permute(*(order.index(dim) for dim in range(len(order))), -1)
    return (result, *[None] * bare.num_others) if bare.num_others else result


def _has_order(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and sum(weight.requires_grad for weight in module.parameters()) > 1


def _with_gradients(bare: _Bare, hidden_1NH: torch.Tensor, tile: int) -> torch.Tensor:
    weights = [weight for weight in bare.mlp.parameters() if weight.requires_grad]
    if not hidden_1NH.requires_grad:
        if not weights:
            return bare.all_tiles(hidden_1NH, tile)
        # The input requires no gradient, as in the first layer with frozen embeddings.
        hidden_1NH = hidden_1NH.detach().requires_grad_()
    kept_1NH: Any = _KeptInput.apply(hidden_1NH)  # type: ignore[no-untyped-call]
    result_1NH: torch.Tensor
    result_1NH, *bare.scores = _Tiles.apply(kept_1NH.grad_fn, bare, tile, kept_1NH, *weights)  # type: ignore[no-untyped-call]
    return result_1NH


class _Bare:
    """A stand-in without hooks for an MLP or norm whose weights are already gathered."""

    def __init__(self, mlp: nn.Module) -> None:
        self.mlp = unhooked(mlp)
        del self.mlp.__dict__["forward"]
        self.num_others = 0
        """Number of outputs in addition to the hidden states. Layers ignore these outputs, and receive None instead."""
        self.is_recording = is_recording()
        self.scores: list[torch.Tensor] = []
        """Router scores of all tokens, as ``[N, E]`` tensors; empty unless Transformers records router scores."""

    def __call__(self, hidden_1TH: torch.Tensor, *, compiled: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a tile's hidden states, and the tile's router scores as ``[T, E]`` tensors."""
        if not self.is_recording:
            return self._hidden(hidden_1TH, compiled=compiled), []
        result_1TH, scores = recorded(lambda: self._hidden(hidden_1TH, compiled=compiled))
        return result_1TH, [one.flatten(0, -2) for one in scores]

    def _hidden(self, hidden_1TH: torch.Tensor, *, compiled: bool) -> torch.Tensor:
        result = compiled_tile()(self.mlp, hidden_1TH) if compiled else self.mlp(hidden_1TH)
        if isinstance(result, tuple):
            self.num_others = len(result) - 1
            result = result[0]
        if isinstance(result, torch.Tensor) and result.shape == hidden_1TH.shape[1:]:
            # Llama 4's experts return a flattened tensor, which the layer reshapes.
            result = result[None]
        if not isinstance(result, torch.Tensor) or result.shape != hidden_1TH.shape:
            raise NoTilesError(
                f"{type(self.mlp).__name__} can't be tiled, because its output has a different shape than its input; "
                f"set {_OFF}"
            )
        return result

    def all_tiles(self, hidden_1NH: torch.Tensor, tile: int) -> torch.Tensor:
        """Return the hidden states of all tokens, and store their router scores."""
        result_1NH: torch.Tensor | None = None
        tiles: list[list[torch.Tensor]] = []
        with held_weights(self.mlp):
            for start in range(0, hidden_1NH.shape[1], tile):
                part = slice(start, start + tile)
                result_1TH, scores = self(hidden_1NH[:, part])
                tiles.append(scores)
                if result_1NH is None:
                    # Use the output's dtype: a norm with fp32 weights returns fp32 for any input.
                    result_1NH = torch.empty_like(hidden_1NH, dtype=result_1TH.dtype)
                result_1NH[:, part] = result_1TH
        assert result_1NH is not None
        self.scores = [torch.cat(parts) for parts in zip(*tiles, strict=True)]
        return result_1NH


@cache
def compiled_tile() -> Callable[[nn.Module, torch.Tensor], Any]:
    """Return the compiled call of an MLP, whose code all layers of a model share."""
    return torch.compile(lambda mlp, hidden_1TH: mlp(hidden_1TH), dynamic=False)


class _KeptInput(torch.autograd.Function):
    """An identity function that saves an MLP's input; a layer's recomputation stops here."""

    @staticmethod
    def forward(ctx: Any, hidden_1NH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_1NH)
        return hidden_1NH.view_as(hidden_1NH)

    @staticmethod
    def backward(ctx: Any, gradient_1NH: torch.Tensor) -> torch.Tensor:
        return gradient_1NH


class _Tiles(torch.autograd.Function):
    """An MLP that runs over tiles. No tensors are saved here, because `_KeptInput` saves the input."""

    @staticmethod
    def forward(
        ctx: Any, keeper: Any, mlp: _Bare, tile: int, hidden_1NH: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.keeper, ctx.mlp, ctx.tile, ctx.weights = keeper, mlp, tile, weights
        return mlp.all_tiles(hidden_1NH, tile), *mlp.scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result_1NH: torch.Tensor, *d_scores: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Recompute the MLP tile by tile, and compute its gradients."""
        (hidden_1NH,) = ctx.keeper.saved_tensors
        d_hidden_1NH = torch.empty_like(hidden_1NH)
        sums: list[torch.Tensor | None] = [None] * len(ctx.weights)
        with held_weights(ctx.mlp.mlp):
            for start in range(0, hidden_1NH.shape[1], ctx.tile):
                part = slice(start, start + ctx.tile)
                # The first dim's stride would be that of the row, for which a compiled tile would be compiled again.
                hidden_1TH = hidden_1NH[0, part][None].detach().requires_grad_()
                is_full = hidden_1TH.shape[1] == ctx.tile
                with torch.enable_grad():
                    result_1TH, scores = ctx.mlp(hidden_1TH, compiled=is_full and ctx.mlp.mlp._compiles_tiles)
                wanted = [hidden_1TH, *ctx.weights]
                gradients = [d_result_1NH[:, part], *(one[part] for one in d_scores)]
                d_hidden_1TH, *found = torch.autograd.grad([result_1TH, *scores], wanted, gradients, allow_unused=True)
                del result_1TH, scores
                d_hidden_1NH[:, part] = d_hidden_1TH
                add_gradients(sums, found)
                # Free the gradients before the next tile: they are as large as the MLP.
                del d_hidden_1TH, found
        scaled = [None if one is None else one.to(weight.dtype) for one, weight in zip(sums, ctx.weights, strict=True)]
        return None, None, None, d_hidden_1NH, *scaled
