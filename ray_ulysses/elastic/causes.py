"""Finds the root cause of a failed attempt among the errors of its ranks."""

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
"""Text that identifies an out-of-memory failure."""

Kind = Literal["preempted", "lost", "device", "raised", "consequence", "start", "controller"]
"""Kinds of failure: an announced preemption, a worker process that is gone, a broken GPU or network, an error raised by
the worker itself, an error caused by another rank's end, workers that did not start, and the end of the process that
supervises the workers."""

_RANK_KINDS: tuple[Kind, ...] = ("preempted", "lost", "device", "raised", "consequence")
"""Kinds of failure of a rank; each kind can cause the kinds after it. A worker that raised an error stays alive until
its group is ended, so a worker that is gone failed first."""
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
"""NCCL's messages for a system call that failed on this rank, such as on a broken network card."""
_DEVICE_TEXT = re.compile(
    r"ECC error|NVLink error|\bXid\b|fallen off the bus|unspecified launch failure|misaligned address"
    r"|hardware stack error|illegal instruction was encountered|invalid program counter"
    r"|no CUDA-capable device is detected|No CUDA GPUs are available"
)
"""Messages of CUDA and its driver for a broken GPU. A program can also cause a launch failure or a misaligned address,
which then recurs on other nodes. Illegal accesses and assertions are always the program's fault."""
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
    """Failure of one rank's worker."""

    rank: int
    kind: Kind
    what: str
    """First line of the error, or how the process was lost."""
    silent_s: float = 0.0
    """Seconds of silence before the failure was detected."""
    node: str = ""
    """Name of the rank's node in the journal, or empty if the supervisor could not report it."""

    @property
    def is_of_network(self) -> bool:
        """Whether NCCL reported an error in this rank's own network, rather than only in a peer's."""
        return _NETWORK_TEXT.search(self.what) is not None

    @property
    def without_numbers(self) -> str:
        """The error text, but without the numbers of an out-of-memory error, which differ slightly each time."""
        return re.sub(r"\d+(\.\d+)?", "#", self.what) if OUT_OF_MEMORY in self.what else self.what


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Cause of a failed attempt."""

    kind: Kind
    reason: str
    rank: int | None
    """Rank on which the failure began, or None if it began on no rank."""
    hint: str
    is_final: bool = False
    """Whether the failure would recur after a restart of the workers."""
    node: str = ""


def raised(rank: int, error: BaseException) -> RankError:
    """Return the `RankError` of a worker that raised an error."""
    return RankError(rank=rank, kind=kind_of(error, rank), what=one_line(error))


def kind_of(error: BaseException, rank: int) -> Kind:
    """Classify an error that a rank raised."""
    if isinstance(error, BrokenRanksError):
        return "device" if rank in error.ranks else "consequence"
    if isinstance(error, RuntimeError) and _DEVICE_TEXT.search(str(error)):
        return "device"
    return "consequence" if is_consequence(error) else "raised"


def process_end(code: int, stderr: str) -> tuple[Kind, str]:
    """Classify the end of a process that raised no error, and describe it in one line."""
    how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not _FRAME.match(line)]
    if code == -signal.SIGKILL or not lines:
        # A killed process writes no reason to stderr.
        return "lost", how
    what = _shortened(f"{how}; the last lines of its stderr: {' | '.join(lines[-_LAST_LINES:])}")
    if _DEVICE_TEXT.search(stderr):
        return "device", what
    # NCCL's watchdog aborts a process whose peer is gone.
    is_abort = code == -signal.SIGABRT and _COLLECTIVE_TEXT.search(stderr)
    return "consequence" if is_abort else "lost", what


def lost(rank: int, text: str) -> RankError:
    """Return the `RankError` of a worker whose process is gone, given Ray's error text."""
    silent = _NO_ANSWER.search(text)
    if _MEMORY_MONITOR.search(text):
        what = "killed by Ray's memory monitor, because its node ran low on memory"
    elif _NODE_DIED.search(text):
        what = "the node died"
    elif silent:
        what = f"no answer for {float(silent[1]):.0f} s"
    elif _DISCONNECTED.search(text):
        # Ray knows only that the process is gone and raised no error.
        what = "killed by signal 9"
    elif _UNREACHABLE.search(text):
        what = "the process can't be reached"
    elif _DIED.search(text):
        what = "the process died, and Ray gives no reason"
    else:
        what = _shortened(text)
    return RankError(rank=rank, kind="lost", what=what)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports that another rank did not respond."""
    if isinstance(error, PeerError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    # Gloo raises plain RuntimeErrors. Our own errors, and a GPU that is out of memory, do not match the pattern.
    is_plain = type(error).__module__ == "builtins" and isinstance(error, RuntimeError | ConnectionError | TimeoutError)
    return bool(names & _COLLECTIVE_TYPES) or (is_plain and _COLLECTIVE_TEXT.search(str(error)) is not None)


def root_cause(errors: Sequence[RankError], *, is_final: bool = False) -> Cause:
    """Return the cause of a failed attempt, given one error for each rank that has ended; at least one."""
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
        reason = f"worker {first.rank}{where} lost contact with the others: {first.what}"
    else:
        reason = f"lost {_workers(ranks)} ({first.what})"
    hint = _hint(first)
    return Cause(kind=first.kind, reason=reason, rank=first.rank, hint=hint, is_final=is_final, node=first.node)


def _order(error: RankError) -> tuple[int, bool, bool, int]:
    """Return the sort key of an error: causes come before the errors that they may have caused."""
    is_abort = _ABORTED.match(error.what) is not None
    return _RANK_KINDS.index(error.kind), is_abort, not error.is_of_network, error.rank


def one_line(error: BaseException) -> str:
    """Return an error's type and the first non-empty line of its text."""
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
        return "give the node more memory or fewer workers, or reduce the workers' memory use (see `ray-ulysses plan`)"
    if "ran out of memory" in error.what:
        return "use the settings in the error, or lower memory.device_gib and see `ray-ulysses plan CONFIG --fit`"
    if "out of memory" in error.what.lower():
        return (
            "reduce memory use per worker: increase parallel.sp_size or memory.attention_head_groups, or set "
            "memory.offload_optimizer: cpu; `ray-ulysses plan` shows all terms"
        )
    if error.is_of_network:
        return (
            f"check the network of {error.node or 'that node'} and its links to other nodes (NCCL_DEBUG=INFO in "
            "the workers' environment logs the failed call), or remove the node from the cluster"
        )
    if error.kind == "device":
        return (
            f"check the driver's reports on {error.node or 'its node'} (`dmesg | grep -i xid`, `nvidia-smi -q`), "
            "then reset or replace the GPU, or remove the node from the cluster"
        )
    if error.kind == "lost" and "is gone" in error.what:
        return (
            "check whether the node died, or whether the kernel killed the process when memory ran out (see `dmesg` on "
            "the node)"
        )
    if error.kind == "lost" and "signal" in error.what:
        return (
            "the kernel may have killed the process when memory ran out (see `dmesg` on its node), or the process may "
            "have crashed (see the end of its log)"
        )
    if error.kind == "raised":
        return "fix the cause; that worker's log has the full error"
    if error.kind == "consequence":
        return (
            "find out from the other workers' logs what delayed them; increase elastic.collective_timeout_s if they "
            "were only slow"
        )
    return "repair or replace the node"


def failures_that_count(past: Sequence[EndEvent], *, now: float, step: int | None, window_s: float) -> int:
    """Return the number of earlier failures that count towards the limit in addition to the current one.

    Failures before the newest checkpoint do not count: a fault that recurs before the next checkpoint is attributed to
    the program, and a later fault to chance.

    Args:
        past: Earlier failures of the same command. Failures that were not counted then do not count now.
        now: Current time, in seconds since the epoch.
        step: Newest committed step, or None if unknown, which is treated as no progress.
        window_s: Age in seconds beyond which a failure does not count.
    """
    return sum(
        failure.failure is not None
        and now - failure.time <= window_s
        and not (step is not None and failure.committed_step is not None and failure.committed_step < step)
        for failure in past
    )
