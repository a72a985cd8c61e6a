"""Reads the rows of each step for one rank, ahead of training."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.read_ahead import LateError, ReadAhead
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.errors import RunError

ROW_SHARE = 0.8
"""Share of ``elastic.collective_timeout_s`` for which a rank waits for a row: the other ranks, which wait for it in a
collective, would give up with a lesser reason."""
CLOSE_TIMEOUT_S = 5.0
"""How long ``close`` waits for a read that is under way, which a storage that is away may hold up."""


class DirectSource:
    """Provides a rank's slices, one per micro-batch, from any step on; reads the corpus in this process.

    Attributes:
        num_direct: Slices of the last step that were read here because the stream had not started; None if
            rows are not streamed.
    """

    num_direct: int | None = None
    _late = "the storage of the corpora does not answer: repair it"

    def __init__(
        self,
        reader: RowReader,
        plan: Plan,
        dp_rank: int,
        dp_size: int,
        sp_rank: int,
        sp_size: int,
        *,
        ring_size: int = 1,
        prefetch_rows: int = 2,
        timeout_s: float | None = None,
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._sp_rank = sp_rank
        self._sp_size = sp_size
        self._ring_size = ring_size
        self._prefetch_rows = prefetch_rows
        self._timeout_s = timeout_s
        self._ahead: ReadAhead[RowSlice] | None = None
        self._next_step = 0

    def step(self, step: int) -> Iterator[RowSlice]:
        """Yield this rank's slices of step ``step`` (from 1 on), one per micro-batch.

        After the first step, steps must be requested in order, and by every rank.

        Raises:
            UserError: A shard can't be read.
            RunError: No row arrived in time, or the stream failed.
        """
        schedule = self._plan.step_schedule(step, self._dp_size)
        if self._ahead is None or self._next_step != step:
            self.close()
            self._ahead = ReadAhead(self._slices_from(step), self._prefetch_rows)
        # Until the last slice is out the position is unknown, so a repeated step starts over.
        self._next_step = 0
        for _ in schedule:
            yield self._next(step)
        self._next_step = step + 1

    def close(self) -> None:
        """Stop reading ahead, as often as it is called; the next step starts over."""
        if self._ahead is not None:
            self._ahead.close(CLOSE_TIMEOUT_S)
            self._ahead = None
            self._next_step = 0

    def _next(self, step: int) -> RowSlice:
        """Return the next slice, which is one of the step."""
        assert self._ahead is not None
        try:
            return self._ahead.next(self._timeout_s)
        except LateError as error:
            raise RunError(
                f"step {step}: {error} ({ROW_SHARE:g} of elastic.collective_timeout_s): {self._late}; then run the "
                "same command to resume"
            ) from error

    def _slices_from(self, first_step: int) -> Iterator[RowSlice]:
        return map(self._read, self._rows_from(first_step))

    def _rows_from(self, first_step: int) -> Iterator[int | None]:
        """Yield this rank's row of each micro-batch from a step on; None for a filler."""
        for step in range(first_step, self._plan.num_steps + 1):
            for micro_batch in self._plan.step_schedule(step, self._dp_size):
                yield micro_batch[self._dp_rank]

    def _read(self, row: int | None) -> RowSlice:
        if row is None:
            return self._reader.filler(self._sp_rank, self._sp_size, self._ring_size)
        return self._reader.read("train", row, self._sp_rank, self._sp_size, self._ring_size)
