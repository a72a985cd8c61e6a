"""The attention kernels: causal, packed documents apart, with an optional sliding window.

Every kernel computes the same function over ``PackedDocuments.spans`` and is tested against :func:`reference`.

Legend: B rows, S tokens of a row, H query heads, K KV heads (H a multiple of K), D head size, E head size of V.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray_ulysses.attention.documents import PackedDocuments

KernelName = Literal["auto", "flash_attn", "varlen", "sdpa"]

_WINDOW_CHUNK_TOKENS = 1024
"""Queries a masked step of a sliding window: bounds the mask at 1024 x (1024 + window) instead of S x S."""


class AttentionKernel(Protocol):
    """A causal attention over packed rows."""

    def __call__(
        self,
        query_BSHD: torch.Tensor,
        key_BSKD: torch.Tensor,
        value_BSKE: torch.Tensor,
        documents: PackedDocuments,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return ``[B, S, H, E]``; a token sees the last ``window`` tokens of its document, itself included."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEntry:
    """A row of the kernel table.

    Attributes:
        name: What ``model.attention`` calls it.
        needs: What it needs, in words.
        usable: Whether it can run on a device type with a dtype here.
        run: The kernel.
    """

    name: Literal["flash_attn", "varlen", "sdpa"]
    needs: str
    usable: Callable[[str, torch.dtype], bool]
    run: AttentionKernel


def sdpa(
    query_BSHD: torch.Tensor,
    key_BSKD: torch.Tensor,
    value_BSKE: torch.Tensor,
    documents: PackedDocuments,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Run torch's scaled dot-product attention once a document, so that no mask is ever needed to keep them apart.

    The memory-efficient kernel is never used: past 65,536 tokens it is silently wrong with a mask
    (pytorch#162588, pytorch#187227), and a mask is what a sliding window takes here.
    """
    rows: list[list[torch.Tensor]] = [[] for _ in range(documents.num_rows)]
    for row, start, end in documents.spans:
        # [S, H, D] -> [1, H, T, D]
        q, k, v = (tensor[row, start:end].transpose(0, 1).unsqueeze(0) for tensor in (query_BSHD, key_BSKD, value_BSKE))
        out = _one_document(q, k, v, scale, window)
        rows[row].append(out.squeeze(0).transpose(0, 1))
    return torch.stack([torch.cat(parts) for parts in rows])


def _one_document(
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTE: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    tokens = query_1HTD.shape[2]
    grouped = query_1HTD.shape[1] != key_1KTD.shape[1]
    if window is None or window >= tokens:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return scaled_dot_product_attention(
                query_1HTD, key_1KTD, value_1KTE, is_causal=True, scale=scale, enable_gqa=grouped
            )
    outputs = []
    for begin in range(0, tokens, _WINDOW_CHUNK_TOKENS):
        end = min(begin + _WINDOW_CHUNK_TOKENS, tokens)
        first_key = max(0, begin - window + 1)
        query_at = torch.arange(begin, end, device=query_1HTD.device).unsqueeze(1)
        key_at = torch.arange(first_key, end, device=query_1HTD.device).unsqueeze(0)
        visible = (key_at <= query_at) & (key_at > query_at - window)
        # cuDNN with a mask gives NaN in dQ where S % 128 == 64 (pytorch#196678): it is left out here.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            outputs.append(
                scaled_dot_product_attention(
                    query_1HTD[:, :, begin:end],
                    key_1KTD[:, :, first_key:end],
                    value_1KTE[:, :, first_key:end],
                    attn_mask=visible,
                    scale=scale,
                    enable_gqa=grouped,
                )
            )
    return torch.cat(outputs, dim=2)


