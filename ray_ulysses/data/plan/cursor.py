"""A run's position in its data: five numbers from which a run of any world size can resume."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ray_ulysses.errors import UserError
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, Whole, adapter, checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The position after some completed steps.

    Attributes:
        segment: Number of the plan's segment.
        plan_id: The plan that the rows belong to.
        epoch: Epoch of the next row (of the last one when none is left).
        next_row: First global row that has not been trained on.
        step: Optimizer steps completed.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    segment: Whole
    plan_id: str
    epoch: Whole
    next_row: Whole
    step: Whole

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Cursor:
        """Return the cursor that ``to_json`` described.

        Raises:
            UserError: A field is missing, unknown or wrong.
        """
        try:
            return checked(adapter(cls), fields)
        except ContentError as error:
            raise UserError(f"data cursor {fields!r}: {error}; resume from another step") from error
