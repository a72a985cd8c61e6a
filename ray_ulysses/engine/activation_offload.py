"""Offloads activations saved by gradient checkpointing to host memory until the backward pass needs them.

A layer's input and its attention outputs are copied to the host when they are computed, and copied back one layer ahead
of the backward pass. At most two layers' activations are on the device at a time. In the forward pass, the two are the
current layer and the previous layer, whose copies may still be in progress. In the backward pass, they are the current
layer and the next layer to run.

The host address range is reserved at once, and physical memory is allocated on first use. On CUDA, the used part of the
range is pinned in pieces so that copies are asynchronous. torch's pinned allocator is not used because it rounds
allocations up to a power of two.

A copy starts after all previously queued work, and is complete before any work queued after `wait` starts. Until then,
do not write to or free the copy's source, and do not read, write to or free its destination.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ray_ulysses.attention.recompute import CHANGED_IN_PLACE, KeptOutput, checkpoint_contexts
from ray_ulysses.config.running import KeptActivation
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.compilation import not_compiled
from ray_ulysses.parallel.device import pin, reserve_host

_ALIGNMENT = 64
_SLABS_PER_LAYER = 4


def offload_activations(
    model: nn.Module,
    kinds: Collection[KeptActivation],
    *,
    keep: KeptOutput,
    budget_bytes: int,
    device: torch.device,
) -> None:
    """Set up a model's checkpointed layers to offload activations to host memory.

    Call this function after enabling gradient checkpointing. If ``kinds`` is empty, the model is not changed.
    ``budget_bytes`` is the upper limit on host memory.
    """
    if not kinds:
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    # A layer nested in another layer, as in Zamba, is recomputed together with the outer layer.
    around = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
    inner = {one for layer in around for one in layer.modules() if one is not layer}
    layers = [layer for layer in layers if layer not in inner]
    # The planned budget does not include alignment padding between slabs.
    size = budget_bytes + len(layers) * _SLABS_PER_LAYER * _ALIGNMENT
    copies = CudaCopies(size, device) if device.type == "cuda" else CpuCopies(size)
    offload = ActivationOffload(copies, kinds, keep=keep, budget_bytes=size)
    for layer in layers:
        layer._gradient_checkpointing_func = partial(offload.checkpoint, layer._gradient_checkpointing_func)


@dataclass(slots=True, eq=False)
class _Slab:
    start: int
    stop: int
    is_free: bool = False


class _Slabs:
    """A stack allocator for the host range: the backward pass frees slabs in nearly reverse order of allocation."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.taken: list[_Slab] = []

    @property
    def end(self) -> int:
        return self.taken[-1].stop if self.taken else 0

    def take(self, num_bytes: int) -> _Slab:
        start = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > self._budget_bytes:
            raise UserError(
                f"memory.offload_activations: another {num_bytes:,} bytes do not fit in the {self._budget_bytes:,} "
                f"bytes of host memory planned for activations, of which {start:,} are in use; run each backward pass "
                "before the next forward pass, or, if the model saves more activations than `plan` estimates, set "
                "memory.offload_activations: []"
            )
        slab = _Slab(start, start + num_bytes)
        self.taken.append(slab)
        return slab

    def give_back(self, slab: _Slab) -> None:
        slab.is_free = True
        while self.taken and self.taken[-1].is_free:
            self.taken.pop()


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Kept:
    """An activation in host memory. Its slab is freed after the activation is used or garbage-collected."""

    layer: int
    """Sequence number of the layer's forward call."""
    slab: _Slab
    like: torch.Tensor
    """Meta tensor with the activation's shape, strides and dtype."""
    device: torch.device
    given_up: deque[tuple[_Slab, list[tuple[Any, torch.Tensor]]]]
    """Queue of slabs to free, each with the copies that must finish first."""
    tensor: torch.Tensor | None
    """The activation on the device, or None once the activation has been freed or used."""
    version: int
    """Autograd version of the activation at the start of the copy to the host."""
    target: torch.Tensor | None = None
    """Destination tensor of the copy back to the device."""
    running: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """Copies that may be in progress, each with its tensor on the device."""
    is_taken: bool = False

    def leave_device(self, copies: HostCopies) -> None:
        """Wait for the copy to the host, then free the activation on the device."""
        if self.tensor is not None:
            self._check()
            _wait(copies, self.running)
            self.tensor = None

    def return_to_device(self, copies: HostCopies) -> None:
        """Start the copy back to the device if the activation is only on the host."""
        if self.tensor is None and self.target is None:
            self.target = torch.empty_like(self.like, device=self.device)
            flat = _flat(self.target)
            self.running.append((copies.copy_in(self.slab.start, flat), flat))

    def take(self, copies: HostCopies) -> torch.Tensor:
        if self.tensor is None:
            _wait(copies, self.running)
        else:
            self._check()
        value = self.target if self.tensor is None else self.tensor
        assert value is not None
        self.is_taken = True
        self.tensor = self.target = None
        self.given_up.append((self.slab, self.running))
        return value

    def __del__(self) -> None:
        # A destructor can run at any time, so the wait for copies is left to the next allocation.
        if not self.is_taken:
            self.given_up.append((self.slab, self.running))

    def _check(self) -> None:
        if self.tensor is not None and self.tensor._version != self.version:
            raise RuntimeError(CHANGED_IN_PLACE.format("an activation that is copied to host memory"))


