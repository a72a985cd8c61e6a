"""The flash-attn kernels, versions 4 and 3 (for new GPUs) and version 2, called below autograd.

The forward functions return the log-sum-exp, and the backward functions accept the log-sum-exp of a larger softmax
(``exp(score - lse)``), as a ring requires. Arguments follow flash-attn 2.8.3 (``flash_attn/flash_attn_interface.py``,
``csrc/flash_attn/flash_api.cpp``), version 3 (``hopper/flash_attn_interface.py``, both before and after its functions
became custom operators) and version 4 (``flash_attn/cute/interface.py`` in flash-attn-4 4.0.0b36).
Legend: see ``call.py``; W padded head size.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import torch

from ray_ulysses.attention.kernels.call import Demand, Gradients, KernelCall, KernelEntry, Whole

MAX_FLASH_HEAD_SIZE = 256
"""Largest head size that the flash kernels support, including torch's own kernel."""

_ALIGNED_ELEMENTS = 8
"""Number of 2-byte values in a 16-byte load."""

# Arguments that early builds of version 3 require although they are optional; we pass None.
_UNUSED_ARGUMENTS = frozenset(
    {
        "k_new", "v_new", "qv", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k",
        "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
        "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale",
    }
)  # fmt: skip


def padded_head_size(head_size: int, value_size: int) -> int:
    """Return the padded head size for a flash kernel: the next multiple of 8, or 256 if that exceeds 192.

    Support for sizes between 192 and 256 depends on the GPU: ``sdp_utils.cpp`` in torch 2.13 refuses 224 on sm86, sm89
    and sm120.
    """
    size = max(head_size, value_size)
    return MAX_FLASH_HEAD_SIZE if size > 192 else -(-size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS


def fitted(heads_THD: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the head size to ``width`` with zeros, which leave all sums unchanged, and align for 16-byte loads.

    flash-attn 2.8.3 only checks that the last stride is 1, and fails with a misaligned address unless every head starts
    at a multiple of 16 bytes. The TMA copies in version 3 require the same alignment.
    """
    missing = width - heads_THD.shape[-1]
    if missing:
        return torch.nn.functional.pad(heads_THD, (0, missing))
    # clone() rather than contiguous(), which returns a contiguous tensor unchanged even if its offset is misaligned.
    return heads_THD if _is_aligned(heads_THD) else heads_THD.clone(memory_format=torch.contiguous_format)


def _is_aligned(heads_THD: torch.Tensor) -> bool:
    offsets = (heads_THD.storage_offset(), *heads_THD.stride()[:-1])
    return heads_THD.stride(-1) == 1 and all(offset % _ALIGNED_ELEMENTS == 0 for offset in offsets)


def window_of(call: KernelCall) -> tuple[int, int]:
    """Return the window in flash-attn's notation: number of keys left and right of the diagonal, -1 for no limit."""
    num_queries, num_keys = call.query_THD.shape[0], call.key_UKD.shape[0]
    if call.spans is not None:
        num_queries = num_keys = call.spans.max_seqlen
    left = -1 if call.left is None or call.left >= num_keys - 1 else call.left
    right = -1 if call.most_right is None or call.most_right >= num_queries - 1 else call.most_right
    return left, 0 if call.causal else right


def half_precision_refusal(demand: Demand) -> str | None:
    """Return why a half-precision kernel with head sizes up to 256 can't meet a demand, or None if it can."""
    if demand.dtype not in (torch.bfloat16, torch.float16):
        return f"it supports only bf16 and fp16, but the layer is in {str(demand.dtype).removeprefix('torch.')}"
    size = max(demand.head_size, demand.value_size)
    if size > MAX_FLASH_HEAD_SIZE:
        return f"its largest head size is {MAX_FLASH_HEAD_SIZE}, but the layer's head size is {size}"
    return None


def ampere_refusal(demand: Demand) -> str | None:
    """Return why a half-precision kernel that requires Ampere can't meet a demand on this GPU, or None if it can."""
    capability = compute_capability()
    if capability is not None and capability[0] < 8:
        return f"it requires compute capability 8.0 or later, but the GPU has {capability[0]}.{capability[1]}"
    return half_precision_refusal(demand)


def compute_capability() -> tuple[int, int] | None:
    """Return the GPU's compute capability, or None if CUDA is not initialized. Does not initialize CUDA."""
    return torch.cuda.get_device_capability() if torch.cuda.is_initialized() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashFunctions:
    """A library's functions: ``dense`` for one span ``[1, T, H, W]``, ``spans`` for packed tokens ``[T, H, W]``."""

    forward_dense: Callable[..., Any]
    forward_spans: Callable[..., Any]
    backward_dense: Callable[..., Any]
    backward_spans: Callable[..., Any]


def flash_forward(library: Callable[[], FlashFunctions], call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a library's forward; see `KernelEntry.forward`. Calling ``library`` imports it and returns its functions."""
    functions = library()
    function = functions.forward_dense if call.spans is None else functions.forward_spans
    out, lse = function(**_bound(function, _inputs(call)))[:2]
    if call.spans is None:
        # [1, T, H, W] and [1, H, T]
        out, lse = out[0], lse[0]
    return out[..., : call.value_UKE.shape[2]].contiguous(), lse.contiguous()


def flash_backward(
    library: Callable[[], FlashFunctions],
    call: KernelCall,
    whole: Whole,
    into: Callable[[], Gradients] | None = None,
) -> Gradients:
    """Run a library's backward; see `Backward`."""
    functions = library()
    function = functions.backward_dense if call.spans is None else functions.backward_spans
    inputs = _inputs(call)
    batch = call.spans is None
    width = inputs["q"].shape[-1]
    inputs["dout"], inputs["out"] = (_batched(fitted(t, width), batch) for t in (whole.grad_out_THE, whole.out_THE))
    inputs["softmax_lse"] = inputs["lse"] = _batched(whole.lse_HT, batch)
    # All versions write to dq, dk and dv; their return values differ, so they are not used.
    given = into() if into is not None and all(one.shape[2] == width for one in call.inputs) else None
    if given is not None and all(_is_aligned(grad) for grad in given):
        grads = [_batched(grad, batch) for grad in given]
    else:
        given = None
        grads = [torch.empty_like(inputs[name], memory_format=torch.contiguous_format) for name in ("q", "k", "v")]
    inputs["dq"], inputs["dk"], inputs["dv"] = grads
    # Version 2 sums dQ with atomics unless a deterministic backward is requested.
    inputs["deterministic"] = torch.are_deterministic_algorithms_enabled()
    function(**_bound(function, inputs))
    if given is not None:
        return given
    dq, dk, dv = (grad[0] for grad in grads) if batch else grads
    return call.trimmed(dq, dk, dv)


def _batched(tensor: torch.Tensor, batch: bool) -> torch.Tensor:
    return tensor.unsqueeze(0) if batch else tensor


def _inputs(call: KernelCall) -> dict[str, Any]:
    """Return the arguments under the names that any version uses. `_bound` selects those that a function accepts."""
    width = padded_head_size(call.query_THD.shape[2], call.value_UKE.shape[2])
    left, right = window_of(call)
    q, k, v = (_batched(fitted(t, width), call.spans is None) for t in call.inputs)
    inputs: dict[str, Any] = {
        "q": q, "k": k, "v": v, "softmax_scale": call.scale, "softcap": call.softcap or 0.0,
        "causal": call.causal, "is_causal": call.causal,
        "window_size": (left, right), "window_size_left": left, "window_size_right": right,
        "dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False, "return_lse": True,
    }  # fmt: skip
    if call.spans is not None:
        inputs["cu_seqlens_q"] = inputs["cu_seqlens_k"] = call.spans.cu_seqlens
        inputs["max_seqlen_q"] = inputs["max_seqlen_k"] = call.spans.max_seqlen
    return inputs


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    # A custom operator's Python signature is (*args, **kwargs), so use its schema instead.
    overload = getattr(function, "_opoverload", None)
    if overload is not None:
        return {argument.name: not argument.has_default_value() for argument in overload._schema.arguments}
    named = inspect.signature(function).parameters
    return {name: parameter.default is inspect.Parameter.empty for name, parameter in named.items()}


def _bound(function: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(function)
    known = {name: value for name, value in inputs.items() if name in parameters}
    return {name: None for name, required in parameters.items() if required and name not in known} | known


def unknown_signature(functions: FlashFunctions) -> str | None:
    """Describe missing or unexpected required arguments of a library's functions; None if the signatures are known."""
    inputs = {"q", "k", "v", "softmax_scale", "softcap"}
    spans = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    grads = {"dout", "out", "dq", "dk", "dv", "deterministic"}
    optional = {"causal", "is_causal", "window_size", "window_size_left", "window_size_right"}
    optional |= {"dropout_p", "alibi_slopes", "return_softmax", "softmax_lse", "lse"}
    wanted = (
        (functions.forward_dense, inputs),
        (functions.forward_spans, inputs | spans),
        (functions.backward_dense, inputs | grads),
        (functions.backward_spans, inputs | grads | spans),
    )
    for function, names in wanted:
        parameters = _parameters(function)
        lacking = sorted(names - parameters.keys())
        lacking += [] if parameters.keys() & {"causal", "is_causal"} else ["causal"]
        lacking += [] if parameters.keys() & {"window_size", "window_size_left"} else ["window_size"]
        lacking += [] if "dout" not in names or parameters.keys() & {"softmax_lse", "lse"} else ["softmax_lse"]
        required = {name for name, is_required in parameters.items() if is_required}
        strange = sorted(required - names - optional - _UNUSED_ARGUMENTS)
        if lacking or strange:
            return f"its signature differs (lacks: {', '.join(lacking) or '-'}; requires: {', '.join(strange) or '-'})"
    return None


@cache
def flash_attn_4() -> FlashFunctions:
    """Import flash-attn 4 and return its functions, which accept both layouts.

    ``torch.nn.attention.activate_flash_attention_impl("FA4")`` can't be used: torch 2.13 expects two results of the
    forward, which returns five.
    """
    library = importlib.import_module("flash_attn.cute.interface")
    return version_4(library._flash_attn_fwd, library._flash_attn_bwd)


def version_4(forward: Callable[..., Any], backward: Callable[..., Any]) -> FlashFunctions:
    """Return flash-attn 4's functions, which expect None instead of -1 for no limit."""

    def unlimited(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(**inputs: Any) -> Any:
            sides = ("window_size_left", "window_size_right")
            return function(**inputs | {side: None if inputs[side] == -1 else inputs[side] for side in sides})

        return call

    forward, backward = unlimited(forward), unlimited(backward)
    return FlashFunctions(
        forward_dense=forward, forward_spans=forward, backward_dense=backward, backward_spans=backward
    )


@cache
def flash_attn_3() -> FlashFunctions:
    """Import flash-attn 3 and return its functions, which accept both layouts."""
    library = importlib.import_module("flash_attn_interface")
    forward, backward = library._flash_attn_forward, library._flash_attn_backward
    return FlashFunctions(
        forward_dense=forward, forward_spans=forward, backward_dense=backward, backward_spans=backward
    )


@cache
def flash_attn_2() -> FlashFunctions:
    """Import flash-attn 2 and return its functions."""
    library = importlib.import_module("flash_attn.flash_attn_interface")
    return FlashFunctions(
        forward_dense=library._flash_attn_forward,
        forward_spans=library._flash_attn_varlen_forward,
        backward_dense=library._flash_attn_backward,
        backward_spans=library._flash_attn_varlen_backward,
    )


def _build_refusal(demand: Demand) -> str | None:
    """Describe required features that this build of flash-attn 3 lacks; None if it has all or does not list them."""
    if importlib.util.find_spec("flash_attn_config") is None:
        return None
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    asked = {
        "BACKWARD": True, "VARLEN": True, "LOCAL": demand.has_window, "SOFTCAP": demand.has_softcap,
        "FP16": demand.dtype == torch.float16,
    }  # fmt: skip
    absent = [name.lower() for name, wanted in asked.items() if wanted and flags.get(f"FLASHATTENTION_DISABLE_{name}")]
    sizes = [size for size in (64, 96, 128, 192, 256) if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}")]
    if max(demand.head_size, demand.value_size) > max(sizes, default=0):
        absent.append(f"heads of {max(demand.head_size, demand.value_size)}")
    return f"it was built without {', '.join(absent)}" if absent else None


def _refuses_4(demand: Demand) -> str | None:
    refusal, capability = half_precision_refusal(demand), compute_capability()
    if refusal is None and capability is not None:
        size = padded_head_size(demand.head_size, demand.value_size)
        if capability[0] not in (9, 10):
            refusal = f"it requires Hopper or Blackwell (9.0 or 10.x), but the GPU has {capability[0]}.{capability[1]}"
        elif capability[0] == 10 and 128 < size < MAX_FLASH_HEAD_SIZE:
            refusal = f"on Blackwell, it does not support heads of {size}"
    if refusal is not None:
        return refusal
    try:
        return unknown_signature(flash_attn_4())
    except (ImportError, OSError, AttributeError) as error:
        return f"flash_attn.cute can't be used: {error}"


def _refuses_3(demand: Demand) -> str | None:
    refusal = half_precision_refusal(demand)
    capability = compute_capability()
    if refusal is None and capability is not None and capability[0] != 9:
        refusal = f"it requires Hopper (compute capability 9.0), but the GPU has {capability[0]}.{capability[1]}"
    if refusal is not None:
        return refusal
    try:
        return unknown_signature(flash_attn_3()) or _build_refusal(demand)
    except (ImportError, OSError, AttributeError) as error:
        return f"flash_attn_interface can't be used: {error}"


def _refuses_2(demand: Demand) -> str | None:
    refusal = half_precision_refusal(demand)
    if refusal is not None:
        return refusal
    try:
        version = str(importlib.import_module("flash_attn").__version__)
        # Before 2.8, the layout of the log-sum-exp and the names of the window arguments differed between releases.
        release = re.match(r"(\d+)\.(\d+)", version)
        if release is None or (int(release[1]), int(release[2])) < (2, 8):
            return f"it requires flash-attn 2.8 or later, but version {version} is installed"
        return unknown_signature(flash_attn_2())
    except (ImportError, OSError, AttributeError) as error:
        return f"flash_attn can't be used: {error}"


def _has(device_type: str, *modules: str) -> bool:
    return device_type == "cuda" and all(importlib.util.find_spec(module) is not None for module in modules)


def _has_cute() -> bool:
    # find_spec("flash_attn.cute") would import a flash-attn 2 that is installed in the same package.
    spec = importlib.util.find_spec("flash_attn")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any((Path(folder) / "cute").is_dir() for folder in folders)


FLASH_4 = KernelEntry(
    name="flash_attn_4",
    needs="a Hopper or Blackwell GPU and flash-attn 4 (flash_attn.cute)",
    runs_on=lambda device_type: _has(device_type) and _has_cute(),
    refuses=_refuses_4,
    forward=partial(flash_forward, flash_attn_4),
    backward=partial(flash_backward, flash_attn_4),
)

FLASH_3 = KernelEntry(
    name="flash_attn_3",
    needs="a Hopper GPU and flash-attn 3 (flash_attn_interface)",
    runs_on=lambda device_type: _has(device_type, "flash_attn_interface", "flash_attn_3"),
    refuses=_refuses_3,
    forward=partial(flash_forward, flash_attn_3),
    backward=partial(flash_backward, flash_attn_3),
)

FLASH_2 = KernelEntry(
    name="flash_attn",
    needs="a CUDA device and flash-attn 2.8 or later",
    # flash-attn 4 installs a `flash_attn` package too, but not version 2's CUDA extension.
    runs_on=lambda device_type: _has(device_type, "flash_attn", "flash_attn_2_cuda"),
    refuses=_refuses_2,
    forward=partial(flash_forward, flash_attn_2),
    backward=partial(flash_backward, flash_attn_2),
)
