"""Finds the root cause of a failed attempt among the errors that it caused on other ranks (pure)."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ray_ulysses.errors import BrokenRanksError, PeerError

if TYPE_CHECKING:
    from ray_ulysses.tracking.events import EndEvent

OUT_OF_MEMORY = "ran out of memory"
"""Part of the text of a failure for lack of memory."""

Kind = Literal["preempted", "lost", "device", "raised", "consequence", "start", "controller"]
"""A node that was taken away as announced, a worker whose process is gone, a GPU or network that has failed, an error
of a worker's own, an error that another rank's end has caused, workers that did not start, and the end of the process
that supervises them."""

_RANK_KINDS: tuple[Kind, ...] = ("preempted", "lost", "device", "raised", "consequence")
"""Each kind can cause those after it: a worker that has raised lives until the group is ended, so that a worker that is
gone failed first."""
_MOST_RANKS = 8
_MOST_CHARACTERS = 400
_LAST_LINES = 3
_COLLECTIVE_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
_COLLECTIVE_TEXT = re.compile(
    r"gloo/|connection closed by peer|connection reset by peer|connection refused|broken pipe|socket (closed|timeout)"
    r"|timed out waiting \d+ ?ms for (recv|send)|NCCL|ProcessGroup|store.*(timed out|timeout)",
    re.IGNORECASE,
)
_NETWORK_TEXT = re.compile(r"unhandled system error|ncclSystemError")
"""NCCL's words for a call of the operating system that failed on the rank itself, as on a broken network card."""
_DEVICE_TEXT = re.compile(
    r"ECC error|NVLink error|\bXid\b|fallen off the bus|unspecified launch failure|misaligned address"
    r"|hardware stack error|illegal instruction was encountered|invalid program counter"
    r"|no CUDA-capable device is detected|No CUDA GPUs are available"
)
"""The words of CUDA and its driver for a GPU that has failed. Those that a program can also cause (a launch failure,
a misaligned address) then recur on other nodes. An illegal access and an assertion are the program's."""
_FRAME = re.compile(r"frame #\d+: |Exception raised from |  File |Traceback ")
_ABORTED = re.compile(rf"killed by signal {int(signal.SIGABRT)}\b")
_MEMORY_MONITOR = re.compile(r"(running|ran) low on memory|memory pressure", re.IGNORECASE)
_NODE_DIED = re.compile(r"node (has died|died|was terminated|is dead|failure)|node .{0,80}marked dead", re.IGNORECASE)
_NO_ANSWER = re.compile(r"health check has been hanging for ([\d.]+)")
_UNREACHABLE = re.compile(r"actor \w+ is unavailable")
_DIED = re.compile(r"actor died unexpectedly", re.IGNORECASE)
_DISCONNECTED = re.compile(r"connection error code 2|end of file", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """The end of one rank's worker."""

    rank: int
    kind: Kind
    what: str
    """The error in one line, or how the process was lost."""
    silent_s: float = 0.0
    """Seconds without a sign of life before that was noticed."""
    node: str = ""
    """Name of its node in the journal; empty if its supervisor could not say."""

    @property
    def is_of_network(self) -> bool:
        """Whether NCCL met an error of this rank's own network, and not only of a peer."""
        return _NETWORK_TEXT.search(self.what) is not None

    @property
    def without_numbers(self) -> str:
        """What happened; of a lack of memory without its numbers, which differ a little each time."""
        return re.sub(r"\d+(\.\d+)?", "#", self.what) if OUT_OF_MEMORY in self.what else self.what


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why an attempt failed."""

    kind: Kind
    reason: str
    rank: int | None
    """The rank on which it began; None if on none."""
    hint: str
    is_final: bool = False
    """Whether it would recur if the workers were started again."""
    node: str = ""


def raised(rank: int, error: BaseException) -> RankError:
    """Return the end of a worker that raised an error."""
    return RankError(rank=rank, kind=kind_of(error, rank), what=one_line(error))


def kind_of(error: BaseException, rank: int) -> Kind:
    """Return the kind of an error that a rank raised."""
    if isinstance(error, BrokenRanksError):
        return "device" if rank in error.ranks else "consequence"
    if isinstance(error, RuntimeError) and _DEVICE_TEXT.search(str(error)):
        return "device"
    return "consequence" if is_consequence(error) else "raised"


def process_end(code: int, stderr: str) -> tuple[Kind, str]:
    """Return the kind of the end of a process that raised nothing, and one line about it."""
    how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not _FRAME.match(line)]
    if code == -signal.SIGKILL or not lines:
        # A killed process writes nothing about it.
        return "lost", how
    what = _shortened(f"{how}; the last lines of its stderr: {' | '.join(lines[-_LAST_LINES:])}")
    if _DEVICE_TEXT.search(stderr):
        return "device", what
    # NCCL's watchdog aborts a process whose peer is gone.
    is_abort = code == -signal.SIGABRT and _COLLECTIVE_TEXT.search(stderr)
    return "consequence" if is_abort else "lost", what


def lost(rank: int, text: str) -> RankError:
    """Return the end of a worker whose process is gone."""
    silent = _NO_ANSWER.search(text)
    if _MEMORY_MONITOR.search(text):
        what = "killed by Ray's memory monitor, since its node ran low on memory"
    elif _NODE_DIED.search(text):
        what = "its node died"
    elif silent:
        what = f"it did not answer for {float(silent[1]):.0f} s"
    elif _DISCONNECTED.search(text):
        # Ray knows only that the process is gone, and that it has raised nothing.
        what = "killed by signal 9"
    elif _UNREACHABLE.search(text):
        what = "its process can't be reached"
    elif _DIED.search(text):
        what = "its process died, and Ray gives no reason"
    else:
        what = _shortened(text)
    return RankError(rank=rank, kind="lost", what=what)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports that another rank did not answer."""
    if isinstance(error, PeerError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    # Gloo raises plain RuntimeErrors; our own have other texts, and so has a GPU that is out of memory.
    is_plain = type(error).__module__ == "builtins" and isinstance(error, RuntimeError | ConnectionError | TimeoutError)
    return bool(names & _COLLECTIVE_TYPES) or (is_plain and _COLLECTIVE_TEXT.search(str(error)) is not None)


def root_cause(errors: Sequence[RankError], *, is_final: bool = False) -> Cause:
    """Return why an attempt failed, from how its ranks ended.

    Args:
        errors: One per rank that has ended, at least one.
        is_final: Whether the failure would recur if the workers were started again.
    """
    first = min(errors, key=_order)
    ranks = sorted(error.rank for error in errors if (error.kind, error.what) == (first.kind, first.what))
    where = f" on {first.node}" if first.node else ""
    if first.kind == "device":
        part = "network" if first.is_of_network else "GPU"
        reason = f"the {part} of worker {first.rank}{where} has failed, and the run avoids its node: {first.what}"
    elif first.kind == "raised":
        reason = f"worker {first.rank} raised {first.what}"
    elif first.kind == "consequence":
        where = where if first.is_of_network else ""
        reason = f"worker {first.rank}{where} lost touch with the others: {first.what}"
    else:
        reason = f"lost {_workers(ranks)} ({first.what})"
    hint = _hint(first)
    return Cause(kind=first.kind, reason=reason, rank=first.rank, hint=hint, is_final=is_final, node=first.node)


def _order(error: RankError) -> tuple[int, bool, bool, int]:
    """Return the place of an error among those of other ranks: causes come before what they may have caused."""
    is_abort = _ABORTED.match(error.what) is not None
    return _RANK_KINDS.index(error.kind), is_abort, not error.is_of_network, error.rank


def one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text that is not empty."""
    text = _shortened(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shortened(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 3] + "..."


def _workers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > _MOST_RANKS:
        return f"{len(ranks)} workers, {ranks[0]} to {ranks[-1]}"
    return f"workers {', '.join(map(str, ranks))}"


def _hint(error: RankError) -> str:
    if "memory monitor" in error.what:
        return "give the node more memory, or fewer workers, or reduce their memory (see `ray-ulysses plan`)"
    if "ran out of memory" in error.what:
        return "change what the error names; `ray-ulysses plan CONFIG --fit` with a lower memory.device_gib says more"
    if "out of memory" in error.what.lower():
        return (
            "reduce a worker's memory: raise parallel.sp_size or memory.attention_head_groups, set "
            "memory.offload_optimizer: cpu; `ray-ulysses plan` shows the terms"
        )
    if error.is_of_network:
        return (
            f"check the network of {error.node or 'that node'} and its links to the others (NCCL_DEBUG=INFO in the "
            "workers' environment says what failed), or take it out of the cluster"
        )
    if error.kind == "device":
        return (
            f"look on {error.node or 'its node'} for the driver's reports (`dmesg | grep -i xid`, `nvidia-smi -q`), "
            "then reset or replace the GPU, or take the node out of the cluster"
        )
    if error.kind == "lost" and "is gone" in error.what:
        return (
            "see whether its node has died, or whether the kernel has killed the process when memory ran out (see "
            "`dmesg` on its node)"
        )
    if error.kind == "lost" and "signal" in error.what:
        return (
            "unless somebody killed it, the kernel did when memory ran out (see `dmesg` on its node), or it crashed "
            "(see the end of its log)"
        )
    if error.kind == "raised":
        return "fix the cause; the log of that worker has the whole error"
    if error.kind == "consequence":
        return (
            "see the logs of the other workers for what delayed them; raise elastic.collective_timeout_s if they were "
            "only slow"
        )
    return "repair or replace the node"


def failures_that_count(past: Sequence[EndEvent], *, now: float, step: int | None, window_s: float) -> int:
    """Return how many of the earlier failures count beside one that happens now.

    A checkpoint that was committed since a failure is progress: a fault that recurs before the next checkpoint is the
    program's, and one that recurs after it is bad luck.

    Args:
        past: Earlier failures of the same command; those that were not charged don't count.
        now: Now, in seconds since the epoch.
        step: The newest committed step; None if unknown, which is no progress.
        window_s: Older failures don't count.
    """
    return sum(
        failure.failure is not None
        and now - failure.time <= window_s
        and not (step is not None and failure.committed_step is not None and failure.committed_step < step)
        for failure in past
    )
