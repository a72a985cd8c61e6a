from __future__ import annotations

import pytest
import torch

from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.staging import LentBuffer, Staging, _pinned
from ray_ulysses.checkpoint.state import ShardedState, StateDescription, TensorPart


def state(**sizes: int) -> ShardedState:
    parts = tuple(
        TensorPart(key=key, start=number, tensor=torch.randn(size)) for number, (key, size) in enumerate(sizes.items())
    )
    return ShardedState(parts=parts, description=StateDescription(tensors={}))


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_a_buffer_holds_whatever_state_is_staged_in_it_next(num_buffers: int) -> None:
    staging = Staging(num_buffers, torch.device("cpu"))
    small, other, large = state(a=5, b=70), state(a=70, b=5), state(a=500, b=70, c=9)
    for source in (small, small, other, large, other, small, large, large):
        staged = staging.stage(source)
        assert staged.state.description is source.description
        for part, copy in zip(source.parts, staged.state.parts, strict=True):
            assert (copy.key, copy.start) == (part.key, part.start)
            assert torch.equal(copy.tensor, part.tensor)
            assert copy.tensor.data_ptr() != part.tensor.data_ptr()
        staging.release(staged.buffer)
    # As much as the largest took, without gaps.
    assert staging.num_bytes <= num_buffers * 4 * (500 + 70 + 9)


def test_two_states_that_are_held_at_once_do_not_share_memory() -> None:
    staging = Staging(2, torch.device("cpu"))
    first, second = state(a=5), state(a=5)
    held = [staging.stage(first), staging.stage(second)]
    for staged, source in zip(held, (first, second), strict=True):
        assert torch.equal(staged.state.parts[0].tensor, source.parts[0].tensor)


class FakeRuntime:
    """Stands for CUDA's runtime, which pins memory by its address."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.pinned = error, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        if not self.error:
            self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def test_memory_that_is_lent_is_pinned_while_it_is_there() -> None:
    runtime = FakeRuntime()
    memory = _pinned(torch.zeros(4096, dtype=torch.uint8), torch.device("cpu"), lambda: runtime)
    assert runtime.pinned == {memory.data_ptr(): 4096}
    del memory
    assert runtime.pinned == {}
    with pytest.raises(MemoryError, match=r"CUDA error 2; raise the limit of locked memory \(ulimit -l\)"):
        _pinned(torch.zeros(4096, dtype=torch.uint8), torch.device("cpu"), lambda: FakeRuntime(error=2))


def test_memory_that_nobody_lends_is_said_and_nothing_is_kept() -> None:
    def lend(num_bytes: int) -> LentBuffer:
        raise OSError(28, "No space left on device")

    staging = Staging(2, torch.device("cpu"), lend=lend)
    with pytest.raises(CheckpointError, match=r"no 0.0 GiB.*No space left on device.*set elastic.peer_memory"):
        staging.reserve(ShardedState(parts=(), description=StateDescription(tensors={})).intervals)
    assert staging.num_bytes == 0 and not staging.is_ready
