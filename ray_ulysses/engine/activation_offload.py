"""Keeps the activations that gradient checkpointing saves in host memory between the forward and the backward pass.

A layer's input and the results of its attention are copied out when they are made, and copied back one layer ahead of
the backward pass. The activations of two layers are on the device at once: in the forward pass the current and the
previous layer's, whose copies may still be running; in the backward pass the current and the next layer's.

The range of host memory is reserved at once and takes memory as it is used. With CUDA, the used part is pinned piece by
piece, so that copies are asynchronous; torch's own pinned memory would be rounded up to a power of two.

A copy begins after all work that the caller has queued before. It has ended for work that is queued after `wait`; until
then, the source must not be written or freed, and the destination must not be read, written or freed.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from ray_ulysses.attention.recompute import CHANGED_IN_PLACE, KeptOutput, checkpoint_contexts
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.device import pin, reserve_host

if TYPE_CHECKING:
    from torch import nn

    from ray_ulysses.config.running import KeptActivation

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
    """Keep activations of a model's checkpointed layers in host memory.

    Call it after gradient checkpointing is enabled. Nothing is changed if ``kinds`` is empty. ``budget_bytes`` limits
    the host memory.
    """
    if not kinds:
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    # A layer inside a layer, as in Zamba, is recomputed with the outer layer.
    around = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
    inner = {one for layer in around for one in layer.modules() if one is not layer}
    layers = [layer for layer in layers if layer not in inner]
    # The budget does not include the alignment of slabs.
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
    """The host memory, allocated as a stack, since the backward pass frees slabs in roughly reverse order."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._taken: list[_Slab] = []

    @property
    def are_free(self) -> bool:
        """Whether no slab is in use."""
        return not self._taken

    @property
    def end(self) -> int:
        """The end of the last slab in use."""
        return self._taken[-1].stop if self._taken else 0

    def take(self, num_bytes: int) -> _Slab:
        """Take a slab.

        Raises:
            UserError: It does not fit.
        """
        start = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > self._budget_bytes:
            raise UserError(
                f"memory.offload_activations: {num_bytes:,} bytes in addition to {start:,} do not fit in the "
                f"{self._budget_bytes:,} bytes of host memory that are planned for activations; run the backward pass "
                "of each forward pass before the next forward pass, or, if the model keeps more than `plan` counts, "
                "set memory.offload_activations: []"
            )
        slab = _Slab(start, start + num_bytes)
        self._taken.append(slab)
        return slab

    def give_back(self, slab: _Slab) -> None:
        slab.is_free = True
        while self._taken and self._taken[-1].is_free:
            self._taken.pop()


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Kept:
    """A tensor in host memory; its slab is freed once the tensor is taken or deleted."""

    layer: int
    """Number of its layer's forward."""
    slab: _Slab
    like: torch.Tensor
    """Shape, strides and dtype, on the meta device."""
    device: torch.device
    given_up: deque[tuple[_Slab, list[tuple[Any, torch.Tensor]]]]
    """Queue of slabs to free, with the copies to wait for first."""
    tensor: torch.Tensor | None
    """The tensor on the device, as long as its copy to the host may be running."""
    version: int
    """The tensor's version when it was copied."""
    target: torch.Tensor | None = None
    """Destination of the copy back to the device."""
    running: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """Copies that may be running, with their tensors on the device."""
    is_taken: bool = False

    def leave_device(self, copies: HostCopies) -> None:
        """Free the tensor on the device once it is copied."""
        if self.tensor is not None:
            self._check()
            _wait(copies, self.running)
            self.tensor = None

    def return_to_device(self, copies: HostCopies) -> None:
        """Start copying the tensor back, if it has left the device."""
        if self.tensor is None and self.target is None:
            self.target = torch.empty_like(self.like, device=self.device)
            flat = _flat(self.target)
            self.running.append((copies.copy_in(self.slab.start, flat), flat))

    def take(self, copies: HostCopies) -> torch.Tensor:
        """Return the tensor on the device, and give up its slab."""
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
        # A destructor may run at any time, so it must not wait for a copy.
        if not self.is_taken:
            self.given_up.append((self.slab, self.running))

    def _check(self) -> None:
        if self.tensor is not None and self.tensor._version != self.version:
            raise RuntimeError(CHANGED_IN_PLACE.format("an activation that is copied to host memory"))