class ActivationOffload:
    """Moves the activations of checkpointed layers to host memory and back."""

    def __init__(
        self, copies: HostCopies, kinds: Collection[KeptActivation], *, keep: KeptOutput, budget_bytes: int
    ) -> None:
        self._copies = copies
        self._kinds = kinds
        self._keep = keep
        self._slabs = _Slabs(budget_bytes)
        # Keyed by the forward call's sequence number, ascending. Weak references: the autograd graph owns the tensors.
        self._layers: dict[int, list[weakref.ref[_Kept]]] = {}
        self._num_layers = 0
        self._given_up: deque[tuple[_Slab, list[tuple[Any, torch.Tensor]]]] = deque()

    @property
    def bytes_in_use(self) -> int:
        """Number of bytes up to the end of the last slab in use."""
        self._give_back()
        return self._slabs.end

    @not_compiled
    def checkpoint(self, own: Callable[..., Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a layer with ``own``, a partial of ``torch.utils.checkpoint.checkpoint``, and offload its activations."""
        layer: list[int] = []

        def put(tensor: torch.Tensor) -> _Kept:
            # Called only if gradients are enabled, so forward calls without gradients get no sequence number.
            if not layer:
                layer.append(self._begin_layer())
            return self._put(tensor, layer[0])

        def stash(results: Any) -> Callable[[], Any]:
            return partial(tree_map, self._take, tree_map(put, results))

        if "attention_outputs" in self._kinds:
            options["context_fn"] = checkpoint_contexts(self._keep, stash)
        if "layer_inputs" not in self._kinds:
            return own(function, *args, **options)
        hidden = args[0] if args else None
        if not isinstance(hidden, torch.Tensor):
            raise UserError(
                "memory.offload_activations: this model passes hidden states to its layers as a keyword argument, so "
                "layer_inputs can't be identified; remove layer_inputs from the list"
            )

        # The autograd graph keeps the hooks alive, so the hooks must not hold a reference to the input.
        inputs = [hidden.detach()]

        def pack(saved: torch.Tensor) -> Any:
            return put(inputs.pop()) if inputs and _is_same(saved, inputs[0]) else saved

        # These hooks see only the checkpoint's input; inside the layer, the checkpoint installs its own hooks.
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return own(function, *args, **options)

    def _begin_layer(self) -> int:
        """Return a sequence number for a layer's forward call, and free earlier activations on the device."""
        self._give_back()
        if not self._slabs.taken:
            # The remaining entries belong to a forward pass that never had a backward pass.
            self._layers.clear()
        number, self._num_layers = self._num_layers, self._num_layers + 1
        for one in self._kept_of(number - 2):
            one.leave_device(self._copies)
        self._layers[number] = []
        return number

    def _put(self, tensor: torch.Tensor, layer: int) -> _Kept:
        self._give_back()
        # Copy in storage order, so that the restored activation has the same strides.
        is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        dense = tensor if is_dense else tensor.contiguous()
        flat = _flat(dense)
        kept = _Kept(
            layer=layer,
            slab=self._slabs.take(len(flat)),
            like=torch.empty_like(dense, device="meta"),
            device=tensor.device,
            given_up=self._given_up,
            tensor=tensor,
            version=tensor._version,
        )
        kept.running.append((self._copies.copy_out(flat, kept.slab.start), flat))
        self._layers[layer].append(weakref.ref(kept))
        return kept

    def _unpack(self, packed: Any) -> torch.Tensor:
        value: torch.Tensor = self._take(packed) if isinstance(packed, _Kept) else packed
        return value

    def _take(self, kept: _Kept) -> torch.Tensor:
        """Return an activation to the backward pass, and prefetch the rest of this layer and the next layer."""
        if kept.is_taken:
            raise RuntimeError(
                "an activation in host memory is available to one backward pass only; to run the backward pass twice "
                "(retain_graph=True), set memory.offload_activations: []"
            )
        self._give_back()
        following = next((layer for layer in reversed(self._layers) if layer < kept.layer), -1)
        for layer in (kept.layer, following):
            for one in self._kept_of(layer):
                one.return_to_device(self._copies)
        value = kept.take(self._copies)
        if not self._kept_of(kept.layer):
            del self._layers[kept.layer]
        return value

    def _kept_of(self, layer: int) -> list[_Kept]:
        found = (reference() for reference in self._layers.get(layer, ()))
        return [kept for kept in found if kept is not None and not kept.is_taken]

    def _give_back(self) -> None:
        while self._given_up:
            slab, running = self._given_up.popleft()
            _wait(self._copies, running)
            self._slabs.give_back(slab)


def _wait(copies: HostCopies, running: list[tuple[Any, torch.Tensor]]) -> None:
    for copy, _ in running:
        copies.wait(copy)
    running.clear()


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor's bytes, in storage order."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    layouts = ((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in (one, other))
    return len(set(layouts)) == 1


_log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""Number of bytes pinned per call."""


def host_range(num_bytes: int) -> torch.Tensor:
    """Reserve a range of host memory as a uint8 tensor. Pages are allocated when they are first written.

    Raises:
        UserError: The operating system refuses the reservation.
    """
    try:
        return reserve_host(num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"memory.offload_activations: {num_bytes:,} bytes of host memory can't be reserved ({error}); decrease "
            "data.context_tokens, increase parallel.sp_size, or set memory.offload_activations: []"
        ) from error


class CpuCopies:
    """Synchronous copies between the CPU and the host range."""

    def __init__(self, num_bytes: int) -> None:
        self._range = host_range(num_bytes)

    def copy_out(self, source: torch.Tensor, start: int) -> None:
        """Copy ``source`` into the host range at offset ``start``."""
        self._range[start : start + len(source)].copy_(source)

    def copy_in(self, start: int, target: torch.Tensor) -> None:
        """Copy from the host range at offset ``start`` into ``target``."""
        target.copy_(self._range[start : start + len(target)])

    def wait(self, copy: None) -> None:
        """Return immediately: copies on the CPU are synchronous."""


class CudaCopies:
    """Asynchronous copies between a GPU and the host range, on a separate stream."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pinned = PinnedRange(host_range(num_bytes), device)
        self._stream = torch.cuda.Stream(device)

    def copy_out(self, source: torch.Tensor, start: int) -> torch.cuda.Event:
        """Start copying ``source`` into the host range at offset ``start``."""
        with self._copying() as ended:
            for host, part in self._pinned.pieces(start, len(source)):
                host.copy_(source[part], non_blocking=True)
        return ended

    def copy_in(self, start: int, target: torch.Tensor) -> torch.cuda.Event:
        """Start copying from the host range at offset ``start`` into ``target``."""
        with self._copying() as ended:
            for host, part in self._pinned.pieces(start, len(target)):
                target[part].copy_(host, non_blocking=True)
        return ended

    def wait(self, copy: torch.cuda.Event) -> None:
        """Make the current stream wait for a copy."""
        torch.cuda.current_stream(self._stream.device).wait_event(copy)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[torch.cuda.Event]:
        # Look up the current stream for each copy, since the backward pass runs on a stream of its own.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            yield ended
            ended.record(self._stream)


class PinnedRange:
    """A range of host memory that is pinned on first use, or stays pageable if pinning fails."""

    def __init__(self, memory: torch.Tensor, device: torch.device, cudart: Callable[[], Any] | None = None) -> None:
        self._memory = memory
        self._device, self._cudart = device, cudart
        self._pinned_to = 0
        self._is_pinnable = True

    def pieces(self, start: int, num_bytes: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the pinned pieces that a copy covers, each with the matching slice of the tensor."""
        stop = start + num_bytes
        self._pin_to(stop)
        while start < stop:
            end = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
            yield self._memory[start:end], slice(num_bytes - (stop - start), num_bytes - (stop - end))
            start = end

    def _pin_to(self, stop: int) -> None:
        while self._is_pinnable and self._pinned_to < stop:
            piece = self._memory[self._pinned_to : self._pinned_to + PIECE_BYTES]
            error = pin(piece, self._device, owner=self, cudart=self._cudart)
            if error:
                self._is_pinnable = False
                _log.warning(
                    "memory.offload_activations: host memory can't be pinned beyond %d bytes (CUDA error %d); copies "
                    "to and from unpinned memory are slower and block computation. Raise the locked-memory limit "
                    "(ulimit -l, or the container's limit)",
                    self._pinned_to,
                    error,
                )
                return
            self._pinned_to += len(piece)


HostCopies = CpuCopies | CudaCopies
