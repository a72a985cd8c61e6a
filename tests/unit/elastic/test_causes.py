"""The root cause of a failed attempt among what it did to the other ranks, and which failures count."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ray_ulysses.checkpoint import CheckpointError
from ray_ulysses.elastic.causes import RankError, failures_that_count, lost, process_end, raised, root_cause
from ray_ulysses.errors import BrokenRanksError, PeerError, RunError, UserError
from ray_ulysses.tracking.events import StartFailed

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
    CheckpointError("No space left on device"),
    # What rows or a program do on a GPU.
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    UserError("data.path: a file about Xid and misaligned address"),
]
DEVICES = [
    RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: misaligned address"),
    RuntimeError("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."),
    dist.DistBackendError("NCCL error, unhandled cuda error. Cuda failure 'unspecified launch failure'"),
    RunError("the self-test failed to run on rank 3 (n1): CUDA error: hardware stack error. Training uses"),
    BrokenRanksError("the self-test failed on 1 of 4 ranks", {3}),
]


@pytest.mark.parametrize(
    ("errors", "kind"),
    [(CONSEQUENCES, "consequence"), (CAUSES, "raised"), (DEVICES, "device")],
    ids=["consequences", "causes", "devices"],
)
def test_an_error_is_classified_by_what_it_says(errors: list[BaseException], kind: str) -> None:
    assert [(str(error), raised(3, error).kind) for error in errors] == [(str(error), kind) for error in errors]


def test_the_cause_is_found_among_its_consequences_in_any_order() -> None:
    rng = random.Random(0)
    for _ in range(300):
        world = rng.randrange(2, 9)
        culprit, is_lost, error = rng.randrange(world), rng.random() < 0.5, rng.choice(CAUSES)
        own = lost(culprit, RAY_DUMP) if is_lost else raised(culprit, error)
        others = [raised(rank, rng.choice(CONSEQUENCES)) for rank in range(world) if rank != culprit]
        # Some ranks have not ended yet.
        errors = [own, *rng.sample(others, rng.randrange(world))]
        rng.shuffle(errors)
        cause = root_cause(errors)
        reason = "lost worker {} (killed by signal 9)" if is_lost else f"worker {{}} raised {type(error).__name__}"
        assert (cause.rank, cause.kind) == (culprit, "lost" if is_lost else "raised")
        assert cause.reason.startswith(reason.format(culprit)) and "\n" not in cause.reason and cause.hint


def test_workers_that_were_lost_together_are_named_together_in_one_short_line() -> None:
    node = "The actor died because its node has died. Node Id: 0123"
    errors = [raised(0, GLOO), *(lost(rank, node) for rank in (3, 2))]
    assert root_cause(errors).reason == "lost workers 2, 3 (the node died)"
    many = [lost(rank, node) for rank in range(64)]
    assert root_cause(many).reason == "lost 64 workers, 0 to 63 (the node died)"
    long = root_cause([raised(0, ValueError("a" * 10_000 + "\nb"))])
    assert len(long.reason) < 500 and "\n" not in long.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RAY_DUMP, "signal 9"),
        ("Worker exit detail: 1 worker(s) were killed due to the node running low on memory. Memory", "memory monitor"),
        ("The actor died because its node has died. Node Id: 01", "node died"),
        ("A worker health check has been hanging for 31.24 seconds.", "31 s"),
        ("The actor died unexpectedly before finishing this task.", "no reason"),
        ("The actor f1176da8 is unavailable: RpcError: RPC error: failed to", "can't be reached"),
        ("\n\nsomething new\nand more", "something new"),
    ],
    ids=["signal", "memory monitor", "node", "hang", "unsaid", "unreachable", "unknown"],
)
def test_what_ray_says_of_a_lost_worker_is_put_into_words(text: str, words: str) -> None:
    found = lost(0, text)
    assert found.kind == "lost" and words in found.what and "\n" not in found.what


NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details)"
WATCHDOG = """\
[rank1]:[E1128 08:51:32 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: {}
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2363 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in libc10.so)