def flash_attn(
    query_BSHD: torch.Tensor,
    key_BSKD: torch.Tensor,
    value_BSKE: torch.Tensor,
    documents: PackedDocuments,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Run flash-attn's variable-length kernel over all documents of all rows at once."""
    from flash_attn import flash_attn_varlen_func

    out: torch.Tensor = flash_attn_varlen_func(
        query_BSHD.flatten(0, 1),
        key_BSKD.flatten(0, 1),
        value_BSKE.flatten(0, 1),
        documents.cu_seqlens,
        documents.cu_seqlens,
        documents.max_seqlen,
        documents.max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return out.view(*query_BSHD.shape[:2], *out.shape[1:])


def varlen(
    query_BSHD: torch.Tensor,
    key_BSKD: torch.Tensor,
    value_BSKE: torch.Tensor,
    documents: PackedDocuments,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Run ``torch.nn.attention.varlen``, which is on every CUDA build of torch 2.11 and later."""
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scale}
    if "enable_gqa" in takes:
        options["enable_gqa"] = query_BSHD.shape[2] != key_BSKD.shape[2]
    else:
        # torch 2.11 has no enable_gqa in varlen_attn.
        copies = query_BSHD.shape[2] // key_BSKD.shape[2]
        key_BSKD, value_BSKE = (t.repeat_interleave(copies, dim=2) for t in (key_BSKD, value_BSKE))
    if "window_size" in takes:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise UserError(
            f"model.attention='varlen' can't do a sliding window of {window} on torch {torch.__version__}; "
            "use model.attention=flash_attn or sdpa"
        )
    out = varlen_attn(
        query_BSHD.flatten(0, 1),
        key_BSKD.flatten(0, 1),
        value_BSKE.flatten(0, 1),
        documents.cu_seqlens,
        documents.cu_seqlens,
        documents.max_seqlen,
        documents.max_seqlen,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out.view(*query_BSHD.shape[:2], *out.shape[1:])


def reference(
    query_BSHD: torch.Tensor,
    key_BSKD: torch.Tensor,
    value_BSKE: torch.Tensor,
    documents: PackedDocuments,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute attention by its definition, softmax(QKᵀ·scale + mask)V, in S x S memory: what the others are held to."""
    tokens = query_BSHD.shape[1]
    copies = query_BSHD.shape[2] // key_BSKD.shape[2]
    key_BSHD, value_BSHE = (t.repeat_interleave(copies, dim=2) for t in (key_BSKD, value_BSKE))
    scores_BHST = torch.einsum("bshd,bthd->bhst", query_BSHD, key_BSHD) * scale
    visible_BST = torch.zeros(documents.num_rows, tokens, tokens, dtype=torch.bool, device=query_BSHD.device)
    for row, start, end in documents.spans:
        length = end - start
        inside = torch.ones(length, length, dtype=torch.bool, device=query_BSHD.device).tril()
        if window is not None:
            inside = inside.triu(1 - window)
        visible_BST[row, start:end, start:end] = inside
    weights = scores_BHST.masked_fill(~visible_BST.unsqueeze(1), float("-inf")).softmax(dim=-1)
    return torch.einsum("bhst,bthe->bshe", weights, value_BSHE)


def _has_flash_attn(device_type: str, dtype: torch.dtype) -> bool:
    half = dtype in (torch.bfloat16, torch.float16)
    return device_type == "cuda" and half and importlib.util.find_spec("flash_attn") is not None


def _has_varlen(device_type: str, dtype: torch.dtype) -> bool:
    return device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)


KERNELS: tuple[KernelEntry, ...] = (
    KernelEntry(
        name="flash_attn",
        needs="a CUDA device, bf16 and the flash-attn package",
        usable=_has_flash_attn,
        run=flash_attn,
    ),
    KernelEntry(name="varlen", needs="a CUDA device and bf16", usable=_has_varlen, run=varlen),
    KernelEntry(name="sdpa", needs="nothing", usable=lambda device_type, dtype: True, run=sdpa),
)
"""From the fastest to the one that always runs."""


def choose_kernel(name: KernelName, device_type: str, dtype: torch.dtype) -> KernelEntry:
    """Return the kernel of a name; ``auto`` takes the first of the table that can run here.

    Raises:
        UserError: The kernel that was asked for can't run here.
    """
    for entry in KERNELS:
        if name in ("auto", entry.name) and entry.usable(device_type, dtype):
            return entry
    entry = next(entry for entry in KERNELS if entry.name == name)
    usable = ", ".join(other.name for other in KERNELS if other.usable(device_type, dtype))
    raise UserError(
        f"model.attention={name!r} needs {entry.needs}; here the device is {device_type} with "
        f"{dtype}: use auto or {usable}"
    )
