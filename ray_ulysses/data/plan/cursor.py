"""Where a run stands in its data: five numbers from which any world size goes on at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The position after some completed steps.

    Attributes:
        segment: Branch of the plan, from 0 on.
        plan_id: The plan that the rows are of.
        epoch: Epoch of the next row (of the last one when none is left).
        next_row: First global row that has not been trained on.
        step: Optimizer steps completed.
    """

    segment: int
    plan_id: str
    epoch: int
    next_row: int
    step: int

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Cursor:
        """Return the cursor that ``to_json`` described.

        Raises:
            UserError: A field is missing, unknown, or of another type.
        """
        types = {"segment": int, "plan_id": str, "epoch": int, "next_row": int, "step": int}
        if set(fields) != set(types) or any(type(fields[name]) is not kind for name, kind in types.items()):
            raise UserError(f"data cursor {fields!r}: must hold exactly {', '.join(types)}; resume from another step")
        return cls(**fields)