"""


def test_a_failed_gpu_or_network_is_named_with_its_node_and_the_hint_fits_the_cause() -> None:
    own = replace(raised(3, DEVICES[0]), node="n1/10.0.0.1")
    cause = root_cause([raised(0, GLOO), raised(1, ValueError("what?")), own])
    assert (cause.kind, cause.rank, cause.node) == ("device", 3, "n1/10.0.0.1")
    assert "n1/10.0.0.1" in cause.reason and "uncorrectable ECC" in cause.reason
    assert "nvidia-smi" in cause.hint and "n1/10.0.0.1" in cause.hint
    # The ranks that compute rightly report the broken one as a peer.
    assert raised(0, BrokenRanksError("the self-test failed", {3})).kind == "consequence"
    own = replace(raised(5, dist.DistBackendError(NCCL)), node="n2")
    cause = root_cause([raised(0, GLOO), own, raised(7, dist.DistBackendError("NCCL error: remote process exited"))])
    assert (cause.kind, cause.rank, cause.node) == ("consequence", 5, "n2")
    assert "worker 5 on n2" in cause.reason and "network of n2" in cause.hint and "NCCL_DEBUG" in cause.hint
    cause = root_cause([raised(2, GLOO), raised(1, GLOO)])
    assert (cause.kind, cause.rank) == ("consequence", 1) and "elastic.collective_timeout_s" in cause.hint
    assert "parallel.sp_size" in root_cause([raised(1, torch.OutOfMemoryError("CUDA out of memory."))]).hint


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "what"),
    [
        (-11, "", "lost", "killed by signal 11"),
        (-11, "a\nb\nc\n\nd\n", "lost", "killed by signal 11; the last lines of its stderr: b | c | d"),
        (1, "no module\n", "lost", "ended with exit code 1; the last lines of its stderr: no module"),
        # NCCL's watchdog ends processes whose peer or GPU has failed.
        (-6, WATCHDOG.format("NCCL error: remote process exited"), "consequence", "remote process exited"),
        (-6, WATCHDOG.format("CUDA error: uncorrectable ECC error encountered"), "device", "killed by signal 6"),
    ],
)
def test_the_end_of_a_process_is_told_with_its_last_words(code: int, stderr: str, kind: str, what: str) -> None:
    found, text = process_end(code, stderr)
    assert found == kind and "\n" not in text and "frame #" not in text
    assert text == what if kind == "lost" else what in text


def test_a_process_that_aborts_is_not_the_cause_where_another_one_is_gone() -> None:
    """Some libraries abort when a peer is gone, and do not say so."""
    aborted = RankError(rank=0, kind="lost", what="killed by signal 6; the last lines of its stderr: what?")
    for errors in itertools.permutations([aborted, lost(2, RAY_DUMP), raised(1, ValueError("what?"))]):
        assert root_cause(errors).reason == "lost worker 2 (killed by signal 9)"
    assert root_cause([aborted]).rank == 0


DAY = 86400.0


def failed(time: float, step: int | None, number: int | None = 1) -> StartFailed:
    return StartFailed(time=time, attempt=1, reason="lost", committed_step=step, failure=number)


@pytest.mark.parametrize(
    ("past", "now", "step", "count"),
    [
        pytest.param([(0.0, 10), (60.0, 10), (120.0, 10)], 180.0, 10, 3, id="no progress"),
        pytest.param([(0.0, 10), (60.0, 10), (120.0, 20)], 180.0, 20, 1, id="a newer checkpoint forgives"),
        pytest.param([(0.0, 10), (60.0, 10), (120.0, 20)], 180.0, 30, 0, id="forgives all"),
        pytest.param([(0.0, 10), (60.0, 10)], DAY + 30.0, 10, 1, id="outside of the window"),
        pytest.param([(0.0, 10), (1.0, None)], 2.0, None, 2, id="a storage that does not say is no progress"),
        pytest.param([(1.0, None)], 2.0, 10, 1, id="it did not say before"),
        pytest.param([(0.0, 10, None), (1.0, 10, None), (3.0, 10)], 4.0, 10, 1, id="not charged"),
    ],
)
def test_failures_count_without_progress_within_the_window(
    past: list[tuple[float, int]], now: float, step: int | None, count: int
) -> None:
    assert failures_that_count([failed(*one) for one in past], now=now, step=step, window_s=DAY) == count
