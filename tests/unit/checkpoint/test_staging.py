from __future__ import annotations

import pytest
import torch

from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.staging import LentBuffer, Staging
from ray_ulysses.checkpoint.state import ShardedState, StateDescription, TensorPart
from tests.unit.fake_cuda import FakeCuda


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
    reserved = Staging(num_buffers, torch.device("cpu"))
    reserved.reserve(large.intervals)
    size = reserved.num_bytes
    assert size > 0 and reserved.stage(large).buffer == 0 and reserved.num_bytes == size


def test_buffers_are_pinned_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, third = FakeCuda.installed(monkeypatch), torch.device("cuda", 3)
    torch.cuda.set_device(third)
    staging = Staging(1, third)
    staging.reserve(state(a=500).intervals)
    assert list(cuda.pinned.values()) == [2000]
    del staging
    assert cuda.pinned == {}
    monkeypatch.setattr("ray_ulysses.checkpoint.staging.pin", lambda *_, **__: 2)
    with pytest.raises(CheckpointError, match=r"CUDA error 2.*ulimit -l"):
        Staging(1, third).reserve(state(a=500).intervals)


def test_memory_that_nobody_lends_is_said_and_nothing_is_kept() -> None:
    def lend(num_bytes: int) -> LentBuffer:
        raise OSError(28, "No space left on device")

    staging = Staging(2, torch.device("cpu"), lend=lend)
    with pytest.raises(CheckpointError, match=r"No space left on device.*elastic.peer_memory"):
        staging.reserve(ShardedState(parts=(), description=StateDescription(tensors={})).intervals)
    assert staging.num_bytes == 0 and not staging.is_ready
