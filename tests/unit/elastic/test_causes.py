"""The root cause of a failed attempt is told apart from what it did to the other ranks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from ray_ulysses.checkpoint import CheckpointError
from ray_ulysses.elastic.causes import RankError, is_consequence, lost, raised, root_cause
from ray_ulysses.errors import PeerError, RunError, UserError

GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9"
)
RAY_DUMP = """The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tactor_id: 0123456789abcdef
\tpid: 4242
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed
by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly."""
CONSEQUENCES = [
    GLOO,
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete"),
    RuntimeError("Connection reset by peer"),
    ConnectionError("Broken pipe"),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited"),
    dist.DistNetworkError("The client socket has timed out"),
    PeerError("another rank could not save; its log says why"),
]
CAUSES = [
    ValueError("Connection closed by peer is what a user wrote"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    IndexError("index out of range in self"),
    UserError("data.path: no such corpus"),
    CheckpointError("No space left on device"),
    RunError("the loss of rows 0 to 5 is nan"),
    KeyError("weight"),
]


@pytest.mark.parametrize("error", CONSEQUENCES, ids=lambda error: type(error).__name__)
def test_an_error_that_only_says_that_a_peer_is_gone_is_a_consequence(error: BaseException) -> None:
    assert is_consequence(error)


@pytest.mark.parametrize("error", CAUSES, ids=lambda error: type(error).__name__)
def test_an_error_of_ones_own_is_a_cause(error: BaseException) -> None:
    assert not is_consequence(error)


def test_the_cause_is_found_among_its_consequences_whatever_the_order() -> None:
    rng = random.Random(0)
    for _ in range(600):
        world = rng.randrange(2, 9)
        culprit = rng.randrange(world)
        is_lost = rng.random() < 0.5
        error = rng.choice(CAUSES)
        own = lost(culprit, RAY_DUMP) if is_lost else raised(culprit, error)
        others = [raised(rank, rng.choice(CONSEQUENCES)) for rank in range(world) if rank != culprit]
        # Some ranks have not ended yet.
        errors = [own, *rng.sample(others, rng.randrange(world))]
        rng.shuffle(errors)
        cause = root_cause(errors)
        assert cause.rank == culprit
        if is_lost:
            assert (cause.kind, cause.reason) == ("lost", f"lost worker {culprit} (killed by signal 9)")
        else:
            assert cause.kind == "raised"
            assert cause.reason.startswith(f"worker {culprit} raised {type(error).__name__}")
        assert "\n" not in cause.reason and cause.hint


def test_a_worker_that_is_gone_comes_before_one_that_raised() -> None:
    for errors in itertools.permutations([lost(1, RAY_DUMP), raised(0, ValueError("what?")), raised(2, GLOO)]):
        assert root_cause(errors).reason == "lost worker 1 (killed by signal 9)"


def test_workers_that_were_lost_together_are_named_together() -> None:
    node = "The actor died because its node has died. Node Id: 0123"
    errors = [raised(0, GLOO), *(lost(rank, node) for rank in (3, 2))]
    assert root_cause(errors).reason == "lost workers 2, 3 (its node died)"
    many = [lost(rank, node) for rank in range(64)]
    assert root_cause(many).reason == "lost 64 workers, 0 to 63 (its node died)"


def test_consequences_alone_say_so() -> None:
    cause = root_cause([raised(2, GLOO), raised(1, GLOO)])
    assert cause.kind == "consequence" and cause.rank == 1
    assert cause.reason.startswith("worker 1 lost touch with the others: RuntimeError")
    assert "elastic.collective_timeout_s" in cause.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (RAY_DUMP, "killed by signal 9"),
        (
            "Worker exit detail: 1 worker(s) were killed due to the node running low on memory. Memory on the node",
            "killed by Ray's memory monitor, since its node ran low on memory",
        ),
        ("The actor died because its node has died. Node Id: 01", "its node died"),
        ("A worker health check has been hanging for 31.24 seconds.", "it did not answer for 31 s"),
        ("The actor died unexpectedly before finishing this task.", "its process died, and Ray gives no reason"),
        (
            "The actor f1176da8 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: failed to",
            "its process can't be reached",
        ),
        ("\n\nsomething new\nand more", "something new"),
    ],
    ids=["signal", "memory monitor", "node", "hang", "unsaid", "unreachable", "unknown"],
)  # fmt: skip
def test_what_ray_says_of_a_lost_worker_is_put_into_words(text: str, what: str) -> None:
    assert lost(0, text) == RankError(rank=0, kind="lost", what=what)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "parallel.sp_size"),
        (ValueError("x"), "the log of that worker"),
    ],
)
def test_the_hint_fits_the_cause(error: BaseException, words: str) -> None:
    assert words in root_cause([raised(1, error)]).hint


def test_a_long_error_is_one_line() -> None:
    cause = root_cause([raised(0, ValueError("a" * 10_000 + "\nb"))])
    assert len(cause.reason) < 500 and cause.reason.endswith("...")
