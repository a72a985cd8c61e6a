"""Finds the root cause of a failed attempt among the errors that it caused on other ranks (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ray_ulysses.errors import PeerError

OUT_OF_MEMORY = "ran out of memory"
"""What the text of a failure for lack of memory holds."""

Kind = Literal["preempted", "lost", "raised", "consequence", "start", "controller"]
"""A node that was taken away as announced, a worker whose process is gone, an error of a worker's own, an error that
another rank's end has caused, workers that did not start, and the end of the process that supervises them."""

_RANK_KINDS: tuple[Kind, ...] = ("preempted", "lost", "raised", "consequence")
"""Each kind can cause those after it: a worker that has raised lives until the group is ended, so that a worker that is
gone failed first."""
_MOST_RANKS = 8
_MOST_CHARACTERS = 400
_COLLECTIVE_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
_COLLECTIVE_TEXT = re.compile(
    r"gloo/|connection closed by peer|connection reset by peer|connection refused|broken pipe|socket (closed|timeout)"
    r"|timed out waiting \d+ ?ms for (recv|send)|NCCL|ProcessGroup|store.*(timed out|timeout)",
    re.IGNORECASE,
)
_MEMORY_MONITOR = re.compile(r"(running|ran) low on memory|memory pressure", re.IGNORECASE)
_NODE_DIED = re.compile(r"node (has died|died|was terminated|is dead|failure)|node .{0,80}marked dead", re.IGNORECASE)
_NO_ANSWER = re.compile(r"health check has been hanging for ([\d.]+)")
_UNREACHABLE = re.compile(r"actor \w+ is unavailable")
_DIED = re.compile(r"actor died unexpectedly", re.IGNORECASE)
_DISCONNECTED = re.compile(r"connection error code 2|end of file", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """The end of one rank's worker.

    Attributes:
        rank: The rank.
        kind: A kind of `_RANK_KINDS`.
        what: The error in one line, or how the process was lost.
        silent_s: Seconds without a sign of life before that was noticed.
    """

    rank: int
    kind: Kind
    what: str
    silent_s: float = 0.0

    @property
    def without_numbers(self) -> str:
        """What happened; of a lack of memory without its numbers, which differ a little each time."""
        return re.sub(r"\d+(\.\d+)?", "#", self.what) if OUT_OF_MEMORY in self.what else self.what


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why an attempt failed.

    Attributes:
        kind: The kind of failure.
        reason: The failure in one line.
        rank: The rank on which it began; None if on none.
        hint: What a person can do about it.
        is_final: Whether it would recur if the workers were started again.
    """

    kind: Kind
    reason: str
    rank: int | None
    hint: str
    is_final: bool = False


def raised(rank: int, error: BaseException) -> RankError:
    """Return how a worker ended that raised an error."""
    return RankError(rank=rank, kind="consequence" if is_consequence(error) else "raised", what=one_line(error))


def lost(rank: int, text: str) -> RankError:
    """Return how a worker ended whose process is gone.

    Args:
        rank: Its rank.
        text: Ray's error.
    """
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
    first = min(errors, key=lambda error: (_RANK_KINDS.index(error.kind), error.rank))
    ranks = sorted(error.rank for error in errors if (error.kind, error.what) == (first.kind, first.what))
    if first.kind == "raised":
        reason = f"worker {first.rank} raised {first.what}"
    elif first.kind == "consequence":
        reason = f"worker {first.rank} lost touch with the others: {first.what}"
    else:
        reason = f"lost {_workers(ranks)} ({first.what})"
    return Cause(kind=first.kind, reason=reason, rank=first.rank, hint=_hint(first), is_final=is_final)


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
            "reduce a worker's memory: raise parallel.sp_size or memory.attention_chunks, set "
            "memory.offload_optimizer: cpu; `ray-ulysses plan` shows the terms"
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