class ActivationOffload:
    """Activations of checkpointed layers in host memory."""

    def __init__(
        self, copies: HostCopies, kinds: Collection[KeptActivation], *, keep: KeptOutput, budget_bytes: int
    ) -> None:
        self._copies = copies
        self._kinds = kinds
        self._keep = keep
        self._slabs = _Slabs(budget_bytes)
        # By the number of the layer's forward, ascending. Weak references, since the graph owns the tensors.
        self._layers: dict[int, list[weakref.ref[_Kept]]] = {}
        self._num_layers = 0
        self._given_up: deque[tuple[_Slab, list[tuple[Any, torch.Tensor]]]] = deque()

    @property
    def bytes_in_use(self) -> int:
        """Host memory up to the end of the last slab in use."""
        self._give_back()
        return self._slabs.end

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def checkpoint(self, own: Callable[..., Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a layer through ``own``, a partial of ``torch.utils.checkpoint.checkpoint``."""
        layer: list[int] = []

        def put(tensor: torch.Tensor) -> _Kept:
            # Called only with gradients, so that other forwards are not numbered.
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
                "memory.offload_activations: this model passes its layers their input as a keyword, so layer_inputs "
                "can't be identified; leave layer_inputs out"
            )

        # The graph keeps the hooks, which must not keep the input.
        inputs = [hidden.detach()]

        def pack(saved: torch.Tensor) -> Any:
            return put(inputs.pop()) if inputs and _is_same(saved, inputs[0]) else saved

        # Applies to the checkpoint's input only; inside the layer, the checkpoint's own hooks apply.
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return own(function, *args, **options)

    def _begin_layer(self) -> int:
        """Return the number of a new layer's forward; of earlier layers, only the last one stays on the device."""
        self._give_back()
        if self._slabs.are_free:
            # Layers of an abandoned forward pass.
            self._layers.clear()
        number, self._num_layers = self._num_layers, self._num_layers + 1
        for one in self._kept_of(number - 2):
            one.leave_device(self._copies)
        self._layers[number] = []
        return number

    def _put(self, tensor: torch.Tensor, layer: int) -> _Kept:
        self._give_back()
        # Copied in storage order, so that it comes back with the same strides.
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
        """Return a tensor to the backward pass; start copying back the rest of its layer, and the next layer."""
        if kept.is_taken:
            raise RuntimeError(
                "an activation was kept in host memory for one backward pass; a checkpointed layer can't run it twice "
                "(retain_graph=True) unless memory.offload_activations: [] is set"
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
"""Bytes that are pinned at once."""


def host_range(num_bytes: int) -> torch.Tensor:
    """Reserve host memory as uint8; a page takes memory once it is written.

    Raises:
        UserError: The system refuses the reservation.
    """
    try:
        return reserve_host(num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"memory.offload_activations: {num_bytes:,} bytes of host memory can't be reserved ({error}); use a "
            "smaller data.context_tokens, a larger parallel.sp_size, or memory.offload_activations: []"
        ) from error


class CpuCopies:
    """Synchronous copies on the host."""

    def __init__(self, num_bytes: int) -> None:
        self._range = host_range(num_bytes)

    def copy_out(self, source: torch.Tensor, start: int) -> None:
        """Copy ``source`` to the range."""
        self._range[start : start + len(source)].copy_(source)

    def copy_in(self, start: int, target: torch.Tensor) -> None:
        """Copy from the range to ``target``."""
        target.copy_(self._range[start : start + len(target)])

    def wait(self, copy: None) -> None:
        """Do nothing: the copy has ended."""


class CudaCopies:
    """Asynchronous copies on a separate stream."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pinned = PinnedRange(host_range(num_bytes), device)
        self._stream = torch.cuda.Stream(device)

    def copy_out(self, source: torch.Tensor, start: int) -> torch.cuda.Event:
        """Start copying ``source`` to the range."""
        with self._copying() as ended:
            for host, part in self._pinned.pieces(start, len(source)):
                host.copy_(source[part], non_blocking=True)
        return ended

    def copy_in(self, start: int, target: torch.Tensor) -> torch.cuda.Event:
        """Start copying from the range to ``target``."""
        with self._copying() as ended:
            for host, part in self._pinned.pieces(start, len(target)):
                target[part].copy_(host, non_blocking=True)
        return ended

    def wait(self, copy: torch.cuda.Event) -> None:
        """Make the current stream wait for a copy."""
        torch.cuda.current_stream(self._stream.device).wait_event(copy)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[torch.cuda.Event]:
        # Looked up each time, since a backward pass has its own current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            yield ended
            ended.record(self._stream)


class PinnedRange:
    """A range of host memory that is pinned as it is used, or stays pageable if pinning fails."""

    def __init__(self, memory: torch.Tensor, device: torch.device, cudart: Callable[[], Any] | None = None) -> None:
        self._memory = memory
        self._device, self._cudart = device, cudart
        self._pinned_to = 0
        self._is_pinnable = True

    def pieces(self, start: int, num_bytes: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield parts of the range, each within one pinned piece, and their slices of the tensor."""
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
                    "of the rest are slower and block the computation. Raise the limit of locked memory (ulimit -l, or "
                    "the container's limit)",
                    self._pinned_to,
                    error,
                )
                return
            self._pinned_to += len(piece)


HostCopies = CpuCopies | CudaCopies
