"""What ranks know apart becomes what all of them know, in the collective that every step ends with anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from ray_ulysses.checkpoint.triggers import Agreed


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What one rank has to say after a step; each becomes true for all when one rank says so.

    Attributes:
        time_is_up: Rank 0: the rule of minutes asks for a checkpoint.
        asked: Rank 0: somebody asked for a checkpoint.
        notice: A node is going to be taken away.
        failed: The save before has failed.
        stop: Rank 0: the run was asked to stop.
        resize: Rank 0: it is to stop because its size is to change.
        saving: A checkpoint is being written.
        ended: The save before has failed in a way that ends the attempt.
    """

    time_is_up: bool = False
    asked: bool = False
    notice: bool = False
    failed: bool = False
    stop: bool = False
    resize: bool = False
    saving: bool = False
    ended: bool = False

    def to_counts(self) -> list[int]:
        """Return the flags as numbers that are added up over the ranks."""
        return [int(flag) for flag in astuple(self)]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Flags:
        """Return what at least one rank has said, from the sums over all of them."""
        return cls(**{field.name: count > 0 for field, count in zip(fields(cls), counts, strict=True)})

    def agreed(self) -> Agreed:
        """Return what decides about a checkpoint.

        A failure counts once every rank's thread has come to its end: a rank that hears of it later would otherwise
        repeat a save that the others have begun already.
        """
        return Agreed(
            time_is_up=self.time_is_up,
            asked=self.asked,
            notice=self.notice,
            failed=self.failed and not self.saving,
            stop=self.stop,
            resize=self.resize,
            all_idle=not self.saving,
        )


NUM_FLAGS = len(fields(Flags))
